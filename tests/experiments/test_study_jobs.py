"""The studies in jobs/ and tune/: every configuration is valid, and the paper's values are in their cells."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from helpers import each_method

from raydfl.core import registry
from raydfl.core.yaml import parse_yaml
from raydfl.engine.config import load_config
from raydfl.experiments.load import load_study
from raydfl.experiments.protocol import TRIALS
from raydfl.experiments.settings import StudySettings

JOBS = Path(__file__).resolve().parents[2] / "jobs"
TUNE = JOBS.with_name("tune")
# Cells: data sets (or conditions) x methods. Runs: 5 seeds, 5 sessions, 5 or 10 folds; twins have 3 seeds.
SIZES = {
    "fedmlac_literal": (24, 24),
    "fedmlac/table4": (7 * 7, 7 * (5 + 5 + 5 + 4 * 10)),
    "fedmlac/table5": (3 * 4 * 7, 4 * 7 * (5 + 5 + 10)),
    "fedmlac/table6": (4 * 4 * 8, 4 * 8 * (5 + 5 + 5 + 10)),
    "fedmlac/table7": (4 * 4 * 8, 4 * 8 * (5 + 5 + 5 + 10)),
    "fedmlac/figure2": (6 * 4, 4 * (5 + 5 + 5 + 3 * 10)),
    "fedmlac/figure3": (6 * 5, 5 * (5 + 5 + 5 + 3 * 10)),
    "fedmlac/table4_twin": (3 * 8, 3 * 8 * 3),
    "fedmlac/table5_twin": (4 * 8, 4 * 8 * 3),
    "fedmlac/table6_twin": (4 * 9, 4 * 9 * 3),
    "fedmlac/table7_twin": (4 * 9, 4 * 9 * 3),
    "fedmlac/figure2_twin": (2 * 4, 2 * 4 * 3),
    "fedmlac/figure3_twin": (3 * 4, 3 * 4 * 3),
    "fedstar/table4_speech_commands": (4 * 4 * 3, 4 * 4 * 3 * 3),
    "fedstar/table4_ambient_contexts": (4 * 4 * 3, 4 * 4 * 3 * 3),
    "fedstar/table4_voxforge": (4 * 4 * 3, 4 * 4 * 3 * 3),
    "fedstar/table6": (4 * 4, 4 * 4 * 3),
    "profila/table1": (4 * 13, 4 * 13 * 5),
    "profila/table1_as_published": (4 * 6, 4 * 6 * 5),
    "profila/table2": (2 * 3 * 4, 2 * 3 * 4 * 5),
    "fedstar/table3": (3 * 5, 3 * 5 * 3),
    "fedstar/table5": (3 * 4 * 4, 3 * 4 * 4 * 3),
    "fedstar/table6_pretrained": (4 * 4 * 2, 4 * 4 * 2 * 3),
    "fedstar/figure2": (4 * 4 * 2, 4 * 4 * 2 * 3),
    "fedstar/figure3": (4 * 4 * 2, 4 * 4 * 2 * 3),
    "fedstar/figure5": (3 * 5 * 2, 3 * 5 * 2 * 3),
    "fedmlac/trimming": (4 * 2 * 5, 2 * 5 * (5 + 5 + 5 + 10)),
    "fedmlac/trimming_twin": (2 * 2, 2 * 2 * 3),
    "modality_mirror/table1": (2 * 5 * 5, 2 * 5 * 5 * 3),
    "modality_mirror/figure2": (2 * 3, 2 * 3 * 3),
    "modality_mirror/figure3": (5 * 2, 5 * 2 * 3),
    "matrix": (12 * 12, 12 * 12),
    "matrix_tiny": (3 * 2, 3 * 2),
    "tiny_sweep": (2 * 2, 2 * 2 * 2),
}
LARGE = {name for name, (_, runs) in SIZES.items() if runs > 60}
SEARCHES = {"fedapta_kept", "groups", "groups_tuning", "mirror_teacher"}
"""Studies whose check takes more than a second."""
PUBLISHED = {
    "fedmlac/table4": 7 * 5,
    "fedmlac/table5": 3 * 4 * 5,
    "fedmlac/table6": 4 * 4 * 6,
    "fedmlac/table7": 4 * 4 * 6,
    "profila/table1": 4 * 5,
    "profila/table1_as_published": 4 * 5,
    "profila/table2": 2 * 2 * 4,
    "fedmlac/trimming": 4 * 5,
    "fedstar/table3": 3 * 5,
    "fedstar/table4_speech_commands": 4 * 4 * 2,
    "fedstar/table4_ambient_contexts": 4 * 4 * 2,
    "fedstar/table4_voxforge": 4 * 4 * 2,
    "fedstar/table5": 3 * 4 * 2,
    "fedstar/table6": 4 * 4,
    "fedstar/table6_pretrained": 4 * 4 * 2,
    "fedstar/figure2": 4,
    "modality_mirror/table1": 2 * 5 * 4,
    "modality_mirror/figure3": 3,
}
WEIGHTS = ("runs/cola/model.safetensors", "data/resnet18-5c106cde.pth", "data/SSAST-Tiny-Patch-400.pth")
"""Files that users supply. Loading a study checks that they exist."""


def test_every_grid_has_a_listed_size_and_every_table_a_twin() -> None:
    bases = {
        "fsdd",
        "gsc_shape",
        "quickstart",
        "tiny",
        "fedmlac/gsc",
        "fedmlac/iemocap",
        "fedmlac/crema_d",
        "fedmlac/urbansound8k",
        "fedstar/fsdd",
        "fedstar/speech_commands",
        "fedstar/ambient_contexts",
        "fedstar/voxforge",
        "fedstar/cola",
        "profila/machines",
        "profila/mimii",
    }
    folders = ("", "fed*/", "profila/", "modality_mirror/")
    paths = [path for folder in folders for path in JOBS.glob(f"{folder}*.yaml")]
    names = {str(path.relative_to(JOBS).with_suffix("")) for path in paths}
    assert set(SIZES) <= names
    assert names & (set(SIZES) | bases) == set(SIZES) | bases
    papers = {name for name in SIZES if name.startswith("fedmlac/") and not name.endswith("_twin")}
    assert {f"{name}_twin" for name in papers} == {name for name in SIZES if name.endswith("_twin")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LARGE else []) for n in SIZES])
def test_every_configuration_of_a_grid_is_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDFL_DATA", str(tmp_path / "data"))
    for file in WEIGHTS:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    study = load_study(JOBS / f"{name}.yaml")
    assert (len(study.cells), len(study.trials)) == SIZES[name]
    scores = study.settings.paper_scores()
    assert len(scores) == PUBLISHED.get(name, 0)
    assert set(scores) <= set(study.cells)


ONE = {
    "table4": "GSC",
    "table5": "CREMA-D",
    "table6": "IEMOCAP",
    "table7": "UrbanSound8K",
    "figure2": "GSC",
    "figure3": "IEMOCAP",
}


@pytest.mark.parametrize("name", ONE)
def test_fedmlacs_published_protocol_follows_the_paper(name: str) -> None:
    study = load_study(JOBS / "fedmlac" / f"{name}.yaml", only=[f"data={ONE[name]}", "method=FedMLAC"])
    for run in study.trials:
        train, data = run.config.train, run.config.data
        assert (train.rounds, train.local_epochs, train.batch_size, train.optimiser.lr) == (5000, 1, 16, 0.01)
        assert (data.features.bands, data.features.window, data.features.hop) == (128, 1024, 160)
        assert run.config.method["form"] == "literal"
        assert run.metric.score == ("accuracy" if ONE[name] == "GSC" or name.startswith("figure") else "macro_f1")
    folds = {"GSC": 5, "IEMOCAP": 5, "CREMA-D": 5, "UrbanSound8K": 10}[ONE[name]]
    assert len({run.identity for run in study.trials}) == folds * len(study.cells)


def test_fedstars_protocol_follows_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDFL_DATA", "/recordings")
    for name in ("speech_commands", "ambient_contexts", "voxforge"):
        config = load_config(JOBS / "fedstar" / f"{name}.yaml")
        train, features, crop = config.train, config.data.features, config.data.first_view.pipeline.crop
        assert (train.rounds, train.cohort_size(15), train.local_epochs, train.batch_size) == (100, 12, 1, 64)
        assert (train.optimiser.name, train.optimiser.lr, train.optimiser.eps) == ("adam", 0.001, 1e-7)
        assert (features.window, features.hop, features.points, features.bands) == (400, 160, 1024, 64)
        assert crop is not None
        assert (features.frames_within(15_690), crop.size) == (96, 96)
        assert features.hop * (crop.stride or 0) == 15_680
        assert (config.components.method.beta, config.data.unlabelled.keep) == (0.5, 0.03)


def test_bases_of_studies_are_valid_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDFL_DATA", "/recordings")
    roots = {
        name: load_config(JOBS / "fedmlac" / f"{name}.yaml").data.source.options["root"]
        for name in ("gsc", "iemocap", "crema_d", "urbansound8k")
    }
    assert roots["gsc"] == "/recordings/speech_commands_v0.02"
    assert roots["urbansound8k"] == "/recordings/UrbanSound8K"


@pytest.mark.parametrize(
    ("file", "labels", "mean", "spread"),
    [
        ("fedmlac/table4", ("GSC", "FedMLAC"), 84.59, 0.19),
        ("fedmlac/table4", ("UrbanSound8K a=1.0", "FedOPT"), 53.03, 4.93),
        ("fedmlac/table5", ("UrbanSound8K", "50 %", "FedMLAC"), 57.15, 5.24),
        ("fedmlac/table5", ("CREMA-D", "10 %", "FedAvg"), 59.87, 4.02),
        ("fedmlac/table6", ("IEMOCAP", "10 dB", "FedMLAC w/o LPA"), 42.57, 4.82),
        ("fedmlac/table7", ("UrbanSound8K", "0.5", "FedMLAC"), 44.98, 3.54),
        ("fedmlac/trimming", ("CREMA-D", "trimmed", "FedKAD"), 62.17, 4.08),
        ("fedstar/table3", ("VoxForge", "centralised"), 79.60, None),
        ("fedstar/table3", ("Speech Commands", "30"), 94.62, None),
        ("fedstar/table4_speech_commands", ("30", "3 %", "supervised"), 33.78, None),
        ("fedstar/table4_ambient_contexts", ("15", "50 %", "FedSTAR"), 62.41, None),
        ("fedstar/table4_voxforge", ("5", "50 %", "supervised"), 70.37, None),
        ("fedstar/table5", ("25 %", "5 %", "FedSTAR"), 84.15, None),
        ("fedstar/table6", ("20 %", "80 %"), 93.07, None),
        ("fedstar/table6_pretrained", ("50 %", "20 %", "COLA"), 90.70, None),
        ("fedstar/figure2", ("80 %", "3 %", "FedSTAR"), 86.82, None),
        ("modality_mirror/table1", ("ActivityNet", "40 %", "MultiFL"), 12.55, None),
        ("modality_mirror/figure3", ("30 %", "ModalityMirror"), 40.43, 0.64),
    ],
)
def test_published_values_are_in_their_cells(
    file: str, labels: tuple[str, ...], mean: float, spread: float | None
) -> None:
    path = JOBS / f"{file}.yaml"
    settings = StudySettings.model_validate(parse_yaml(path.read_text(), str(path)))
    scores = settings.paper_scores()
    assert scores[labels] == (mean, spread)
    assert len(scores) == PUBLISHED[file]


@pytest.mark.parametrize(
    ("figure", "only", "shared"), [("figure2", [], 18), ("figure3", ["missing=10 %,30 %,50 %"], 18)]
)
def test_the_figures_of_modality_mirror_share_cells_of_its_table(
    figure: str, only: list[str], shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDFL_DATA", str(tmp_path / "data"))
    for file in WEIGHTS:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    table = {run.identity for run in load_study(JOBS / "modality_mirror/table1.yaml").trials}
    runs = {run.identity for run in load_study(JOBS / f"modality_mirror/{figure}.yaml", only=only).trials}
    assert runs <= table
    assert len(runs) == shared


def test_clean_cells_of_the_tables_are_shared() -> None:
    """Tables 4 to 7 all contain the clean cell with 20 % of the clients, and share its runs."""

    def list_identities(name: str, *only: str) -> set[str]:
        study = load_study(JOBS / "fedmlac" / f"{name}.yaml", only=["data=GSC", "method=FedAvg", *only])
        assert study.folder.name == "fedmlac"
        return {run.identity for run in study.trials}

    assert list_identities("table4") == list_identities("table5", "active=20 %")
    assert (
        list_identities("table4")
        == list_identities("table6", "noise=clean")
        == list_identities("table7", "error_rate=0.0")
    )


# -- searches --------------------------------------------------------------------------------------------------------


NOT_SEARCHED = {
    "rule": "the choice of the aggregation is a separate question",
    "objective": "the choice of the objective is a separate question",
    "lpa": "FedMLAC: an ablation",
    "mutual": "FedMLAC: an ablation",
    "learn_from": "FedSTAR: its baselines",
    **dict.fromkeys(("ratio_of", "share_of", "heads", "cohort"), "two readings of a paper"),
    "weight": "FedSTAR: two readings of the paper",
    "rising_rounds": "FedSTAR: the rounds of the run",
    "ratio_from": "limits of the devices are part of the problem",
    "speed_from": "FedMP: speeds of the devices are part of the problem",
    "share": "limits of the devices are part of the problem",
    "generated_epochs": "FedGen: more than the passes of a round",
    "student": "methods of several views: the student's view is part of the problem",
    **dict.fromkeys(
        ("centre_of", "anomalous_share", "push", "margin", "contrast", "contrast_temperature"),
        "ProFiLA: for anomalies in training",
    ),
    "total_rounds": "ProFiLA: the rounds of the run",
    "first_round": "ProFiLA: two readings of the code",
    "steer": "ProFiLA: the available steering metric is part of the problem",
    "lr_min": "ProFiLA: bounds of searched values",
    "lr_max": "ProFiLA: bounds of searched values",
    "strong": "FedSTAR: needs a user's view",
}


@pytest.mark.parametrize("name", each_method(registry.names("raydfl.methods")))
def test_every_method_has_a_search_space_of_all_its_fields(name: str) -> None:
    study = load_study(TUNE / f"{name}.yaml")
    assert study.first.config.method["name"] == name
    fields = {item.name for item in dataclasses.fields(study.first.config.components.method)} - {"objective"}
    domains = {key.partition(".")[2] for key in study.settings.domains if key.startswith("method.")}
    assert domains == fields - set(NOT_SEARCHED)


def test_every_file_in_tune_is_a_valid_study() -> None:
    files = sorted(TUNE.glob("*.yaml"))
    assert {file.stem for file in files} == {*registry.names("raydfl.methods"), "tiny", "fedmlac_pbt"}
    for file in files:
        assert f"raydfl search tune/{file.name}" in file.read_text()
        assert parse_yaml(file.read_text(), str(file))["title"]
        if file.stem in ("tiny", "fedmlac_pbt"):  # the test above loads the rest
            load_study(file)


SLOW_TO_LOAD = SEARCHES | {"fedapta", "fedapta_tuning"}
"""Studies with hundreds of configurations."""
STUDIES = [
    path
    for path in sorted((JOBS.with_name("benchmarks") / "studies").glob("*.yaml"))
    if not path.stem.endswith("_base")
]


@pytest.mark.parametrize(
    "file",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in SLOW_TO_LOAD else []) for path in STUDIES],
    ids=lambda path: path.stem,
)
def test_a_study_of_the_evidence_is_confirmatory_or_exploratory_or_tunes_one(file: Path) -> None:
    study = load_study(file, ["tuned=null"])
    if file.stem.endswith("_tuning"):
        assert study.samples >= TRIALS
        assert study.settings.searcher == "grid"
    else:
        assert study.settings.confirmatory or study.settings.exploratory
    assert study.settings.results == Path("../results") / file.stem
