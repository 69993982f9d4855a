"""Proposals of ``raydfl data info``. Oracle: the printed lines, parsed and applied to the same list of clips."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydfl.cli.owners import propose_owners
from raydfl.cli.proposal import find_proposal, propose
from raydfl.core.errors import DataError
from raydfl.core.yaml import parse_yaml
from raydfl.data import Assignment, assign_clips, list_clips
from raydfl.engine.config import Config, make_config
from raydfl.engine.overrides import apply_overrides


def configure(root: Path, files: list[str], **data: Any) -> Config:
    """Return a configuration on empty files with an unsuitable default split."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return make_config(
        {"method": "fedavg", "data": {"name": "folder", "root": str(root), **data}, "ray": {"actors": 0}}
    )


def apply_proposal(config: Config) -> tuple[Config, Config, list[str]]:
    """Return the configurations of the printed YAML and of the printed command, and the printed lines."""
    lines = list(propose(config, ["FILE"]))
    text = "\n".join(lines)
    yaml = text.partition("Add to FILE:\n")[2].partition("next: ")[0]
    values = config.model_dump(mode="json")
    proposed = parse_yaml(yaml, "the proposal")
    merged = {**values, **proposed, **{group: {**values[group], **proposed[group]} for group in ("data", "train")}}
    command = shlex.split(text.partition("\nnext: ")[2].partition("\n")[2].replace("\\\n", ""))
    assert command[:3] == ["raydfl", "run", "FILE"]
    return make_config(merged), make_config(apply_overrides(values, command[3:])), lines


def count_clips(config: Config) -> tuple[list[int], int]:
    """Count the clips of each client and of the test set."""
    tables = assign(config)
    local = tables.has_role("train", "validation", "client_test")
    assert set(tables.codes("label")[local]) == set(range(len(tables.classes)))
    return tables.sizes().tolist(), int(tables.has_role("test").sum())


def assign(config: Config) -> Assignment:
    """Assign the clips of a configuration as in a run."""
    return assign_clips(*list_clips(config.data, config.run.seed), config.data, config.run.seed, config.labels_needed)


SPEAKERS = r"^(?P<group>s\d+)_"
CASES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "speakers": (
        [f"{label}/s{s}_{take}.wav" for label in ("yes", "no") for s in range(10) for take in range(3)],
        {"group_pattern": SPEAKERS},
        {"test": {"by": "group", "fraction": 0.2}, "by": "group", "clients": 8, "held_out": 12},
    ),
    "nobody's": (
        [f"{label}/{take}.wav" for label in ("yes", "no") for take in range(50)],
        {},
        {"test": {"by": "clip", "fraction": 0.2}, "by": "dirichlet", "clients": 5, "held_out": 20},
    ),
    "official split": (
        [
            f"{part}/{label}/{s}.wav"
            for part in ("train", "test")
            for label in ("yes", "no")
            for s in ("s1_a", "s2_b", "s3_c")
        ],
        {"group_pattern": SPEAKERS},
        {"test": {"by": "split"}, "by": "group", "clients": 3, "held_out": 6},
    ),
    "two speakers, no class in common": (
        [f"{label}/s{number % 2}_0.wav" for number, label in enumerate("abcdefgh")],
        {"group_pattern": SPEAKERS},
        {"test": None, "by": "group", "clients": 2, "held_out": 0},
    ),
    "few of each": (
        [f"{label}/{take}.wav" for label in "abcde" for take in range(2)],
        {},
        {"test": {"by": "clip", "fraction": 0.3}, "by": None, "clients": 2, "held_out": 5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_proposals_fit_and_their_yaml_and_command_agree(tmp_path: Path, case: str) -> None:
    files, data, expected = CASES[case]
    from_yaml, from_command, _ = apply_proposal(configure(tmp_path / "data", files, **data))
    assert from_yaml.digest() == from_command.digest()
    test = from_command.data.split.test
    assert (None if test is None else test.model_dump(exclude_none=True)) == expected["test"]
    assert expected["by"] in (None, from_command.data.partition.by)
    clients, held_out = count_clips(from_command)
    assert (len(clients), held_out) == (expected["clients"], expected["held_out"])
    assert 1 <= from_command.train.cohort_size(len(clients)) <= len(clients)


@pytest.mark.parametrize(
    ("clients", "clips", "expected"),
    [(60, 45, (12, 1, 16, 250)), (6, 450, (6, 1, 16, 50)), (4, 5, (4, 2, 4, 25)), (25, 8, (10, 2, 4, 63))],
)
def test_rounds_make_fifty_passes(tmp_path: Path, clients: int, clips: int, expected: tuple[int, ...]) -> None:
    """A fifth of the speakers is held out for the test."""
    speakers = clients + round(clients / 4)
    files = [f"{take % 2}/s{speaker}_{take}.wav" for speaker in range(speakers) for take in range(clips)]
    _, config, lines = apply_proposal(configure(tmp_path / "data", files, group_pattern=SPEAKERS))
    train = config.train
    assert len(count_clips(config)[0]) == clients
    assert (train.cohort, train.local_epochs, train.batch_size, train.rounds) == expected
    assert 50 <= train.rounds * expected[0] * expected[1] / clients < 51
    assert train.optimiser.lr == 0.003
    assert "about 50 passes" in " ".join(" ".join(lines).split())


OWNERS: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "machines": (["fan", "pump", "valve"], ["normal", "abnormal"], {"data.owner_folders": True}),
    "conditions first": (["normal", "abnormal"], ["fan", "pump"], {"data.group_pattern": "^(?P<group>[^/]+)/"}),
    "numbered speakers": (["speaker1", "speaker2"], ["yes", "no", "stop"], {"data.owner_folders": True}),
    "numbered speakers inside": (["yes", "no", "stop"], ["s1", "s2"], {"data.group_pattern": "^(?P<group>[^/]+)/"}),
    "names of speakers": (["anna", "bob", "carl"], ["yes", "no"], {"data.owner_folders": True}),
    "names of speakers inside": (["yes", "no"], ["anna", "bob"], {"data.group_pattern": "^(?P<group>[^/]+)/"}),
}


@pytest.mark.parametrize("case", OWNERS)
@pytest.mark.parametrize("split", ["", "train/"])
def test_a_level_of_folders_has_the_owners(tmp_path: Path, case: str, split: str) -> None:
    first, second, expected = OWNERS[case]
    files = [f"{split}{outer}/{inner}/{take}.wav" for outer in first for inner in second for take in range(12)]
    files += [f"test/{file.removeprefix('train/')}" for file in files] if split else []
    config = configure(tmp_path, files)
    proposal = find_proposal(config)
    assert proposal is not None
    assert {key: value for key, value in proposal.settings.items() if key in expected} == expected
    assert ("data.owner_folders" in proposal.settings) != ("data.group_pattern" in proposal.settings)
    _, proposed, _ = apply_proposal(config)
    owners, classes = (second, first) if "data.group_pattern" in expected else (first, second)
    manifest, _ = list_clips(proposed.data, 1)
    assert set(manifest.column("group").to_pylist()) == set(owners)
    assert set(manifest.column("label").to_pylist()) == set(classes)


@pytest.mark.parametrize(
    "files",
    [
        [f"dog/{year}/{take}.wav" for year in (2023, 2024) for take in range(9)],
        [f"{label}{number}/place{number}/{take}.wav" for label in "ab" for number in range(5) for take in range(3)],
        ["yes/s1/a.wav", "yes/s2/a.wav", "no/s1/a.wav", "no/s2/a.wav", "no/b.wav"],
    ],
)
def test_folders_below_few_classes_are_no_owners(tmp_path: Path, files: list[str]) -> None:
    proposal = find_proposal(configure(tmp_path, files))
    assert proposal is None or not {"data.owner_folders", "data.group_pattern"} & proposal.settings.keys()


@pytest.mark.parametrize(
    ("names", "owners", "hint"),
    [
        ([f"{speaker:02}-{take}" for speaker in range(5) for take in range(3)], 5, "are owners. If they are not"),
        ([f"{name}_{take}" for name in ("anna", "bob", "carl") for take in range(3)], 0, "set data.group_pattern="),
        ([f"clip-{take}" for take in range(9)], 0, ""),
        ([f"{take:02}-anna" for take in range(9)], 0, ""),
    ],
)
def test_names_of_files_that_begin_with_owners(tmp_path: Path, names: list[str], owners: int, hint: str) -> None:
    """Owners have two files in each class on average."""
    config = configure(tmp_path, [f"{label}/{name}.wav" for label in ("yes", "no") for name in names])
    settings, reason = propose_owners(config.data, list_clips(config.data, 1)[0])
    assert ("data.group_pattern" in settings) == bool(owners)
    assert hint in reason
    assert bool(reason) == bool(hint)
    proposal = find_proposal(config)
    assert proposal is not None
    assert (reason in proposal.reasons) == bool(hint)
    manifest, _ = list_clips(apply_proposal(config)[1].data, 1)
    assert len(manifest.column("group").drop_null().unique()) == owners


def test_clips_without_a_speaker_are_dealt_to_speakers(tmp_path: Path) -> None:
    files = [f"{label}/s{s}_{take}.wav" for label in ("yes", "no") for s in range(10) for take in range(3)]
    config = configure(tmp_path / "data", files, group_pattern=SPEAKERS)
    rows = [f"{tmp_path}/data/{file},{file.split('/')[0]},{file.split('/')[1].split('_')[0]}" for file in files]
    rows += [f"{tmp_path}/data/{files[number]}x,silence," for number in range(11)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,group", *rows]))
    manifest = {"name": "manifest", "file": str(tmp_path / "list.csv")}
    config = make_config({**config.model_dump(mode="json"), "data": manifest})
    _, config, lines = apply_proposal(config)
    assert config.data.ungrouped == "deal"
    assert config.data.partition.by == "group"
    assert sum(count_clips(config)[0]) + count_clips(config)[1] == 71
    assert any("11 clips (silence) have no group" in line for line in lines)


MACHINES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "folders of nobody": (
        [f"{condition}/{take}.wav" for condition, takes in (("normal", 60), ("abnormal", 12)) for take in range(takes)],
        {},
    ),
    "folders with machines": (
        [f"{condition}/m{m}_{take}.wav" for condition in ("Normal", "Anomaly") for m in range(3) for take in range(8)],
        {"data": {"group_pattern": r"^(?P<group>m\d)_"}, "method": "fedlc"},
    ),
    "a published training set with anomalies": (
        [
            f"{part}/{condition}/{take}.wav"
            for part in ("train", "test")
            for condition in ("normal", "abnormal")
            for take in range(20)
        ],
        {},
    ),
    "validation with anomalies": (
        [],
        {"data": {"name": "machines", "validation_clips": 5}, "objective": {"name": "compact", "size": 8}},
    ),
}


@pytest.mark.parametrize("case", MACHINES)
def test_no_client_trains_on_anomalies(tmp_path: Path, case: str) -> None:
    files, settings = MACHINES[case]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    data = settings.get("data", {})
    data = data if "name" in data else {"name": "folder", "root": str(tmp_path), **data}
    from_yaml, from_command, _ = apply_proposal(make_config({"method": "fedavg", **settings, "data": data}))
    assert from_yaml.digest() == from_command.digest()
    objective = from_command.components.method.objective
    assert len(objective.normal) == 1
    assert objective.answers == "score"
    assert (from_command.objective or {}).items() >= settings.get("objective", {"name": "reconstruct"}).items()
    tables = assign(from_command)
    anomalous = ~np.isin(tables.texts("label", ""), objective.normal)
    assert not (anomalous & tables.has_role("train")).any()
    for kind in (anomalous, ~anomalous):
        assert (tables.select(kind).sizes("client_test") > 0).all()


def test_sections_with_conditions_are_recognised_as_machines(tmp_path: Path) -> None:
    """Clients learn to classify sections here."""
    rows = [
        f"{section}_{take}.wav,{section},m{take % 3},{'anomaly' if take % 4 == 3 else 'normal'}"
        for section in ("one", "two")
        for take in range(48)
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,group,condition", *rows]))
    (tmp_path / "one_0.wav").touch()
    config = make_config({"method": "fedavg", "data": {"name": "manifest", "file": str(tmp_path / "list.csv")}})
    _, from_command, _ = apply_proposal(config)
    assert from_command.objective == config.objective
    tables = assign(from_command)
    condition = tables.texts("condition", "")
    assert set(condition[tables.has_role("train")]) == {"normal"}
    assert set(condition[tables.has_role("client_test")]) == {"normal", "anomaly"}


def test_an_objective_without_classes_is_kept(tmp_path: Path) -> None:
    config = configure(tmp_path, MACHINES["folders of nobody"][0])
    config = make_config({**config.model_dump(mode="json"), "objective": {"name": "contrast"}})
    proposal = find_proposal(config)
    assert proposal is not None
    assert "objective" not in proposal.settings
    assert proposal.settings["data.split"]["client_test"]["values"] == ["abnormal"]


@pytest.mark.parametrize("column", ["speaker", "Speaker_ID", "client_id"])
def test_a_speaker_column_determines_the_owners(tmp_path: Path, column: str) -> None:
    rows = [f"{label}{take}.wav,{label},00{take % 6},{take}" for label in ("yes", "no") for take in range(60)]
    (tmp_path / "list.csv").write_text("\n".join([f"path,label,{column},take", *rows]))
    (tmp_path / "yes0.wav").touch()
    config = make_config({"method": "fedavg", "data": {"name": "manifest", "file": str(tmp_path / "list.csv")}})
    from_yaml, from_command, lines = apply_proposal(config)
    assert from_yaml.digest() == from_command.digest()
    tables = assign(from_command)
    owners = tables.texts("group", "")
    assert set(owners) == {f"00{speaker}" for speaker in range(6)}
    assert set(tables.ids) == set(owners[tables.has_role("train")])
    assert set(tables.ids) & set(owners[tables.has_role("test")]) == set()
    assert any(f"column {column} has 6 owners" in line for line in lines)


def test_unsuitable_split_settings_are_dropped(tmp_path: Path) -> None:
    """The clients' validation share is kept if it is possible."""
    files = [f"{label}/{take}.wav" for label in ("yes", "no") for take in range(50)]
    for validation, expected in ((0.25, 0.25), ({"by": "session", "values": [1]}, 0.0)):
        config = configure(tmp_path, files, split={"validation": validation})
        from_yaml, from_command, lines = apply_proposal(config)
        assert from_yaml.data.split == from_command.data.split
        assert from_command.data.split.validation == expected
        assert any("keys of data.split do not fit" in line for line in lines) == (expected == 0)


def test_a_single_clip_gets_no_proposal(tmp_path: Path) -> None:
    config = configure(tmp_path / "data", ["yes/a.wav"])
    assert find_proposal(config) is None
    *_, reason, command = propose(config, ["FILE", "a={b: c}"])
    assert "too few" in reason
    assert command == "next: add clips, then repeat: raydfl data info FILE 'a={b: c}'"


def test_missing_recordings_are_reported(tmp_path: Path) -> None:
    config = make_config({"method": "fedavg", "data": {"name": "folder", "root": str(tmp_path / "gone")}})
    with pytest.raises(DataError, match="gone"):
        find_proposal(config)
