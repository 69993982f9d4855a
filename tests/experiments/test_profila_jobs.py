"""The studies of Fed-ProFiLA-AD in jobs/profila, on a small tree in the layout of MIMII."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from raydfl import read_rows, run
from raydfl.core.yaml import parse_yaml
from raydfl.data.build import build_population
from raydfl.experiments.load import load_study
from raydfl.experiments.settings import StudySettings
from raydfl.experiments.study import Study

JOBS = Path(__file__).resolve().parents[2] / "jobs" / "profila"
STUDIES = ("table1", "table1_as_published", "table2")


@pytest.fixture
def mimii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write four fans with ten normal and five abnormal clips each, in two channels. Return a folder for runs."""
    monkeypatch.setenv("RAYDFL_DATA", str(tmp_path))
    rng = np.random.default_rng(0)
    for machine, (condition, clips) in itertools.product(("00", "02", "04", "06"), (("normal", 10), ("abnormal", 5))):
        folder = tmp_path / "mimii" / "0_dB_fan" / "fan" / f"id_{machine}" / condition
        folder.mkdir(parents=True)
        for clip in range(clips):
            soundfile.write(folder / f"{clip:08d}.wav", 0.1 * rng.standard_normal((8000, 2)), 16_000)
    return tmp_path / "runs"


def load(name: str, folder: Path, *overrides: str) -> Study:
    common = ("train.rounds=1", "ray.actors=0", f"data.cache={folder / 'cache'}", "models.model=film_cnn_tiny")
    return load_study(
        JOBS / f"{name}.yaml",
        [*common, "objective.size=8", "repeat={run.seed: [1]}", f"dir={folder}", "evaluate.every=1", *overrides],
    )


def read_settings(name: str) -> StudySettings:
    return StudySettings.model_validate(parse_yaml((JOBS / f"{name}.yaml").read_text(), name))


CASES = [
    pytest.param(
        name, label, marks=[] if label in ("Fed-ProFiLA-AD", "Full Model", "machine ids") else pytest.mark.slow
    )
    for name in STUDIES
    for label in [*read_settings(name).axes.values()][-1]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "label"), CASES)
def test_every_run_of_a_study_measures_the_scores_of_its_cells(name: str, label: str, mimii: Path) -> None:
    study = load(name, mimii)
    trials = [trial for trial in study.trials if trial.labels[-1] == label]
    done: dict[str, set[tuple[str, str]]] = {}
    for trial in trials:
        if trial.identity not in done:
            rows = read_rows(run(trial.config).run_dir).to_pylist()
            done[trial.identity] = {
                (row["split"], row["metric"]) for row in rows if row["count"] and np.isfinite(row["value"])
            }
        assert done[trial.identity].issuperset(trial.keys[0]), trial.labels
    # All scores of a method come from one run for each protocol.
    assert len(done) == (2 if name == "table2" else 1)


@pytest.mark.parametrize(("name", "leaks"), [("table1", False), ("table1_as_published", True)])
def test_only_the_published_protocol_tests_on_training_clips(name: str, leaks: bool, mimii: Path) -> None:
    config = load(name, mimii).trials[0].config
    population = build_population(config.data, 1)
    assert tuple(population.ids) == ("fan_00", "fan_02", "fan_04", "fan_06")
    conditions = config.data.source.open().manifest().column("condition").to_pylist()
    for client in range(4):
        data = population.data(client)
        train, test = set(data.train.clips.tolist()), set(data.test.clips.tolist())
        assert (train < test) == leaks
        assert bool(train & test) == leaks
        assert Counter(conditions[clip] for clip in test) == (
            {"normal": 10, "anomaly": 5} if leaks else {"normal": 4, "anomaly": 2}
        )
        # By default methods learn from the first pool.
        learnt = Counter(conditions[clip] for clip in data.train.clips.tolist())
        assert learnt == ({"normal": 10, "anomaly": 2} if leaks else {"normal": 4})


def test_published_values_are_in_their_cells() -> None:
    for name in STUDIES[:2]:
        scores = read_settings(name).paper_scores()
        assert len(scores) == 5 * 4
        assert scores["AUC", "Fed-ProFiLA-AD"] == (90.5, None)
        assert scores["Precision", "Fed-ProFiLA-AD"] == (95.7, None)
        assert scores["Recall", "FedAvg"] == (74.8, None)
    scores = read_settings("table2").paper_scores()
    assert len(scores) == 2 * 4 * 2
    assert scores["as published", "AUC", "w/o Adaptive LR"] == (87.8, None)
