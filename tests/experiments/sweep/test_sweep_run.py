"""Doing a sweep: nothing is done twice, what fails or is lost does not stop the rest, and an interruption is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import pytest
from commands import Raydfl
from helpers import known
from studies import StudyFile, leave

from raydfl.core.errors import InputError, ResourcesError
from raydfl.engine.config import Config, make_config
from raydfl.experiments.execute import Study
from raydfl.experiments.plan import rounds_done
from raydfl.experiments.sweep import load_sweep, run_sweep
from raydfl.experiments.sweep.run import _local_cpus
from raydfl.experiments.trial import REASON
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors


class Pretended:
    """An executor whose runs end at once: finished, unless the test names a reason for a failure."""

    run_chunks = None
    stop_file = logs = Path("/nowhere")

    def __init__(self, failures: dict[str, str] | None = None, stop_after: int = 10**9) -> None:
        self.failures = failures or {}
        self.stop_after = stop_after
        self.started: list[str] = []
        self.parallel: int | None = None

    def __call__(
        self, config: Config, folder: Path, progress: Progress, retries: int, parallel: int | None, *_: Any
    ) -> Any:
        self.parallel = parallel
        return self

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None: ...

    def room(self, bundles: Any, most: int) -> int:
        return most

    def run(self, study: Study, ahead: int) -> None:
        for _ in study.turns():
            while len(self.started) < self.stop_after and (order := study.next()) is not None:
                self.started.append(order.name)
                study.begun(order.number)
                reason = self.failures.get(order.name, "")
                if not reason:
                    left: Any = SimpleNamespace(run_dir=order.folder, config=make_config(order.config))
                    leave(left, {})
                study.ended(order.number, "failed" if reason else "finished", {REASON: reason})


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pretended]:
    def executor(*arguments: Any) -> Pretended:
        made = Pretended(*arguments)
        monkeypatch.setattr("raydfl.experiments.sweep.run.Executor", made)
        monkeypatch.setattr("raydfl.experiments.sweep.run.prepare", lambda *_: None)
        return made

    return executor


def test_runs_are_done_once_and_never_again(grid: StudyFile, pretend: Callable[..., Pretended]) -> None:
    sweep = load_sweep(grid())
    first = pretend()
    assert run_sweep(sweep).complete
    assert sorted(first.started) == sorted(run.name for run in sweep.runs)
    again = pretend()
    outcome = run_sweep(load_sweep(grid()))
    assert again.started == []
    assert len(outcome.before) == 12
    # A changed cell is a new run, and only that.
    third = pretend()
    run_sweep(load_sweep(grid(repeat={"run.seed": [1, 2, 3]})), parallel=1)
    assert len(third.started) == 6
    assert all(name.endswith("seed=3") for name in third.started)
    assert third.parallel == 1


def test_failures_do_not_stop_the_others(
    grid: StudyFile, pretend: Callable[..., Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = load_sweep(grid())
    broken = sweep.runs[1].name
    pretend({broken: "it broke\nat length"})
    with Progress("lines") as progress:
        outcome = run_sweep(sweep, progress=progress)
    assert outcome.failed == {broken: "it broke\nat length"}
    assert len(outcome.finished) == 11
    assert not outcome.complete
    said = capsys.readouterr().out.splitlines()
    assert f"failed: {broken}: it broke" in said
    assert sum(line.startswith("started: ") for line in said) == 12


def test_what_was_not_begun_or_not_finished_is_stopped(grid: StudyFile, pretend: Callable[..., Pretended]) -> None:
    sweep = load_sweep(grid())
    pretend({}, 3)
    outcome = run_sweep(sweep)
    assert (len(outcome.finished), len(outcome.stopped)) == (3, 9)
    assert sorted(outcome.finished + outcome.stopped) == sorted(run.name for run in sweep.runs)


def test_recordings_that_cannot_be_used_are_named_before_anything_starts(grid: StudyFile, ray_session: None) -> None:
    axes = {
        "data": {"there": {}, "gone": {"data": {"name": "fsdd", "root": "/nowhere"}}, "small": {"train.cohort": 50}}
    }
    sweep = load_sweep(grid(axes=axes))
    with pytest.raises(InputError) as error:
        run_sweep(sweep)
    assert "4 of 6 runs cannot be done; nothing was started" in str(error.value)
    assert "gone, run.seed=1 and 1 more: " in str(error.value)
    assert "/nowhere" in str(error.value)
    small = "small, run.seed=1 and 1 more: train.cohort: 50 clients a round, but the population has 6"
    assert small in str(error.value)
    assert not any(run.run_dir.exists() for run in sweep.runs)


def test_a_cell_that_the_cluster_cannot_hold_is_refused(grid: StudyFile, ray_session: None) -> None:
    sweep = load_sweep(grid(cells={"actors": 4}))
    with pytest.raises(ResourcesError, match=r"a trial needs 5 CPU \(its own process and 4 client actors\)"):
        run_sweep(sweep)


def test_a_local_ray_has_what_the_machine_or_the_user_says(grid: StudyFile) -> None:
    here = joblib.cpu_count()
    assert _local_cpus(load_sweep(grid()), None) == here
    assert _local_cpus(load_sweep(grid()), here + 3) == here + 3
    assert _local_cpus(load_sweep(grid(cells={"cpus": here + 0.5})), None) == here + 1
    assert _local_cpus(load_sweep(grid(cells={"actors": here})), None) == here + 1
    assert _local_cpus(load_sweep(grid(cells={"actors": here + 1})), None) == here  # too many for this machine: refused


# -- with Ray Tune ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_does_four_cells_side_by_side_and_survives_ctrl_c(
    grid: StudyFile, tmp_path: Path, raydfl: Raydfl
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
    before = {run.name for run in load_sweep(file).runs if run.finished}
    assert len(before) < 4
    said = raydfl("sweep", file, "--parallel", "2")
    assert said.code == 0, said.out + said.err
    started = [line for line in said.out.splitlines() if line.startswith("started: ")]
    assert len(started) == 4 - len(before)
    assert all(run.finished for run in load_sweep(file).runs)
    assert not list((tmp_path / "runs").glob(".tune*"))
    assert raydfl("sweep", file).out.startswith("4 of 4 runs are finished already")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cells_have_the_bits_of_runs_alone_with_actors_or_without(
    grid: StudyFile, ray_session: None, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """A failing cell among them stops no other, and is told in full in the log."""
    extra = Path(__file__).parents[2] / "extra_methods.py"
    broken = {"method": {"name": f"{extra}:Failing", "client": "s0"}, "train.cohort": 1.0}
    axes = {"c": {"a": {}, "broken": broken, "b": {"train.optimiser.lr": 0.05}}}
    done = []
    for actors, folder in ((0, "alone"), (1, "actors")):
        place = tmp_path / folder
        sweep = load_sweep(grid(axes=axes, repeat={"run.seed": [1]}, dir=str(place), cells={"actors": actors}))
        outcome = run_sweep(sweep)
        assert [name.partition(",")[0] for name in outcome.failed] == ["broken"]
        assert "raydfl replay" in next(iter(outcome.failed.values()))
        assert "Traceback" in next((place / "logs").glob("broken-*.log")).read_text()
        done.append([run for run in sweep.runs if run.finished])
    assert [len(runs) for runs in done] == [2, 2]
    for alone, with_actors in zip(*done, strict=True):
        assert alone.identity == with_actors.identity
        assert_same_bits(read_tensors(alone.run_dir), read_tensors(with_actors.run_dir))
    assert_same_bits(read_tensors(done[0][0].run_dir), known(tiny()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_process_is_killed_goes_on_to_the_same_bits(
    grid: StudyFile, ray_session: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def sweep_in(folder: str) -> Any:
        settings = {"train.rounds": 300, "evaluate.every": 300, "evaluate.clients": "none"}
        return load_sweep(
            grid(axes={"c": {"a": {}}}, repeat={"run.seed": [1]}, settings=settings, dir=str(tmp_path / folder))
        )

    def kill(run_dir: Path) -> None:
        while rounds_done(run_dir) < 2:
            time.sleep(0.005)
        os.kill(int((run_dir / ".driver.lock").read_text().split()[0]), signal.SIGKILL)

    sweep = sweep_in("killed")
    threading.Thread(target=kill, args=(sweep.runs[0].run_dir,), daemon=True).start()
    with Progress("lines") as progress:
        assert run_sweep(sweep, progress=progress).complete
    said = capsys.readouterr().out
    assert said.count("started: ") == said.count("lost: a, run.seed=1; ") == 1
    undisturbed = sweep_in("undisturbed")
    assert run_sweep(undisturbed).complete
    assert_same_bits(read_tensors(sweep.runs[0].run_dir), read_tensors(undisturbed.runs[0].run_dir))
