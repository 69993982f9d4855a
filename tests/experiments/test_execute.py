"""Ray's own settings of an experiment, where raydfl starts Ray Tune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import train, tune
from studies import StudyFile

from raydfl.core.errors import ConfigError
from raydfl.experiments.execute import _check_run_config
from raydfl.experiments.search import load_search, run_search
from raydfl.experiments.sweep import load_sweep, run_sweep


class Seen(tune.Callback):
    """A user's callback: the trials that it saw complete, in a file, for Ray Tune copies callbacks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{trial}\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (tune.RunConfig(callbacks=[object()]), "callbacks must be of Ray Tune"),  # type: ignore[list-item]
        (tune.RunConfig(checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1)), "makes no other checkpoints"),
        (tune.RunConfig(stop={"round": 2}), "stop"),
    ],
)
def test_what_a_study_does_not_have_is_refused(
    grid: StudyFile, search_file: StudyFile, given: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_sweep(load_sweep(grid()), run_config=given)
    with pytest.raises(ConfigError, match=message):
        run_search(load_search(search_file()), run_config=given)


def test_the_settings_of_ray_train_are_accepted() -> None:
    _check_run_config(train.RunConfig(name="x", failure_config=train.FailureConfig(max_failures=1)))
    _check_run_config(None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_storage_callbacks_and_failures_are_those_of_rays_run_config(
    grid: StudyFile, search_file: StudyFile, ray_session: None, tmp_path: Path
) -> None:
    sweep = load_sweep(grid(axes={"c": {"a": {}, "b": {"train.optimiser.lr": 0.05}}}, repeat={"run.seed": [1]}))
    own = tune.RunConfig(name="mine", storage_path=str(tmp_path / "tune"), callbacks=[Seen(tmp_path / "seen")])
    assert run_sweep(sweep, run_config=own).complete
    assert sorted((tmp_path / "seen").read_text().split()) == sorted(run.run_dir.name for run in sweep.runs)
    assert list((tmp_path / "tune" / "mine").glob("experiment_state-*.json"))
    assert not list(sweep.folder.glob(".tune*"))

    trained = train.RunConfig(
        name="search", storage_path=str(tmp_path / "tune"), failure_config=train.FailureConfig(max_failures=1)
    )
    assert run_search(load_search(search_file(samples=1, rounds=2)), run_config=trained).complete
    assert list((tmp_path / "tune" / "search").glob("experiment_state-*.json"))
