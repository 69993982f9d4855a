"""Doing a sweep: nothing is done twice, what fails or is lost does not stop the rest, and an interruption is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl
from helpers import same, truth
from synthetic import Grid, leave

from raydfl.core.errors import InputError
from raydfl.core.processes import available_cpus
from raydfl.engine.config import Config
from raydfl.experiments.sweep.executors import Ended, LocalProcesses, Order, RayTasks, do_run
from raydfl.experiments.sweep.grid import CellRun, Sweep, load_sweep
from raydfl.experiments.sweep.run import is_finished, rounds_done, run_sweep

Answer = Callable[[str], "Ended | None"]


class Pretended:
    """An executor whose runs end at once, as the test says."""

    own_process = True
    run_chunks = None

    def __init__(self, answer: Answer, runs: Iterable[CellRun]) -> None:
        self.answer = answer
        self.runs = {run.name: run for run in runs}
        self.started: list[str] = []
        self.running: list[str] = []
        self.most = 0
        self.killed = False

    def slots(self, config: Config, cpus: float) -> int:
        return 3

    def start(self, order: Order) -> None:
        self.started.append(order.name)
        self.running.append(order.name)
        self.most = max(self.most, len(self.running))

    def wait(self, seconds: float) -> list[tuple[str, Ended | None]]:
        name = self.running.pop(0)
        ended = self.answer(name)
        if ended is not None and ended.status == "finished":
            leave(self.runs[name], {})
        return [(name, ended)]

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_features(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "pretended" in request.node.name:
        monkeypatch.setattr("raydfl.experiments.sweep.run.prepare", lambda *_: None)


def _finishes(_: str) -> Ended:
    return Ended("finished")


def test_pretended_runs_are_done_once_and_never_again(grid: Grid) -> None:
    sweep = load_sweep(grid())
    first = Pretended(_finishes, sweep.runs)
    outcome = run_sweep(sweep, executor=first)
    assert outcome.complete
    assert sorted(first.started) == sorted(run.name for run in sweep.runs)
    assert first.most == 3
    again = Pretended(_finishes, sweep.runs)
    outcome = run_sweep(load_sweep(grid()), executor=again)
    assert again.started == []
    assert len(outcome.before) == 12
    # A changed cell is a new run, and only that.
    changed = load_sweep(grid(repeat={"run.seed": [1, 2, 3]}))
    third = Pretended(_finishes, changed.runs)
    run_sweep(changed, parallel=1, executor=third)
    assert len(third.started) == 6
    assert all(name.endswith("seed=3") for name in third.started)
    assert third.most == 1


def test_pretended_failures_do_not_stop_the_others(grid: Grid) -> None:
    sweep = load_sweep(grid())
    broken = sweep.runs[1].name
    executor = Pretended(lambda name: Ended("failed", "it broke") if name == broken else Ended("finished"), sweep.runs)
    outcome = run_sweep(sweep, executor=executor)
    assert outcome.failed == {broken: "it broke"}
    assert len(outcome.finished) == 11
    assert not outcome.complete


def test_pretended_runs_of_lost_processes_go_on_a_few_times(grid: Grid) -> None:
    sweep = load_sweep(grid(cells={"retries": 2}))
    unlucky, doomed = sweep.runs[0].name, sweep.runs[1].name
    left = {unlucky: 2, doomed: 99}

    def answer(name: str) -> Ended | None:
        if left.get(name):
            left[name] -= 1
            return None
        return Ended("finished")

    executor = Pretended(answer, sweep.runs)
    outcome = run_sweep(sweep, executor=executor)
    assert executor.started.count(unlucky) == 3
    assert executor.started.count(doomed) == 3
    assert outcome.failed == {doomed: "its process was killed again and again"}


def test_pretended_interruption_lets_running_ones_end_and_starts_no_others(grid: Grid) -> None:
    sweep = load_sweep(grid())
    stop_files: list[bool] = []

    def answer(name: str) -> Ended:
        if not stop_files:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        stop_files.append(bool(list((sweep.folder / "logs").glob(".stop-*"))))
        return Ended("stopped")

    executor = Pretended(answer, sweep.runs)
    outcome = run_sweep(sweep, executor=executor)
    assert len(executor.started) == 3
    assert stop_files == [True, True, True]
    assert sorted(outcome.stopped) == sorted(run.name for run in sweep.runs)
    assert not executor.killed
    assert not list((sweep.folder / "logs").glob(".stop-*"))


def test_pretended_second_interruption_kills(grid: Grid) -> None:
    sweep = load_sweep(grid())
    asked = []

    def answer(name: str) -> Ended | None:
        if len(asked) < 2:
            asked.append(name)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return None

    executor = Pretended(answer, sweep.runs)
    outcome = run_sweep(sweep, executor=executor)
    assert executor.killed
    assert len(outcome.stopped) == 12
    assert outcome.failed == {}


def test_recordings_that_cannot_be_used_are_named_before_anything_starts(grid: Grid) -> None:
    axes = {
        "data": {"there": {}, "gone": {"data": {"name": "fsdd", "root": "/nowhere"}}, "small": {"train.cohort": 50}}
    }
    sweep = load_sweep(grid(axes=axes))
    executor = Pretended(_finishes, sweep.runs)
    with pytest.raises(InputError) as error:
        run_sweep(sweep, executor=executor)
    assert "4 of 6 runs cannot be done; nothing was started" in str(error.value)
    assert "gone, run.seed=1 and 1 more: " in str(error.value)
    assert "/nowhere" in str(error.value)
    assert "small, run.seed=1 and 1 more: train.cohort: 50 clients a round, but the population has 6" in str(
        error.value
    )
    assert executor.started == []


def test_a_processor_does_one_run_at_a_time(tiny: Callable[..., Config]) -> None:
    local = LocalProcesses()
    assert local.slots(tiny(), 1.0) == available_cpus()
    assert local.slots(tiny(), 10_000.0) == 1
    assert local.slots(tiny("ray.actors=3"), 1.0) == max(1, available_cpus() // 4)


def _order(run: CellRun, folder: Path) -> Order:
    return Order(run.name, run.config.model_dump(mode="json"), str(folder / "stop"), str(folder / "log"), False)


def test_one_run_is_the_run_that_raydfl_run_would_do(
    grid: Grid, tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raydfl.runs._run import run

    monkeypatch.setattr("raydfl.runs.report.figures.to_svg", lambda *_: "")
    first = load_sweep(grid()).runs[0]
    assert not is_finished(first)
    assert rounds_done(first) == 0
    assert do_run(_order(first, tmp_path)) == Ended("finished")
    assert is_finished(first)
    same(truth(first.run_dir), truth(run(tiny("run.name=alone")).run_dir))
    (first.run_dir / "report.html").unlink()  # killed between the last round and its page
    assert not is_finished(first)
    assert do_run(_order(first, tmp_path)) == Ended("finished")
    assert is_finished(first)


def test_a_diverged_run_is_finished_and_says_so(grid: Grid, tmp_path: Path) -> None:
    run = load_sweep(grid(settings={"train.optimiser.lr": 1e20})).runs[0]
    ended = do_run(_order(run, tmp_path))
    assert ended.status == "finished"
    assert ended.reason.startswith("the training diverged: ")


def test_a_failing_run_is_told_and_not_raised(grid: Grid, tmp_path: Path) -> None:
    extra = Path(__file__).parents[2] / "extra_methods.py"
    axes = {"method": {"broken": {"method": {"name": f"{extra}:Failing", "client": "s0"}, "train.cohort": 1.0}}}
    sweep = load_sweep(grid(axes=axes))
    ended = do_run(_order(sweep.runs[0], tmp_path))
    assert ended.status == "failed"
    assert "raydfl replay" in ended.reason
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_sweep_that_was_asked_to_stop_starts_nothing(grid: Grid, tmp_path: Path) -> None:
    first = load_sweep(grid()).runs[0]
    (tmp_path / "stop").touch()
    assert do_run(_order(first, tmp_path)) == Ended("stopped")
    assert not first.run_dir.exists()


def test_a_run_stops_after_its_round_and_goes_on_to_the_same_bits(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydfl.runs.report.figures.to_svg", lambda *_: "")
    monkeypatch.setattr("raydfl.experiments.sweep.executors._POLL", 0.01)
    sweep = load_sweep(grid(), ["train.rounds=40", "evaluate.every=40", "evaluate.clients=none"])
    first = sweep.runs[0]

    def stop_soon() -> None:
        while rounds_done(first) < 2:
            time.sleep(0.005)
        (tmp_path / "stop").touch()

    threading.Thread(target=stop_soon).start()
    assert do_run(_order(first, tmp_path)) == Ended("stopped")
    assert 2 <= rounds_done(first) < 40
    (tmp_path / "stop").unlink()
    assert do_run(_order(first, tmp_path)) == Ended("finished")
    interrupted = truth(first.run_dir)
    shutil.rmtree(first.run_dir)
    assert do_run(_order(first, tmp_path)) == Ended("finished")
    same(interrupted, truth(first.run_dir))


@pytest.mark.slow
def test_the_command_does_four_cells_in_two_processes_and_survives_ctrl_c(
    grid: Grid, tmp_path: Path, raydfl: Raydfl
) -> None:
    file = grid(
        axes={"c": {"a": {}, "b": {"train.optimiser.lr": 0.05}}}, settings={"train.rounds": 30, "evaluate.every": 10}
    )
    command = [sys.executable, "-m", "raydfl", "sweep", str(file), "--parallel", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "runs").glob("*/commits")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert "the same command goes on with them" in out
    before = {run.name for run in load_sweep(file).runs if is_finished(run)}
    assert len(before) < 4
    said = raydfl("sweep", file, "--parallel", "2")
    assert said.code == 0, said.out + said.err
    started = [line for line in said.out.splitlines() if line.startswith("started: ")]
    assert len(started) == 4 - len(before)
    assert all(is_finished(run) for run in load_sweep(file).runs)
    assert raydfl("sweep", file).out.startswith("4 of 4 runs are finished already")


@pytest.mark.slow
def test_runs_are_tasks_of_a_cluster(grid: Grid, ray_session: None, tmp_path: Path) -> None:
    import ray

    def done(actors: int, folder: str) -> Sweep:
        axes = {"c": {"a": {}, "b": {"train.optimiser.lr": 0.05}}}
        where = {"dir": str(tmp_path / folder), "cells": {"actors": actors}}
        sweep = load_sweep(grid(axes=axes, repeat={"run.seed": [1]}, **where))
        executor: Any = RayTasks(cpus=1.0, retries=1)
        cpus = int(ray.cluster_resources()["CPU"])
        assert executor.slots(sweep.runs[0].config, 1.0) == (cpus // 2 if actors else cpus)
        outcome = run_sweep(sweep, executor=executor)
        executor.close()
        assert outcome.complete, outcome
        assert all(is_finished(run) for run in sweep.runs)
        return sweep

    # Whether a run's clients are actors makes no difference, and no other run.
    for alone, with_actors in zip(done(0, "alone").runs, done(1, "actors").runs, strict=True):
        assert alone.identity == with_actors.identity
        same(truth(alone.run_dir), truth(with_actors.run_dir))
