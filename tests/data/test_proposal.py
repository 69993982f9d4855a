"""What ``raydfl data info`` proposes. Oracle: the printed lines themselves, read back, divide the same list of clips."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydfl.cli.proposal import STARTS, find_proposal, propose
from raydfl.core.errors import DataError
from raydfl.core.yaml import parse_yaml
from raydfl.data import Assignment, assign_clips, list_clips
from raydfl.engine.config import Config, make_config
from raydfl.engine.overrides import apply_overrides


def configure(root: Path, files: list[str], **data: Any) -> Config:
    """A configuration on files that nobody opens, whose default split does not fit."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return make_config(
        {"method": "fedavg", "data": {"name": "folder", "root": str(root), **data}, "ray": {"actors": 0}}
    )


def read_back(config: Config) -> tuple[Config, Config, list[str]]:
    """The configurations that the printed YAML and the printed command make, and what was printed."""
    lines = list(propose(config, ["FILE"]))
    text = "\n".join(lines)
    yaml = text.partition("Add to FILE:\n")[2].partition("next: ")[0]
    values = config.model_dump(mode="json")
    beside = parse_yaml(yaml, "the proposal")
    merged = {**values, **beside, **{group: {**values[group], **beside[group]} for group in ("data", "train")}}
    command = shlex.split(text.partition("\nnext: ")[2].partition("\n")[2].replace("\\\n", ""))
    assert command[:3] == ["raydfl", "run", "FILE"]
    return make_config(merged), make_config(apply_overrides(values, command[3:])), lines


def sizes(config: Config) -> tuple[list[int], int]:
    """Clips of each client, and of the test set."""
    tables = assign(config)
    owned = tables.has_role("train", "validation", "client_test")
    assert set(tables.codes("label")[owned]) == set(range(len(tables.classes)))
    return tables.sizes().tolist(), int(tables.has_role("test").sum())


def assign(config: Config) -> Assignment:
    """The clips of a configuration as a run would assign them."""
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
def test_what_is_proposed_fits_and_both_ways_to_write_it_are_the_same(tmp_path: Path, case: str) -> None:
    files, data, expected = CASES[case]
    in_file, on_line, _ = read_back(configure(tmp_path / "data", files, **data))
    assert in_file.digest() == on_line.digest()
    test = on_line.data.split.test
    assert (None if test is None else test.model_dump(exclude_none=True)) == expected["test"]
    assert expected["by"] in (None, on_line.data.partition.by)
    clients, held_out = sizes(on_line)
    assert (len(clients), held_out) == (expected["clients"], expected["held_out"])
    assert 1 <= on_line.train.cohort_size(len(clients)) <= len(clients)


def test_the_settings_are_those_of_the_run_that_is_most_alike(tmp_path: Path) -> None:
    """Sixty clients of 45 clips are the federation that was run."""
    files = [f"{number % 10}/s{number % 75}_{number}.wav" for number in range(75 * 45)]
    _, config, lines = read_back(configure(tmp_path / "data", files, group_pattern=SPEAKERS))
    start = next(start for start in STARTS if start.clients == 60)
    train = config.train
    assert sizes(config)[0] == [45] * 60
    assert (train.cohort, train.rounds, train.batch_size, train.local_epochs) == (12, 150, 16, 1)
    assert train.optimiser.lr == start.lr
    assert start.what in " ".join(" ".join(lines).split())


def test_clips_of_nobody_among_speakers_are_dealt_out(tmp_path: Path) -> None:
    files = [f"{label}/s{s}_{take}.wav" for label in ("yes", "no") for s in range(10) for take in range(3)]
    config = configure(tmp_path / "data", files, group_pattern=SPEAKERS)
    rows = [f"{tmp_path}/data/{file},{file.split('/')[0]},{file.split('/')[1].split('_')[0]}" for file in files]
    rows += [f"{tmp_path}/data/{files[number]}x,silence," for number in range(11)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,group", *rows]))
    listed = {"name": "manifest", "file": str(tmp_path / "list.csv")}
    config = make_config({**config.model_dump(mode="json"), "data": listed})
    _, proposed, lines = read_back(config)
    assert proposed.data.ungrouped == "deal"
    assert proposed.data.partition.by == "group"
    assert sum(sizes(proposed)[0]) + sizes(proposed)[1] == 71
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
def test_no_client_trains_on_anomalies_of_machines(tmp_path: Path, case: str) -> None:
    files, settings = MACHINES[case]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    data = settings.get("data", {})
    data = data if "name" in data else {"name": "folder", "root": str(tmp_path), **data}
    in_file, on_line, _ = read_back(make_config({"method": "fedavg", **settings, "data": data}))
    assert in_file.digest() == on_line.digest()
    objective = on_line.components.method.objective
    assert len(objective.normal) == 1
    assert objective.answers == "score"
    assert (on_line.objective or {}).items() >= settings.get("objective", {"name": "reconstruct"}).items()
    tables = assign(on_line)
    anomalous = ~np.isin(tables.texts("label", ""), objective.normal)
    assert not (anomalous & tables.has_role("train")).any()
    for kind in (anomalous, ~anomalous):
        assert (tables.select(kind).sizes("client_test") > 0).all()


def test_sections_with_conditions_are_machines_too(tmp_path: Path) -> None:
    """Sections are the classes here, which clients learn to tell apart."""
    rows = [
        f"{section}_{take}.wav,{section},m{take % 3},{'anomaly' if take % 4 == 3 else 'normal'}"
        for section in ("one", "two")
        for take in range(48)
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,group,condition", *rows]))
    (tmp_path / "one_0.wav").touch()
    config = make_config({"method": "fedavg", "data": {"name": "manifest", "file": str(tmp_path / "list.csv")}})
    _, on_line, _ = read_back(config)
    assert on_line.objective == config.objective
    tables = assign(on_line)
    condition = tables.texts("condition", "")
    assert set(condition[tables.has_role("train")]) == {"normal"}
    assert set(condition[tables.has_role("client_test")]) == {"normal", "anomaly"}


def test_an_objective_without_classes_stays(tmp_path: Path) -> None:
    config = configure(tmp_path, MACHINES["folders of nobody"][0])
    config = make_config({**config.model_dump(mode="json"), "objective": {"name": "contrast"}})
    found = find_proposal(config)
    assert found is not None
    assert "objective" not in found.settings
    assert found.settings["data.split"]["client_test"]["values"] == ["abnormal"]


@pytest.mark.parametrize("column", ["speaker", "Speaker_ID", "client_id"])
def test_a_column_with_speakers_names_the_owners(tmp_path: Path, column: str) -> None:
    rows = [f"{label}{take}.wav,{label},00{take % 6},{take}" for label in ("yes", "no") for take in range(60)]
    (tmp_path / "list.csv").write_text("\n".join([f"path,label,{column},take", *rows]))
    (tmp_path / "yes0.wav").touch()
    config = make_config({"method": "fedavg", "data": {"name": "manifest", "file": str(tmp_path / "list.csv")}})
    in_file, on_line, lines = read_back(config)
    assert in_file.digest() == on_line.digest()
    tables = assign(on_line)
    owners = tables.texts("group", "")
    assert set(owners) == {f"00{speaker}" for speaker in range(6)}
    assert set(tables.ids) == set(owners[tables.has_role("train")])
    assert set(tables.ids) & set(owners[tables.has_role("test")]) == set()
    assert any(f"column {column} has 6 owners" in line for line in lines)


def test_settings_of_the_split_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    """The validation of clients stays as long as it can."""
    files = [f"{label}/{take}.wav" for label in ("yes", "no") for take in range(50)]
    for validation, kept in ((0.25, 0.25), ({"by": "session", "values": [1]}, 0.0)):
        config = configure(tmp_path, files, split={"validation": validation})
        in_file, on_line, lines = read_back(config)
        assert in_file.data.split == on_line.data.split
        assert on_line.data.split.validation == kept
        assert any("keys of data.split do not fit" in line for line in lines) == (kept == 0)


def test_one_clip_is_no_federation(tmp_path: Path) -> None:
    config = configure(tmp_path / "data", ["yes/a.wav"])
    assert find_proposal(config) is None
    assert "too few" in list(propose(config, ["FILE"]))[-1]


def test_recordings_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    config = make_config({"method": "fedavg", "data": {"name": "folder", "root": str(tmp_path / "gone")}})
    with pytest.raises(DataError, match="gone"):
        find_proposal(config)
