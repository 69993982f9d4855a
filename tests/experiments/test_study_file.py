"""A study's file: its runs and their configurations, draws of the seed, and messages about invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl
from studies import StudyFile, write_run_folder

from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.experiments.domains import Domain
from raydfl.experiments.experiment import _make_search
from raydfl.experiments.load import load_study
from raydfl.experiments.run import run_study
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import corners
from raydfl.runs.progress import Progress


def test_a_grid_has_the_product_of_its_axes_and_repeats(grid: StudyFile, tmp_path: Path) -> None:
    study = load_study(grid())
    assert len(study.cells) == 2 * 3
    assert len(study.trials) == len(study.distinct) == 2 * 3 * 2
    assert study.cells[:2] == [("clean", "FedAvg"), ("clean", "FedProx")]
    # All cells run their first seed before any cell runs its second.
    assert [run.config.run.seed for run in study.trials] == [1] * 6 + [2] * 6
    wrong = next(run for run in study.trials if run.labels == ("wrong", "FedProx"))
    assert wrong.config.method == {"name": "fedprox", "mu": 0.5}
    assert wrong.config.data.corrupt.labels is not None
    assert wrong.config.data.corrupt.labels.rate == 0.5
    assert wrong.config.ray.actors == 0
    assert wrong.run_dir == tmp_path / "runs" / f"wrong-fedprox-seed=1-{wrong.identity}"
    assert len({run.identity for run in study.trials}) == 12


def test_an_axis_may_be_a_list_and_cells_may_have_their_own_repeats(grid: StudyFile) -> None:
    axes: dict[str, Any] = {
        "train.cohort": [0.5, 1.0],
        "data": {"small": {}, "folds": {"repeat": {"data.speakers": [4, 5, 6]}, "metric": {"score": "macro_f1"}}},
    }
    study = load_study(grid(axes=axes))
    assert len(study.trials) == 2 * (2 + 3)
    assert study.cells[0] == ("0.5", "small")
    folds = [run for run in study.trials if run.labels == ("1.0", "folds")]
    assert [run.repeat for run in folds] == ["data.speakers=4", "data.speakers=5", "data.speakers=6"]
    assert folds[0].metric.score == "macro_f1"
    assert all(run.config.train.cohort == 1.0 for run in folds)


def test_overrides_apply_to_every_cell_and_only_selects_cells(grid: StudyFile, tmp_path: Path) -> None:
    file = grid()
    study = load_study(file, ["train.rounds=7", f"run.dir={tmp_path / 'elsewhere'}"], ["method=FedAvg,fast"])
    assert len(study.trials) == 2 * 2 * 2
    assert {run.config.train.rounds for run in study.trials} == {7}
    assert study.folder == tmp_path / "elsewhere"
    assert study.output(".csv") == tmp_path / "elsewhere" / "grid.csv"


def test_the_folder_may_be_set_for_all_runs(grid: StudyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line overrides ``dir``, and ``dir`` overrides the settings of all runs."""
    monkeypatch.chdir(tmp_path)
    settings = {"run.dir": str(tmp_path / "set")}
    assert load_study(grid(dir=None)).folder == tmp_path / "runs" / "grid"
    study = load_study(grid(dir=None, settings=settings))
    assert study.folder == tmp_path / "set"
    assert {run.run_dir.parent for run in study.trials} == {tmp_path / "set"}
    assert load_study(grid(settings=settings)).folder == tmp_path / "runs"
    assert load_study(grid(settings=settings), [f"run.dir={tmp_path}/line"]).folder == tmp_path / "line"
    with pytest.raises(
        ConfigError, match=r"dir: s3://bucket/runs is a URI, but all runs of .*grid.yaml need a local folder"
    ):
        load_study(grid(dir=None, settings={"run.dir": "s3://bucket/runs"}))


def test_equal_configurations_share_a_run_under_any_label(grid: StudyFile) -> None:
    same = {"method": {"a": {"method": "fedavg"}, "b": {"method": {"name": "fedavg"}}}}
    study = load_study(grid(axes=same))
    assert len(study.trials) == 4
    assert [run.labels for run in study.distinct] == [("a",), ("a",)]


def test_a_renamed_cell_keeps_its_run_and_a_changed_cell_gets_a_new_run(grid: StudyFile) -> None:
    first = load_study(grid(axes={"method": {"old name": {"method": "fedavg"}}})).trials[0]
    write_run_folder(first, {})
    trial = load_study(grid(axes={"method": {"new name": {"method": "fedavg"}}})).trials[0]
    assert trial.run_dir == first.run_dir
    for change in ("train.optimiser.lr=0.2", "train.rounds=9", "evaluate.every=2"):
        assert load_study(grid(), [change]).trials[0].identity != first.identity
    for no_change in ("ray.cpus=2", "track.mlflow=true", "run.commit_every=2"):
        changed_trial = load_study(grid(axes={"method": {"x": {"method": "fedavg"}}}), [no_change]).trials[0]
        assert changed_trial.identity == first.identity


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"axis": {}}, r"unknown key 'axis'. Did you mean 'axes'\?"),
    ({"train": {"rounds": 3}}, r"unknown key 'train'.*below settings"),
    ({"axes": {}}, "axes"),
    ({"axes": {"method": {}}}, "axes.method has no labels"),
    ({"title": None}, "title: Field required"),
    ({"base": "nowhere.yaml"}, "the base configuration .*nowhere.yaml cannot be read"),
    ({"control": {"conditon": "clean"}}, r"control: there is no axis 'conditon'. Did you mean 'condition'\?"),
    ({"reference": {"condition": "clear"}}, r"control.condition: there is no label 'clear'. Did you mean 'clean'\?"),
    (
        {"control": {"condition": "clean"}, "reference": {"condition": "clean"}},
        "reference is the former name of control",
    ),
    ({"samples": 3}, "samples needs a search. Add domains"),
    ({"cells": 5}, "cells is 5, but must be a group of settings"),
    ({"axes": {"repeat": {"a": {}}}}, "axes.repeat: the name is .* reserved"),
    ({"domains": {"method.mu": {"uniform": [0, 1]}}, "searcher": "optuna"}, "axes do not fit searcher optuna"),
    ({"repeat": {"run.seed": []}}, "repeat must be one setting with a list of values"),
    ({"repeat": {"run.seed": [1, 1]}}, "a value is listed twice"),
    (
        {"paper": {"source": "P", "values": {"clean": {"FedAvg": "many"}}}},
        "paper.values.clean.FedAvg is 'many', but must be a number",
    ),
    ({"paper": {"source": "P", "values": {"clear": {"FedAvg": 1}}}}, r"no label 'clear'. Did you mean 'clean'\?"),
    ({"paper": {"source": "P", "values": {"clean": 3}}}, "must be a group with labels of axis 'method'"),
    ({"settings": {"train": {"rounds": 9}}}, r"settings: train would replace the whole group. Write single settings"),
    ({"axes": {"a": {"x": {"metric": {"skore": "loss"}}}}}, "skore"),
    ({"summary": "worst"}, "summary"),
    ({"summary": "chosen"}, "summary: chosen needs run.best, .* Set run.best in settings"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_invalid_files_are_explained(grid: StudyFile, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_study(grid(**changes))


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("method", "is not of the form axis=label"),
        ("metod=FedAvg", r"--only: there is no axis 'metod'. Did you mean 'method'\?"),
        ("method=FedAvgg", r"axis 'method' has no label 'FedAvgg'. Did you mean 'FedAvg'\?"),
    ],
)
def test_invalid_selections_are_explained(grid: StudyFile, only: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_study(grid(), only=[only])


def test_a_label_with_a_comma_is_selected_by_its_whole_name(grid: StudyFile) -> None:
    axes = {
        "method": {
            "FedAvg": {"method": "fedavg"},
            "FedProx, mu 0.1": {"method": "fedprox"},
            "FedBABU": {"method": "fedbabu"},
        }
    }
    file = grid(axes=axes, control=None)
    assert {trial.labels for trial in load_study(file, only=["method=FedProx, mu 0.1"]).trials} == {
        ("FedProx, mu 0.1",)
    }
    assert {trial.labels for trial in load_study(file, only=["method=FedAvg, FedBABU"]).trials} == {
        ("FedAvg",),
        ("FedBABU",),
    }


def test_every_invalid_cell_is_named_before_training(grid: StudyFile, raydfl: Raydfl, tmp_path: Path) -> None:
    axes = {
        "rate": {"low": {"train.optimiser.lr": 0.1}, "none": {"train.optimiser.lr": 0}},
        "method": {"FedAvg": {"method": "fedavg"}, "FedBvg": {"method": "fedbvg"}},
    }
    result = raydfl("sweep", grid(axes=axes))
    assert result.code == 2
    assert "3 cells cannot be run. No run was started." in result.err
    assert "low, FedBvg" in result.err
    assert "Did you mean 'fedavg'?" in result.err
    assert "none, FedAvg" in result.err
    assert "train.optimiser.lr: Input should be greater than 0" in result.err
    assert not (tmp_path / "runs").exists()


def test_check_names_missing_data_sets(grid: StudyFile, raydfl: Raydfl, tmp_path: Path) -> None:
    part = {"name": "fsdd", "root": "/nowhere/spoken"}
    parts = {"parts": {"one": part, "two": {"name": "fsdd", "root": str(tmp_path)}}}
    data = {"here": {}, "gone": {"data": part}, "in parts": {"data": parts}}
    result = raydfl("sweep", grid(axes={"data": data}), "--check")
    assert "data: here, gone, in parts" in result.out
    assert "3 cells, 6 runs, 0 finished" in result.out
    assert "All configurations are valid" in result.out
    result.refuses(
        "4 of 6 runs have no recordings", r"gone.*: data.root /nowhere/spoken does not exist. Correct data.root"
    )
    result.refuses(r"in parts.*: data.parts.one.root /nowhere/spoken does not exist")
    assert str(tmp_path) not in result.err


def test_check_accepts_existing_data_sets_without_reading_recordings(
    grid: StudyFile, raydfl: Raydfl, tmp_path: Path
) -> None:
    result = raydfl(
        "sweep", grid(axes={"data": {"empty": {"data": {"name": "fsdd", "root": str(tmp_path)}}}}), "--check"
    )
    assert (result.code, result.err) == (0, "")
    assert "1 cell, 2 runs, 0 finished" in result.out


def test_a_missing_file_is_explained(raydfl: Raydfl, tmp_path: Path) -> None:
    result = raydfl("sweep", tmp_path / "gone.yaml")
    assert result.code == 2
    assert "gone.yaml: No such file" in result.err


def test_former_keys_keep_their_meaning(grid: StudyFile) -> None:
    cells = {"actors": 1, "cpus": 2.0, "retries": 5}
    settings = load_study(grid(reference={"condition": "clean"}, cells=cells)).settings
    assert settings.control == {"condition": "clean"}
    assert (settings.actors, settings.cpus, settings.retries) == (1, 2.0, 5)
    assert {run.config.ray.actors for run in load_study(grid(cells=cells)).trials} == {1}


def test_actors_come_from_the_settings_and_not_from_the_base(grid: StudyFile) -> None:
    assert load_study(grid()).first.config.ray.actors == 0
    assert load_study(grid(settings={"ray.actors": 2})).first.config.ray.actors == 2
    assert load_study(grid(), ["ray.actors=3"]).first.config.ray.actors == 3


# -- domains ---------------------------------------------------------------------------------------------------------


def test_draws_depend_only_on_the_seed_and_their_domain(search_file: StudyFile) -> None:
    first, again = load_study(search_file()), load_study(search_file())
    draws = [trial.values for trial in first.trials]
    assert draws == [trial.values for trial in again.trials]
    assert len({repr(values) for values in draws}) == 4
    assert draws[2] == {"method.mu": 0.1013, "train.optimiser.lr": 0.07559}  # earlier versions drew the same values
    assert load_study(search_file(seed=2)).trials[0].values != draws[0]
    fewer = load_study(search_file(domains={"method.mu": {"loguniform": [0.001, 1.0]}}))
    assert fewer.trials[2].values["method.mu"] == draws[2]["method.mu"]
    more = load_study(search_file(), ["samples=7"])
    assert [trial.run_dir for trial in more.trials[:4]] == [trial.run_dir for trial in first.trials]


def test_a_trial_applies_its_draw_to_the_base(search_file: StudyFile, tmp_path: Path) -> None:
    study = load_study(search_file(settings={"train.cohort": 2}), ["train.batch_size=4", "samples=7"])
    trial = study.trials[3]
    assert trial.config.method == {"name": "fedprox", "mu": trial.values["method.mu"]}
    assert (trial.config.train.cohort, trial.config.train.batch_size, trial.config.train.rounds) == (2, 4, 4)
    assert trial.run_dir == tmp_path / "search" / f"trial-003-{trial.identity}"
    assert trial.name == "trial-003"
    assert len(study.trials) == 7


def test_a_trial_of_an_earlier_version_keeps_its_folder(search_file: StudyFile, tmp_path: Path) -> None:
    trial = load_study(search_file()).trials[1]
    (tmp_path / "search" / "trial-001").mkdir(parents=True)
    about = {
        "id": "trial-001",
        "raydfl": "0",
        "digest": trial.config.digest(),
        "classes": [],
        "models": {},
        "clients": 3,
    }
    (tmp_path / "search" / "trial-001" / "run.json").write_text(json.dumps({**about, "config": {}}))
    assert load_study(search_file()).trials[1].run_dir.name == "trial-001"


def test_a_grid_searcher_has_every_combination(search_file: StudyFile) -> None:
    domains = {"method.mu": {"grid": [0.1, 1.0]}, "train.batch_size": {"choice": [4, 8, 16]}}
    study = load_study(search_file(searcher="grid", space=domains, domains=None, samples=None))
    assert [tuple(trial.values.values()) for trial in study.trials] == [
        (mu, n) for mu in (0.1, 1.0) for n in (4, 8, 16)
    ]


def test_domains_can_be_combined_with_axes_and_repeats(search_file: StudyFile) -> None:
    """Each cell has the same draws."""
    axes = {"epochs": {"one": {"train.local_epochs": 1}, "two": {"train.local_epochs": 2}}}
    study = load_study(search_file(axes=axes, repeat={"run.seed": [1, 2]}, samples=3))
    assert len(study.trials) == 2 * 3 * 2
    first_cell, second_cell = (
        [trial for trial in study.trials if trial.labels == (label,)] for label in ("one", "two")
    )
    assert [trial.values for trial in first_cell] == [trial.values for trial in second_cell]
    assert first_cell[1].name == "one, trial-001, run.seed=1"


def test_patience_sets_run_stop_of_all_trials(search_file: StudyFile) -> None:
    stop = load_study(search_file(patience=3)).first.config.run.stop
    assert stop is not None
    assert (stop.metric, stop.mode, stop.patience) == ("validation model/loss", "min", 3)
    with pytest.raises(ConfigError, match=r"run\.stop is set too\. Remove one"):
        load_study(search_file(patience=3, settings={"run.stop": {}}))


def test_all_corners_of_the_search_space_are_checked(search_file: StudyFile) -> None:
    assert len(list(load_study(search_file()).corners())) == 4
    many = {f"s{place}": Domain(uniform=(0.0, 1.0)) for place in range(9)}
    some = list(corners(many))
    for key in many:
        assert {values[key] for values in some} == {0.0, 1.0}


WRONG_SEARCH: list[tuple[dict[str, Any], str]] = [
    ({"sample": 3}, r"unknown key 'sample'. Did you mean 'samples'"),
    ({"domains": {}}, r"needs axes \(a grid\), domains \(a search\), or both"),
    (
        {"domains": {"method.nu": {"uniform": [0.1, 1.0]}}},
        r"a trial with method.nu=0.1 cannot be run, so no run was started: .*'mu'",
    ),
    ({"domains": {"train.optimizer.lr": {"uniform": [0.1, 1.0]}}}, "Did you mean 'optimiser'"),
    ({"domains": {"method.mu": {"uniform": [-1.0, 1.0]}}}, "method.mu: Input should be greater than or equal to 0"),
    ({"domains": {"method.mu": {"uniformly": [0.0, 1.0]}}}, "uniformly"),
    ({"domains": {"train.rounds": {"randint": [2, 9]}}}, "trials would not differ.*rounds and scheduler"),
    ({"domains": {"ray.cpus": {"choice": [0.5, 1.0]}}}, "ray.cpus does not affect results"),
    ({"domains": {"method.mu": {"grid": [0.1, 0.2]}}}, "grid needs searcher: grid"),
    ({"searcher": "grid", "samples": None}, "searcher grid needs a list of values"),
    ({"searcher": "grid", "domains": {"method.mu": {"grid": [0.1, 0.2]}}}, "searcher grid trains all combinations"),
    ({"searcher": "bayes"}, "searcher: Input should be 'random', 'grid' or 'optuna'"),
    ({"scheduler": "hyperband"}, "scheduler"),
    ({"scheduler": {"name": "asha", "factor": 1}}, "scheduler.factor: Input should be greater than 1"),
    ({"scheduler": "asha", "settings": {"evaluate.every": 9}}, "a scheduler sees no score before the end"),
    ({"scheduler": {"name": "pbt", "interval": 2}, "searcher": "optuna"}, "does not fit scheduler pbt"),
    ({"scheduler": {"name": "pbt", "interval": 2}, "patience": 2}, "patience does not fit scheduler pbt"),
    ({"scheduler": {"name": "pbt", "interval": 4}}, "members would never exchange"),
    ({"scheduler": {"name": "pbt", "interval": 2}, "samples": 1}, "population of at least 2"),
    (
        {"scheduler": {"name": "pbt", "interval": 2}, "domains": {"method.squared": {"choice": [True, False]}}},
        "during training, which method.squared does not allow",
    ),
    ({"samples": 0}, "samples: Input should be greater than or equal to 1"),
]


@pytest.mark.parametrize(
    ("changes", "message"), WRONG_SEARCH, ids=[str(next(iter(changes.items())))[:40] for changes, _ in WRONG_SEARCH]
)
def test_invalid_searches_are_explained(
    search_file: StudyFile, raydfl: Raydfl, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raydfl("search", search_file(**changes)).refuses(message)
    assert not (tmp_path / "search").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.mu=0.1", r"method.mu is set on the command line\. Remove it from the domains"),
        ("run.dir=s3://bucket/runs", "dir: .*is a URI"),
        ("metric.score=acuracy", r"metric\.score: nothing measures 'acuracy'. Did you mean 'accuracy'"),
        ("metric.model=plugn", r"metric\.model: there is no model 'plugn'"),
        ("data.split.validation=0", r"metric\.split is validation, but data\.split\.validation is 0"),
        ("dir=s3://bucket/x", r"dir: s3://bucket/x is a URI"),
        ("dir=s3:/bucket/x", r"If you mean a URI, write s3://bucket/x"),
        ("scheduler={name: asha, grase: 2}", r"scheduler: unknown key 'grase'. Did you mean 'grace'"),
    ],
)
def test_invalid_settings_of_the_command_line_are_explained(
    search_file: StudyFile, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_study(search_file(), [override])


def test_a_search_may_select_the_score_of_fine_tuned_models(search_file: StudyFile) -> None:
    fine_tuned, metric = "evaluate.fine_tune={epochs: 1}", "metric.model=personal"
    assert load_study(search_file(), [fine_tuned, metric]).first.metric.model == "personal"
    with pytest.raises(ConfigError, match="there is no model 'personal'"):
        load_study(search_file(), [metric])


def test_copied_trials_reject_data_at_sites(search_file: StudyFile) -> None:
    """A copied run folder would share its private state at the sites."""
    sites = ["data.sites={north: {folder: /x}}"]
    assert load_study(search_file(), sites).first.config.data.sites
    with pytest.raises(ConfigError, match=r"data\.sites: scheduler pbt copies run folders"):
        load_study(search_file(scheduler={"name": "pbt", "interval": 2}), sites)


@pytest.mark.parametrize("searcher", ["grid", "optuna"])
def test_check_names_missing_data_sets_of_a_search(
    search_file: StudyFile, raydfl: Raydfl, tmp_path: Path, searcher: str
) -> None:
    """Use an empty existing folder, because no recording is read."""
    folders = [str(tmp_path), "/nowhere/spoken"]
    settings = {"data": {"name": "fsdd", "split": {"validation": 0.2}}}
    file = search_file(settings=settings, domains={"data.root": {"choice": folders}}, searcher=searcher, samples=None)
    result = raydfl("search", file, "--check")
    assert "All configurations are valid" in result.out
    result.refuses(
        "1 of 2 runs have no recordings", r"trial-.*: data.root /nowhere/spoken does not exist. Correct data.root"
    )


@pytest.mark.parametrize("changes", [{"searcher": "optuna"}, {"scheduler": {"name": "pbt", "interval": 2}}])
def test_an_adaptive_search_uses_the_only_value_of_its_repeat(search_file: StudyFile, changes: dict[str, Any]) -> None:
    """Points of Ray Tune have only the keys of the search space."""
    pytest.importorskip("optuna")
    study = load_study(search_file(repeat={"run.seed": [5]}, **changes))
    searcher, space = _make_search(study, StudyState.read(study))
    points = getattr(searcher, "_points_to_evaluate", None) or [study.draw(0)]
    for point in points:
        assert point.keys() <= {"trial", *study.settings.domains} | space.keys()
        assert study.trial(point).config.run.seed == 5


def test_a_search_may_optimise_scores_of_clients(search_file: StudyFile) -> None:
    assert load_study(search_file(), ["metric.score=accuracy_worst_decile"]).first.metric.best == "max"


def test_unsuitable_study_folders_are_rejected(search_file: StudyFile, tmp_path: Path) -> None:
    temporary = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    with pytest.raises(ConfigError, match="dir: .* temporary folder of this Ray job"):
        run_study(load_study(search_file(), [f"dir={temporary}"]), Progress("quiet"), table_only=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="is the folder of a run"):
        run_study(load_study(search_file(), [f"dir={tmp_path / 'run'}"]), Progress("quiet"), table_only=True)


def test_check_describes_a_search(search_file: StudyFile, raydfl: Raydfl) -> None:
    result = raydfl("search", search_file(scheduler={"name": "pbt", "interval": 2}), "--check")
    assert result.code == 0
    assert "method.mu: loguniform" in result.out
    assert "4 runs, 0 finished" in result.out
    assert "searcher random, scheduler pbt, at most 4 rounds, best: min of loss, validation" in result.out


def test_check_counts_the_rounds_of_the_longest_contestant(search_file: StudyFile, raydfl: Raydfl) -> None:
    axes = {"length": {"short": {"train.rounds": 2}, "long": {"train.rounds": 6}}}
    values = {"method.mu": {"grid": [0.01, 0.1]}}
    result = raydfl(
        "search", search_file(axes=axes, domains=values, searcher="grid", rounds=None, samples=None), "--check"
    )
    assert "at most 6 rounds" in result.out
