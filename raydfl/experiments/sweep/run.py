"""The runs of a sweep side by side: each in a process of its own on this machine, or as a Ray task of its own on a cluster.

A run that is finished is never begun again, an interrupted one goes on after its last commit, and one that fails does not stop the
others. The state of a sweep is the state of its run folders: nothing else is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from raydfl.cluster.job import check_kept
from raydfl.cluster.session import connected
from raydfl.core.errors import InputError, ResourcesError
from raydfl.core.files import default_cache
from raydfl.data.build import build_population
from raydfl.data.features.extraction import RunChunks
from raydfl.engine.config import Config
from raydfl.engine.storage.store import RunStore, round_of
from raydfl.experiments.sweep.executors import Ended, Executor, LocalProcesses, Order, RayTasks
from raydfl.experiments.sweep.grid import CellRun, Sweep
from raydfl.runs.progress import Advance, Progress, duration
from raydfl.runs.stopping import StopSignals

_POLL = 0.5
"""Seconds between two looks at what runs."""
_MESSAGE = 300
"""Characters of a failure that a line repeats; the log has all."""


@dataclass
class SweepOutcome:
    """How a sweep ended, by the names of its runs."""

    finished: list[str] = field(default_factory=list)
    """Those finished now."""
    before: list[str] = field(default_factory=list)
    """Those that were finished already."""
    stopped: list[str] = field(default_factory=list)
    """Those that were interrupted, or not begun because of that."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by name."""

    @property
    def complete(self) -> bool:
        """Whether every run is finished."""
        return not self.stopped and not self.failed


def rounds_done(run: CellRun) -> int:
    """Committed rounds; 0 of a run that has not begun."""
    if not (run.run_dir / "run.json").exists():
        return 0
    name = RunStore(run.run_dir).latest()
    return 0 if name is None else round_of(name)


def is_finished(run: CellRun) -> bool:
    """Whether all rounds are done and what comes after them (the model, the report) is written."""
    return rounds_done(run) >= run.config.train.rounds and (run.run_dir / "report.html").exists()


def run_sweep(
    sweep: Sweep, parallel: int | None = None, progress: Progress | None = None, executor: Executor | None = None
) -> SweepOutcome:
    """Do all runs of a sweep that are not finished. Ctrl-C lets those under way stop after their round.

    Args:
        parallel: runs at a time; ``None``: as many as the machine's or cluster's CPUs (and GPUs) allow.
        executor: where they run; ``None``: the Ray cluster that the configuration or ``RAY_ADDRESS`` names, else this machine.

    Raises:
        InputError: the recordings of a cell cannot be used; nothing was started.
    """
    progress = progress or Progress("quiet")
    cache = sweep.runs[0].config.data.cache or default_cache()
    check_kept({"run.dir": sweep.folder, "data.cache": cache})
    outcome = SweepOutcome()
    waiting: deque[CellRun] = deque()
    for each in sweep.distinct:
        if is_finished(each):
            outcome.before.append(each.name)
        else:
            waiting.append(each)
    if outcome.before:
        progress.message(f"{len(outcome.before)} of {len(sweep.distinct)} runs are finished already")
    if not waiting:
        return outcome
    with contextlib.ExitStack() as stack:
        executor = executor or _executor(sweep, stack)
        prepare(list(waiting), progress, executor.run_chunks)
        slots = parallel or executor.slots(waiting[0].config, sweep.settings.cells.cpus)
        progress.message(f"{len(waiting)} runs to do, {min(slots, len(waiting))} at a time, in {sweep.folder}")
        _Loop(sweep, waiting, slots, executor, progress, outcome).run()
    return outcome


class Planned(Protocol):
    """A run that shall be done: of a sweep or of a search."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def run_dir(self) -> Path:
        """Its folder, there or to be made."""

    @property
    def config(self) -> Config:
        """With the run's folder and name in it."""


def prepare(runs: Sequence[Planned], progress: Progress, run_chunks: RunChunks | None = None) -> None:
    """Make the features that the runs need, each once, and find out what recordings or splits do not allow.

    Raises:
        InputError: naming the cells whose recordings cannot be used.
    """
    known: dict[str, int] = {}
    faults: dict[str, list[str]] = {}
    for each in runs:
        if (each.run_dir / "run.json").exists():
            continue  # it has its population, and whatever is missing it says itself
        if each.config.data.sites:
            continue  # its recordings are not here: each site prepares its own when the run begins
        key = json.dumps([each.config.data.model_dump(mode="json"), each.config.run.seed], sort_keys=True)
        try:
            if key not in known:
                settings, needed = each.config, each.config.labels_needed
                population = build_population(
                    settings.data, settings.run.seed, progress, run_chunks, labels_needed=needed
                )
                known[key] = len(population)
            each.config.train.cohort_size(known[key])
        except ResourcesError:
            raise
        except InputError as error:
            faults.setdefault(str(error), []).append(each.name)
    if faults:
        lines = [f"{sum(map(len, faults.values()))} of {len(runs)} runs cannot be done; nothing was started"]
        for message, names in faults.items():
            lines.append(f"  {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {message}")
        raise InputError("\n".join(lines))


def _executor(sweep: Sweep, stack: contextlib.ExitStack) -> Executor:
    """The cluster when one is named, else this machine."""
    config = sweep.runs[0].config
    made: Executor
    if config.ray.address or os.environ.get("RAY_ADDRESS"):
        stack.enter_context(connected(config.ray.address, quiet=True))
        made = RayTasks(sweep.settings.cells.cpus, sweep.settings.cells.retries)
    else:
        made = LocalProcesses()
    stack.callback(made.close)
    return made


# -- the loop --------------------------------------------------------------------------------------------------------


class _Loop:
    """Keeps as many runs going as there are slots, until all have ended or the user stops it."""

    def __init__(
        self,
        sweep: Sweep,
        waiting: deque[CellRun],
        slots: int,
        executor: Executor,
        progress: Progress,
        outcome: SweepOutcome,
    ) -> None:
        self._sweep = sweep
        self._waiting = waiting
        self._slots = slots
        self._executor = executor
        self._progress = progress
        self._outcome = outcome
        self._running: dict[str, CellRun] = {}
        self._lost: dict[str, int] = {}
        self._started: dict[str, float] = {}
        self._count = len(waiting)
        self._stop_file = sweep.folder / "logs" / f".stop-{os.getpid()}"
        self._signals = StopSignals(
            progress, "runs stop after their round", "them", self._stop_file.touch, executor.kill
        )

    def run(self) -> None:
        """Until nothing runs and nothing waits."""
        self._stop_file.parent.mkdir(parents=True, exist_ok=True)
        self._stop_file.unlink(missing_ok=True)
        with self._signals, _Rounds(self._progress) as rounds:
            try:
                while self._running or (self._waiting and not self._signals.asked):
                    while self._waiting and len(self._running) < self._slots and not self._signals.asked:
                        self._start(self._waiting.popleft())
                    for name, ended in self._executor.wait(_POLL):
                        self._end(self._running.pop(name), ended)
                    rounds.show(self._running)
            finally:
                self._outcome.stopped += [each.name for each in self._waiting]
                self._stop_file.unlink(missing_ok=True)

    def _start(self, each: CellRun) -> None:
        self._running[each.name] = each
        self._started.setdefault(each.name, time.monotonic())
        if each.name not in self._lost:
            done = rounds_done(each)
            self._progress.message(f"started: {each.name}" + (f" (going on after round {done})" if done else ""))
        log = self._sweep.folder / "logs" / f"{each.config.run.name}.log"
        values = each.config.model_dump(mode="json")
        self._executor.start(Order(each.name, values, str(self._stop_file), str(log), self._executor.own_process))

    def _end(self, each: CellRun, ended: Ended | None) -> None:
        if (
            ended is None
            and not self._signals.asked
            and self._lost.get(each.name, 0) < self._sweep.settings.cells.retries
        ):
            self._lost[each.name] = self._lost.get(each.name, 0) + 1
            self._progress.message(f"lost: {each.name}; its process was killed, for lack of memory perhaps; it goes on")
            self._waiting.appendleft(each)
            return
        if ended is None:
            ended = (
                Ended("stopped") if self._signals.asked else Ended("failed", "its process was killed again and again")
            )
        if ended.status == "finished":
            self._outcome.finished.append(each.name)
            took = duration(time.monotonic() - self._started[each.name])
            done = len(self._outcome.finished) + len(self._outcome.failed)
            worthless = f"; worthless: {ended.reason}" if ended.reason else ""
            self._progress.message(f"finished: {each.name}, {took} ({done} of {self._count}){worthless}")
        elif ended.status == "stopped":
            self._outcome.stopped.append(each.name)
        else:
            self._outcome.failed[each.name] = ended.reason
            first = (ended.reason.splitlines() or [""])[0][:_MESSAGE]
            self._progress.message(f"failed: {each.name}: {first}")


class _Rounds:
    """On a terminal a bar for each run under way; elsewhere nothing: a line for each round of many runs would help nobody."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, tuple[contextlib.ExitStack, Advance, int]] = {}

    def __enter__(self) -> _Rounds:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._bars):
            self._bars.pop(name)[0].close()

    def show(self, running: Mapping[str, CellRun]) -> None:
        """The rounds that each run has committed."""
        if self._progress.mode != "bar":
            return
        for name in [name for name in self._bars if name not in running]:
            self._bars.pop(name)[0].close()
        for name, each in running.items():
            if name not in self._bars:
                stack = contextlib.ExitStack()
                advance = stack.enter_context(self._progress.steps(name, each.config.train.rounds))
                self._bars[name] = (stack, advance, 0)
            stack, advance, shown = self._bars[name]
            done = rounds_done(each)
            if done != shown:
                advance(done - shown)
                self._bars[name] = (stack, advance, done)
