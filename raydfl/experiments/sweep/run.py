"""The cells of a sweep as trials, side by side: a run is begun once, goes on after its last commit, and stops no other by failing.

The state of a sweep is the state of its run folders: nothing else is kept.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import joblib

from raydfl.cluster import bundles_of, check_kept
from raydfl.core.files import default_cache
from raydfl.experiments.execute import Decision, Executor, RunConfig, first_words
from raydfl.experiments.plan import prepare, rounds_done
from raydfl.experiments.sweep.grid import CellRun, Sweep
from raydfl.experiments.trial import REASON, TrialOrder
from raydfl.runs import Progress, default_progress, duration


@dataclass
class SweepOutcome:
    """The end of a sweep, by the names of its runs."""

    finished: list[str] = field(default_factory=list)
    """Those finished now."""
    before: list[str] = field(default_factory=list)
    """Those that were finished already."""
    stopped: list[str] = field(default_factory=list)
    """Those that were interrupted, or not begun because of that."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by name."""

    @property
    def complete(self) -> bool:
        """True when every run is finished."""
        return not self.stopped and not self.failed


def run_sweep(
    sweep: Sweep,
    parallel: int | None = None,
    progress: Progress | None = None,
    run_config: RunConfig | None = None,
) -> SweepOutcome:
    """Do all runs of a sweep that are not finished. Ctrl-C lets those under way stop after their round.

    Args:
        parallel: runs at a time; ``None``: as many as the machine's or cluster's CPUs (and GPUs) allow.
        run_config: settings for Ray Tune, see :class:`~raydfl.experiments.execute.Executor`.

    Raises:
        InputError: the recordings of a cell cannot be used, or the cluster cannot hold it; nothing was started.
    """
    progress = progress or default_progress()
    cells, config = sweep.settings.cells, sweep.runs[0].config
    check_kept({"run.dir": sweep.folder, "data.cache": config.data.cache or default_cache()})
    outcome, waiting = SweepOutcome(), []
    for each in sweep.distinct:
        if each.finished:
            outcome.before.append(each.name)
        else:
            waiting.append(each)
    if outcome.before:
        progress.message(f"{len(outcome.before)} of {len(sweep.distinct)} runs are finished already")
    if not waiting:
        return outcome
    if parallel is None and cells.actors and any(each.config.data.sites for each in waiting):
        parallel = 1  # their actors are in no placement group: several runs could wait for each other
    groups = {tuple(map(str, bundles)): bundles for bundles in (_bundles(sweep, each) for each in waiting)}.values()
    with Executor(
        config, sweep.folder, progress, cells.retries, parallel, run_config, _local_cpus(sweep, parallel)
    ) as executor:
        prepare(waiting, progress, executor.run_chunks)
        slots = min(executor.room(bundles, len(waiting)) for bundles in groups)
        progress.message(f"{len(waiting)} runs to do, {slots} at a time, in {sweep.folder}")
        study = _Cells(sweep, waiting, executor, progress, outcome)
        try:
            executor.run(study, ahead=slots)
        finally:
            done = {*outcome.finished, *outcome.failed}
            outcome.stopped += [each.name for each in waiting if each.name not in done]
    return outcome


def _bundles(sweep: Sweep, each: CellRun) -> tuple[dict[str, float], ...]:
    return tuple(bundles_of(each.config, sweep.settings.cells.cpus, clients=0))


def _local_cpus(sweep: Sweep, parallel: int | None) -> int:
    """Return the CPUs of a Ray of this process alone: as many as ``--parallel`` and a cell's own process ask for, at least."""
    here, cells = int(joblib.cpu_count()), sweep.settings.cells
    actors = sum(bundle.get("CPU", 0.0) for bundle in _bundles(sweep, sweep.runs[0])) - cells.cpus
    asked = (parallel or 1) * (cells.cpus + actors) if actors <= here else 0.0
    return max(here, math.ceil(asked))


class _Cells:
    """The runs that are to be done, as a study: nothing depends on what another run has come to."""

    def __init__(
        self, sweep: Sweep, waiting: list[CellRun], executor: Executor, progress: Progress, outcome: SweepOutcome
    ) -> None:
        self._sweep = sweep
        self._runs = waiting
        self._waiting = deque(enumerate(waiting))
        self._executor = executor
        self._progress = progress
        self._outcome = outcome
        self._started: dict[int, float] = {}

    def turns(self) -> Iterator[int]:
        yield len(self._waiting)

    def next(self) -> TrialOrder | None:
        if not self._waiting:
            return None
        number, each = self._waiting.popleft()
        return TrialOrder(
            number=number,
            name=each.name,
            config=each.config.model_dump(mode="json"),
            bundles=_bundles(self._sweep, each),
            judged=False,
            stop=str(self._executor.stop_file),
            log=str(self._executor.logs / f"{each.run_dir.name}.log"),
        )

    def begun(self, number: int) -> None:
        self._started[number] = time.monotonic()
        each = self._runs[number]
        done = rounds_done(each.run_dir)
        self._progress.message(f"started: {each.name}" + (f" (going on after round {done})" if done else ""))

    def scored(self, number: int, round_index: int, score: float) -> Decision:
        return "CONTINUE"

    def ended(self, number: int, status: str, result: Mapping[str, Any]) -> None:
        name, reason = self._runs[number].name, result[REASON]
        if status == "failed":
            self._outcome.failed[name] = reason
            self._progress.message(f"failed: {name}: {first_words(reason)}")
            return
        self._outcome.finished.append(name)
        took = duration(time.monotonic() - self._started[number])
        done = len(self._outcome.finished) + len(self._outcome.failed)
        worthless = f"; worthless: {reason}" if reason else ""
        self._progress.message(f"finished: {name}, {took} ({done} of {len(self._runs)}){worthless}")
