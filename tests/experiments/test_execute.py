"""Ray's own settings of an experiment, where raydfl starts Ray Tune."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray import train, tune
from studies import StudyFile

from raydfl.core.errors import ConfigError, RaydflError, ResourcesError
from raydfl.engine.config import Config
from raydfl.experiments.execute import Executor, _check_run_config
from raydfl.experiments.search import load_search, run_search
from raydfl.experiments.sweep import load_sweep, run_sweep
from raydfl.experiments.trial import REASON, STATUS, TrialOrder
from raydfl.runs.progress import Progress


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


class Tune:
    """Ray Tune, as far as it decides what becomes of failures: a trial whose end cannot be noted is lost, and others go on."""

    asked: ClassVar[list[str]] = []

    def __init__(self, _: Any, tune_config: tune.TuneConfig, run_config: tune.RunConfig) -> None:
        self.scheduler, self.searcher = tune_config.scheduler, tune_config.search_alg
        self.watch = (run_config.callbacks or [])[0]

    def fit(self) -> None:
        while (found := self.searcher.suggest("")) != "FINISHED":
            type(self).asked.append(found["order"].name)
            trial = SimpleNamespace(config=found, status="RUNNING", should_recover=lambda: True)
            self.watch.on_step_begin(0, [trial])
            with contextlib.suppress(Exception):
                self.scheduler.on_trial_complete(None, trial, {STATUS: "finished", REASON: ""})


class Orders:
    """A study of two trials; the end of the first cannot be noted."""

    def __init__(self, folder: Path) -> None:
        self.orders = [TrialOrder(n, f"{n}", {"run": {"dir": str(folder), "name": f"{n}"}}) for n in range(2)]

    def turns(self) -> Iterator[int]:
        yield 2

    def next(self) -> TrialOrder | None:
        return self.orders.pop(0) if self.orders else None

    def begun(self, number: int) -> None: ...

    def scored(self, number: int, round_index: int, score: float) -> Any: ...

    def ended(self, number: int, status: str, result: Any) -> None:
        raise ResourcesError("the disk is full")


@pytest.fixture
def executor(tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executor:
    monkeypatch.setattr("ray.tune.Tuner", Tune)
    monkeypatch.setattr("raydfl.experiments.execute.placement_groups", dict)
    monkeypatch.setattr(Tune, "asked", [])
    (tmp_path / "logs").mkdir()
    return Executor(tiny(), tmp_path, Progress("quiet"), 0, None)


@pytest.mark.parametrize("writable", [True, False])
def test_what_fails_in_a_study_ends_it_with_that_and_no_further_trial_begins(
    executor: Executor, tmp_path: Path, writable: bool
) -> None:
    if not writable:
        executor.stop_file = tmp_path / "gone" / "stop"
    with pytest.raises(ResourcesError, match="the disk is full"):
        executor.run(Orders(tmp_path))
    assert Tune.asked == ["0"]
    assert executor.stop_file.exists() is writable  # runs under way stop after their round


def test_a_second_request_to_stop_ends_it_in_any_thread_and_kills_nobody(executor: Executor, tmp_path: Path) -> None:
    executor._stop_at_once()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(executor.run, Orders(tmp_path)).result()
    assert Tune.asked == ["0"]


def test_a_failure_of_ray_tunes_says_how_to_go_on(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tune, "fit", lambda _: 1 / 0)
    with pytest.raises(RaydflError, match="Ray Tune failed: ZeroDivisionError: .* the same command goes on") as error:
        executor.run(Orders(tmp_path))
    assert error.value.exit_code == 1
    assert "Traceback" in (tmp_path / "logs" / "ray-tune.log").read_text()


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
