"""A search's file: what it makes, that draws are the seed's, and that what cannot be run is refused before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl
from studies import StudyFile

from raydfl.cli.experiments import do_search
from raydfl.core import registry
from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.yaml import parse_yaml
from raydfl.experiments.search.plan import claim, corners, load_search
from raydfl.runs.progress import Progress

TUNE = Path(__file__).resolve().parents[3] / "tune"


def test_trials_are_the_seeds_and_do_not_depend_on_other_settings(search_file: StudyFile) -> None:
    first, again = load_search(search_file()), load_search(search_file())
    drawn = [first.drawn(number) for number in range(4)]
    assert drawn == [again.drawn(number) for number in range(4)]
    assert len({repr(values) for values in drawn}) == 4
    other = load_search(search_file(seed=2))
    assert other.drawn(0) != drawn[0]
    fewer = load_search(search_file(space={"method.mu": {"loguniform": [0.001, 1.0]}}))
    assert fewer.drawn(2)["method.mu"] == drawn[2]["method.mu"]


def test_a_trial_is_the_base_with_its_values(search_file: StudyFile, tmp_path: Path) -> None:
    search = load_search(search_file(settings={"train.cohort": 2}), ["train.batch_size=4", "samples=7"])
    trial = search.trial(3, {"method.mu": 0.5, "train.optimiser.lr": 0.2})
    config = trial.config
    assert config.method == {"name": "fedprox", "mu": 0.5}
    assert (config.train.optimiser.lr, config.train.cohort, config.train.batch_size) == (0.2, 2, 4)
    assert config.train.rounds == 4
    assert trial.run_dir == tmp_path / "search" / "trial-003"
    assert not config.track.mlflow
    assert search.samples == 7


def test_grid_is_every_combination(search_file: StudyFile) -> None:
    space = {"method.mu": {"grid": [0.1, 1.0]}, "train.batch_size": {"choice": [4, 8, 16]}}
    search = load_search(search_file(searcher="grid", space=space, samples=None))
    assert search.trials == 6
    drawn = [tuple(search.drawn(number).values()) for number in range(6)]
    assert drawn == [(mu, size) for mu in (0.1, 1.0) for size in (4, 8, 16)]


def test_all_corners_are_looked_at(search_file: StudyFile) -> None:
    settings = load_search(search_file()).settings
    assert len(list(corners(settings))) == 4
    many = {f"s{place}": {"uniform": [0.0, 1.0]} for place in range(9)}
    some = list(corners(type(settings).model_validate({"title": "x", "space": many})))
    for key in many:
        assert {values[key] for values in some} == {0.0, 1.0}


SMALL: dict[str, Any] = {"method.mu": {"uniform": [0.1, 1.0]}}
WRONG = [
    ({"sample": 3}, r"unknown key 'sample'; did you mean 'samples'"),
    ({"title": None}, "title is missing"),
    ({"space": {}}, "space is {}; it must be at least 1 item"),
    (
        {"space": {"method.nu": {"uniform": [0.1, 1.0]}}},
        r"a trial with method.nu=0.1 cannot be run; nothing was started: .*'mu'",
    ),
    ({"space": {"train.optimizer.lr": {"uniform": [0.1, 1.0]}}}, "did you mean 'optimiser'"),
    ({"space": {"method.mu": {"uniform": [-1.0, 1.0]}}}, "method.mu is -1.0; it must be at least 0"),
    ({"space": {"method.mu": {"uniformly": [0.0, 1.0]}}}, "uniformly"),
    ({"space": {"train.rounds": {"randint": [2, 9]}}}, "trials would differ in nothing.*rounds and scheduler"),
    ({"space": {"ray.cpus": {"choice": [0.5, 1.0]}}}, "ray.cpus does not decide what is learned"),
    ({"space": {"method.mu": {"grid": [0.1, 0.2]}}}, "grid needs searcher: grid"),
    ({"searcher": "grid", "samples": None}, "searcher grid needs a list of values"),
    ({"searcher": "grid", "space": {"method.mu": {"grid": [0.1, 0.2]}}}, "searcher grid does every combination"),
    ({"searcher": "bayes"}, 'searcher is "bayes"; it must be one of random, grid, optuna'),
    ({"scheduler": "hyperband"}, "scheduler"),
    ({"scheduler": {"name": "asha", "factor": 1}}, "scheduler.factor is 1; it must be above 1"),
    ({"scheduler": "asha", "settings": {"evaluate.every": 9}}, "nothing is known of a trial before its end"),
    ({"scheduler": {"name": "pbt", "interval": 2}, "searcher": "optuna"}, "does not go with scheduler pbt"),
    ({"scheduler": {"name": "pbt", "interval": 2}, "patience": 2}, "patience does not go with scheduler pbt"),
    ({"scheduler": {"name": "pbt", "interval": 4}}, "there is no turn"),
    ({"scheduler": {"name": "pbt", "interval": 2}, "samples": 1}, "population of at least 2"),
    (
        {"scheduler": {"name": "pbt", "interval": 2}, "space": {"method.squared": {"choice": [True, False]}}},
        "in the middle of a training, which method.squared does not allow",
    ),
    (
        {"scheduler": {"name": "pbt", "interval": 2}, "space": {"models.model.hidden": {"choice": [8, 16]}}},
        "which models.model.hidden does not allow",
    ),
    ({"samples": 0}, "samples is 0; it must be at least 1"),
    ({"base": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
]


@pytest.mark.parametrize(
    ("changes", "message"), WRONG, ids=[str(next(iter(changes.items())))[:40] for changes, _ in WRONG]
)
def test_what_cannot_be_run_is_refused(
    search_file: StudyFile, raydfl: Raydfl, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raydfl("search", search_file(**changes)).refuses(message)
    assert not (tmp_path / "search").exists()


def test_a_setting_of_the_command_line_takes_none_of_the_spaces(search_file: StudyFile) -> None:
    with pytest.raises(ConfigError, match=r"method.mu is set on the command line; take it out of the space"):
        load_search(search_file(), ["method.mu=0.1"])


def test_copies_of_trials_do_not_go_with_data_at_sites(search_file: StudyFile) -> None:
    """A copy of a run folder would share its private state at the sites."""
    sites = ["data.sites={north: {folder: /x}}"]
    assert load_search(search_file(), sites).first.data.sites
    with pytest.raises(ConfigError, match=r"data\.sites: scheduler pbt copies run folders"):
        load_search(search_file(scheduler={"name": "pbt", "interval": 2}), sites)


def test_a_folder_that_would_be_lost_is_refused(search_file: StudyFile, tmp_path: Path) -> None:
    temporary = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    with pytest.raises(ConfigError, match="dir: .* temporary folder of this Ray job"):
        claim(load_search(search_file(), [f"dir={temporary}"]))
    with pytest.raises(ConfigError, match="dir: .*is a URI"):
        load_search(search_file(), ["run.dir=s3://bucket/runs"])


def test_a_folder_holds_one_search(search_file: StudyFile) -> None:
    claim(load_search(search_file()))
    claim(load_search(search_file(samples=40, parallel=2, title="Another title")))  # these decide nothing that was done
    with pytest.raises(RunDirectoryError, match=r"holds another search \(seed: 1 there, 2 here\)"):
        claim(load_search(search_file(seed=2)))
    with pytest.raises(RunDirectoryError, match="holds another search .*scheduler"):
        claim(load_search(search_file(scheduler="asha")))
    (load_search(search_file()).folder / "search.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"search.json is damaged; restore it"):
        claim(load_search(search_file()))


def test_check_describes(search_file: StudyFile, raydfl: Raydfl) -> None:
    said = raydfl("search", search_file(scheduler={"name": "pbt", "interval": 2}), "--check")
    assert said.code == 0
    assert "method.mu: loguniform" in said.out
    assert (
        "8 trials (4 members, 2 turns) of at most 4 rounds, searcher random, scheduler pbt, best: min of loss"
        in said.out
    )


@pytest.mark.parametrize("searcher", ["grid", "optuna"])
def test_check_names_data_sets_that_are_not_there(
    search_file: StudyFile, raydfl: Raydfl, tmp_path: Path, searcher: str
) -> None:
    """The folder that exists is empty, but no recording is read."""
    folders = [str(tmp_path), "/nowhere/spoken"]
    settings = {"data": {"name": "fsdd", "split": {"validation": 0.2}}}
    file = search_file(settings=settings, space={"data.root": {"choice": folders}}, searcher=searcher, samples=None)
    said = raydfl("search", file, "--check")
    assert "the corners of the space are valid configurations" in said.out
    said.refuses(
        "1 of 2 runs have no recordings", r"trial-001: .*: data.root /nowhere/spoken does not exist. Correct data.root"
    )


NOT_SEARCHED = {
    "rule": "which aggregation is used is a question of its own",
    "objective": "what is learnt is a question of its own",
    "lpa": "FedMLAC: an ablation",
    "mutual": "FedMLAC: an ablation",
    "learn_from": "FedSTAR: its baselines",
    "weight": "FedSTAR: two readings of the paper",
    "rising_rounds": "FedSTAR: the rounds of the run",
    "ratio_from": "the devices' limits: part of the problem",
    "speed_from": "FedMP: the devices' speeds, part of the problem",
    "share": "the devices' limits: part of the problem",
    "generated_epochs": "FedGen: more than the passes of a round",
    "student": "methods of several views: which one is to learn is the problem",
    **dict.fromkeys(
        ("centre_of", "anomalous_share", "push", "margin", "contrast", "contrast_temperature"),
        "ProFiLA: of anomalies in training",
    ),
    "total_rounds": "ProFiLA: the rounds of the run",
    "first_round": "ProFiLA: two readings of the code",
    "steer": "ProFiLA: what there is to steer by is part of the problem",
    "lr_min": "ProFiLA: bounds of what is searched",
    "lr_max": "ProFiLA: bounds of what is searched",
    "strong": "FedSTAR: needs a view of one's own",
}


@pytest.mark.parametrize("name", registry.names("raydfl.methods"))
def test_every_method_has_a_space_of_all_its_fields(name: str) -> None:
    search = load_search(TUNE / f"{name}.yaml")
    assert search.first.method["name"] == name
    fields = {item.name for item in dataclasses.fields(search.first.parts.method)} - {"objective"}
    searched = {key.partition(".")[2] for key in search.settings.space if key.startswith("method.")}
    assert searched == fields - set(NOT_SEARCHED)


def test_every_file_in_tune_is_a_valid_search() -> None:
    files = sorted(TUNE.glob("*.yaml"))
    assert {file.stem for file in files} == {*registry.names("raydfl.methods"), "tiny", "fedmlac_pbt"}
    for file in files:
        assert f"raydfl search tune/{file.name}" in file.read_text()
        assert parse_yaml(file.read_text(), str(file))["title"]
        if file.stem in ("tiny", "fedmlac_pbt"):  # the others are loaded above
            load_search(file)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("metric.score=acuracy", r"metric\.score: nothing measures 'acuracy'; did you mean 'accuracy'"),
        ("metric.model=plugn", r"metric\.model: there is no model 'plugn'"),
        ("data.split.validation=0", r"metric\.split is validation, but clients hold nothing out"),
        ("dir=s3://bucket/x", r"dir: s3://bucket/x is a URI"),
        ("dir=s3:/bucket/x", r"a URI is written s3://bucket/x"),
        ("scheduler={name: asha, grase: 2}", r"scheduler\.grase: there is no such setting"),
    ],
)
def test_what_could_only_fail_later_is_refused_at_once(search_file: StudyFile, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_search(search_file(), [override])


def test_scores_of_clients_can_be_searched_for(search_file: StudyFile) -> None:
    assert load_search(search_file(), ["metric.score=accuracy_worst_decile"]).settings.metric.best == "max"


def test_the_folder_of_a_run_is_none_of_a_search(search_file: StudyFile, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="is the folder of a run"):
        claim(load_search(search_file(), [f"dir={tmp_path / 'run'}"]))


def test_there_is_no_table_of_a_search_that_never_began(search_file: StudyFile, tmp_path: Path) -> None:
    search = load_search(search_file(), [f"dir={tmp_path / 'nothing'}"])
    with pytest.raises(RunDirectoryError, match="there is no search in"):
        do_search(search, Progress("quiet"), table_only=True)
    assert not (tmp_path / "nothing").exists()


def test_the_folder_may_be_among_the_settings(search_file: StudyFile, tmp_path: Path) -> None:
    settings = {"run.dir": str(tmp_path / "set")}
    assert load_search(search_file(dir=None, settings=settings)).folder == tmp_path / "set"
    assert load_search(search_file(settings=settings)).folder == tmp_path / "search"
