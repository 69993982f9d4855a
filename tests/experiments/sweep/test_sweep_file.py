"""A sweep's file: how many runs it is, what each of them is, and what is said about a file that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl
from studies import StudyFile, leave

from raydfl.core.errors import ConfigError
from raydfl.experiments.metric import MetricSettings
from raydfl.experiments.sweep.grid import load_sweep
from raydfl.experiments.sweep.settings import CellSettings, PaperSettings, SweepSettings


def test_a_grid_has_the_product_of_its_axes_times_its_repeats(grid: StudyFile, tmp_path: Path) -> None:
    sweep = load_sweep(grid())
    assert len(sweep.cells) == 2 * 3
    assert len(sweep.runs) == len(sweep.distinct) == 2 * 3 * 2
    assert list(sweep.cells)[:2] == [("clean", "FedAvg"), ("clean", "FedProx")]
    # The first seed of every cell comes before the second of any.
    assert [run.config.run.seed for run in sweep.runs] == [1] * 6 + [2] * 6
    wrong = next(run for run in sweep.runs if run.labels == ("wrong", "FedProx"))
    assert wrong.config.method == {"name": "fedprox", "mu": 0.5}
    assert wrong.config.data.corrupt.labels is not None
    assert wrong.config.data.corrupt.labels.rate == 0.5
    assert wrong.config.ray.actors == 0
    assert wrong.run_dir == tmp_path / "runs" / f"wrong-fedprox-seed=1-{wrong.identity}"
    assert len({run.identity for run in sweep.runs}) == 12


def test_a_list_of_values_is_an_axis_and_cells_may_have_their_own_repeats(grid: StudyFile) -> None:
    axes: dict[str, Any] = {
        "train.cohort": [0.5, 1.0],
        "data": {"small": {}, "folds": {"repeat": {"data.speakers": [4, 5, 6]}, "metric": {"score": "macro_f1"}}},
    }
    sweep = load_sweep(grid(axes=axes))
    assert len(sweep.runs) == 2 * (2 + 3)
    assert next(iter(sweep.cells)) == ("0.5", "small")
    folds = sweep.cells["1.0", "folds"]
    assert [run.repeat for run in folds] == ["data.speakers=4", "data.speakers=5", "data.speakers=6"]
    assert folds[0].metric.score == "macro_f1"
    assert all(run.config.train.cohort == 1.0 for run in folds)


def test_overrides_are_laid_over_every_cell_and_only_leaves_cells_out(grid: StudyFile, tmp_path: Path) -> None:
    file = grid()
    sweep = load_sweep(file, ["train.rounds=7", f"run.dir={tmp_path / 'elsewhere'}"], ["method=FedAvg,fast"])
    assert len(sweep.runs) == 2 * 2 * 2
    assert {run.config.train.rounds for run in sweep.runs} == {7}
    assert sweep.folder == tmp_path / "elsewhere"
    assert sweep.output(".csv") == tmp_path / "elsewhere" / "grid.csv"


def test_the_folder_may_be_among_the_settings(grid: StudyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line goes before ``dir``, and that before what all runs have."""
    monkeypatch.chdir(tmp_path)
    settings = {"run.dir": str(tmp_path / "set")}
    assert load_sweep(grid(dir=None)).folder == tmp_path / "runs" / "grid"
    sweep = load_sweep(grid(dir=None, settings=settings))
    assert sweep.folder == tmp_path / "set"
    assert {run.run_dir.parent for run in sweep.runs} == {tmp_path / "set"}
    assert load_sweep(grid(settings=settings)).folder == tmp_path / "runs"
    assert load_sweep(grid(settings=settings), [f"run.dir={tmp_path}/line"]).folder == tmp_path / "line"
    with pytest.raises(
        ConfigError, match=r"run.dir: s3://bucket/runs is a URI, but all runs of .*grid.yaml lie in one"
    ):
        load_sweep(grid(dir=None, settings={"run.dir": "s3://bucket/runs"}))


def test_equal_configurations_are_one_run_whatever_they_are_called(grid: StudyFile) -> None:
    same = {"method": {"a": {"method": "fedavg"}, "b": {"method": {"name": "fedavg"}}}}
    sweep = load_sweep(grid(axes=same))
    assert len(sweep.runs) == 4
    assert [run.labels for run in sweep.distinct] == [("a",), ("a",)]


def test_a_renamed_cell_keeps_its_run_and_a_changed_one_is_a_new_run(grid: StudyFile) -> None:
    first = load_sweep(grid(axes={"method": {"old name": {"method": "fedavg"}}})).runs[0]
    leave(first, {})
    renamed = load_sweep(grid(axes={"method": {"new name": {"method": "fedavg"}}})).runs[0]
    assert renamed.run_dir == first.run_dir
    for change in ("train.optimiser.lr=0.2", "train.rounds=9", "evaluate.every=2"):
        assert load_sweep(grid(), [change]).runs[0].identity != first.identity
    for no_change in ("ray.cpus=2", "track.mlflow=true", "run.commit_every=2"):
        changed = load_sweep(grid(axes={"method": {"x": {"method": "fedavg"}}}), [no_change]).runs[0]
        assert changed.identity == first.identity


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"axis": {}}, r"unknown key 'axis'; did you mean 'axes'\?"),
    ({"train": {"rounds": 3}}, r"unknown key 'train'.*below settings"),
    ({"axes": {}}, "axes"),
    ({"axes": {"method": {}}}, "axes.method has no labels"),
    ({"title": None}, "title is missing"),
    ({"base": "nowhere.yaml"}, "the base configuration .*nowhere.yaml cannot be read"),
    ({"reference": {"conditon": "clean"}}, r"reference: there is no axis 'conditon'; did you mean 'condition'\?"),
    ({"reference": {"condition": "clear"}}, r"no label 'clear'; did you mean 'clean'\?"),
    ({"repeat": {"run.seed": []}}, "repeat must be one setting with a list of values"),
    ({"repeat": {"run.seed": [1, 1]}}, "a value stands twice"),
    (
        {"paper": {"source": "P", "values": {"clean": {"FedAvg": "many"}}}},
        "paper.values.clean.FedAvg is 'many'; it must be a number",
    ),
    ({"paper": {"source": "P", "values": {"clear": {"FedAvg": 1}}}}, r"no label 'clear'; did you mean 'clean'\?"),
    ({"paper": {"source": "P", "values": {"clean": 3}}}, "must be a group with labels of axis 'method'"),
    ({"settings": {"train": {"rounds": 9}}}, r"settings: train would replace the whole group; write single settings"),
    ({"axes": {"a": {"x": {"metric": {"skore": "loss"}}}}}, "skore"),
    ({"summary": "worst"}, "summary"),
    ({"summary": "chosen"}, "summary: chosen is the round that run.best chooses; set run.best in settings"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_a_wrong_file_is_explained(grid: StudyFile, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_sweep(grid(**changes))


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("method", "is not of the form axis=label"),
        ("metod=FedAvg", r"--only: there is no axis 'metod'; did you mean 'method'\?"),
        ("method=FedAvgg", r"axis 'method' has no label 'FedAvgg'; did you mean 'FedAvg'\?"),
    ],
)
def test_a_wrong_choice_is_explained(grid: StudyFile, only: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_sweep(grid(), only=[only])


def test_every_faulty_cell_is_named_before_anything_starts(grid: StudyFile, raydfl: Raydfl, tmp_path: Path) -> None:
    axes = {
        "rate": {"low": {"train.optimiser.lr": 0.1}, "none": {"train.optimiser.lr": 0}},
        "method": {"FedAvg": {"method": "fedavg"}, "FedBvg": {"method": "fedbvg"}},
    }
    said = raydfl("sweep", grid(axes=axes))
    assert said.code == 2
    assert "3 cells cannot be run; nothing was started" in said.err
    assert "low, FedBvg" in said.err
    assert "did you mean 'fedavg'?" in said.err
    assert "none, FedAvg" in said.err
    assert "train.optimiser.lr is 0; it must be above 0" in said.err
    assert not (tmp_path / "runs").exists()


def test_check_names_data_sets_that_are_not_there(grid: StudyFile, raydfl: Raydfl, tmp_path: Path) -> None:
    part = {"name": "fsdd", "root": "/nowhere/spoken"}
    parts = {"parts": {"one": part, "two": {"name": "fsdd", "root": str(tmp_path)}}}
    data = {"here": {}, "gone": {"data": part}, "in parts": {"data": parts}}
    said = raydfl("sweep", grid(axes={"data": data}), "--check")
    assert "data: here, gone, in parts" in said.out
    assert "3 cells, 6 runs, 0 finished" in said.out
    assert "all configurations are valid" in said.out
    said.refuses(
        "4 of 6 runs have no recordings", r"gone.*: data.root /nowhere/spoken does not exist. Correct data.root"
    )
    said.refuses(r"in parts.*: data.parts.one.root /nowhere/spoken does not exist")
    assert str(tmp_path) not in said.err


def test_check_accepts_data_sets_that_are_there_and_reads_no_recording(
    grid: StudyFile, raydfl: Raydfl, tmp_path: Path
) -> None:
    said = raydfl("sweep", grid(axes={"data": {"empty": {"data": {"name": "fsdd", "root": str(tmp_path)}}}}), "--check")
    assert (said.code, said.err) == (0, "")
    assert "1 cell, 2 runs, 0 finished" in said.out


def test_a_missing_file_is_explained(raydfl: Raydfl, tmp_path: Path) -> None:
    said = raydfl("sweep", tmp_path / "gone.yaml")
    assert said.code == 2
    assert "gone.yaml: No such file" in said.err


def test_every_key_of_the_file_is_documented() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "sweeps.md").read_text()
    for name in SweepSettings.model_fields:
        assert f"| `{name}` |" in text, name
    for group in (MetricSettings, PaperSettings, CellSettings):
        for name in group.model_fields:
            assert f"`{name}`" in text, name
