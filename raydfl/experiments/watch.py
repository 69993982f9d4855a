"""A callback of Ray Tune for studies: messages, progress bars, the study's state, and its end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import tune

from raydfl.cluster import Bundle, format_shortage, is_granted, list_placement_groups, make_bundles
from raydfl.core.errors import ResourcesError
from raydfl.core.words import format_duration
from raydfl.experiments.federation import FAILED, ROUND, SCORE, STATUS, WORTHLESS
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Trial, count_rounds
from raydfl.runs import Advance, Progress, StopSignals

_QUIET = 10.0
"""Seconds without a running trial before a message about missing resources."""
_LOOK = 0.5
"""Seconds between two updates of the progress bars."""
SHORT = 300
"""Maximum characters of a failure in a message. The log has the full text."""


def get_point(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the point in Ray Tune's configuration of a trial."""
    point: Mapping[str, Any] = config.get("point", config)
    return point


LIVE: list[Watch] = []
"""Watches of this process. A restored experiment unpickles to the last watch, instead of the saved watch."""


def _find_watch() -> Watch:
    return LIVE[-1]


class Watch(tune.Callback):
    """A callback that shows messages and progress bars, records states, and ends a study without resources or after Ctrl-C."""

    def __init__(self, state: StudyState, progress: Progress, signals: StopSignals, stop: Path) -> None:
        self.error: Exception | None = None
        self._study, self._state, self._left = state.study, state, state.left
        ray = state.study.first.config.ray
        self._seconds, self._queue = ray.ready_timeout, ray.queue
        self._progress, self._signals, self._stop = progress, signals, stop
        self._foreign_groups = list_placement_groups()
        self._starved_since = self._looked = time.monotonic()
        self._announced = self._ending = False
        self._started: dict[str, float] = {}
        self._ended = 0
        self._bars: dict[str, tuple[contextlib.ExitStack, Advance, int]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_watch, ()

    @property
    def has_started(self) -> bool:
        """True if any trial has started."""
        return bool(self._started)

    def _find_trial(self, tune_trial: Any) -> Trial:
        return self._study.trial(get_point(tune_trial.config), tune_trial.trial_id)

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Update progress bars, and check for a request to stop and for a lack of resources.

        Ray Tune calls it many times a second.

        Raises:
            ResourcesError: No trial could start for too long, or the state cannot be written.
        """
        if self.error is not None:
            raise self.error
        if self._signals.asked and not self._ending:
            self._ending = True
            signal.raise_signal(signal.SIGUSR1)  # Ray Tune saves the experiment, stops the trials and returns.
        running = [trial for trial in trials if trial.status == "RUNNING"]
        now = time.monotonic()
        if self._progress.live and now - self._looked > _LOOK:
            self._looked = now
            self._update_bars([self._find_trial(trial) for trial in running])
        pending = next((trial for trial in trials if trial.status == "PENDING"), None)
        if running or pending is None:
            self._starved_since = now
        elif now - self._starved_since >= min(_QUIET, self._seconds):
            self._check_wait(
                tuple(make_bundles(self._find_trial(pending).config, self._study.settings.cpus, clients=0)), now
            )

    def _check_wait(self, bundles: Sequence[Bundle], now: float) -> None:
        if is_granted(
            bundles, self._foreign_groups
        ):  # The trial's process is starting, which is slow on a busy machine.
            self._starved_since = now
            return
        text = format_shortage(bundles)
        if not self._announced:
            self._announced = True
            self._progress.message(f"waiting for resources: {text}")
        if not self._queue and now - self._starved_since > self._seconds:
            self.error = ResourcesError(
                f"no trial could start within {self._seconds:g} s (ray.ready_timeout): {text}. Wait for the end of other jobs, "
                f"lower actors, ray.cpus, ray.gpus or cpus, or raise ray.ready_timeout if nodes are still starting. The same "
                f"command continues."
            )
            raise self.error

    def _update_bars(self, running: Sequence[Trial]) -> None:
        """Show a bar for each running trial on a terminal."""
        for name in self._bars.keys() - {trial.name for trial in running}:
            self._bars.pop(name)[0].close()
        for trial in running:
            if trial.name not in self._bars:
                stack = contextlib.ExitStack()
                advance = stack.enter_context(self._progress.steps(trial.name, trial.config.train.rounds))
                self._bars[trial.name] = (stack, advance, 0)
            stack, advance, shown = self._bars[trial.name]
            done = count_rounds(trial.run_dir)
            if done != shown:
                advance(done - shown)
                self._bars[trial.name] = (stack, advance, done)

    def _record(self, trial: Trial, *status: Any) -> None:
        """Record a trial's state. An error is kept for the next step, because Ray Tune would report a lost trial."""
        try:
            self._state.note(trial, *status)
        except Exception as error:  # noqa: BLE001
            self.error = self.error or error
            with contextlib.suppress(OSError):
                self._stop.touch()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report the start of a trial."""
        started = self._find_trial(trial)
        if trial.trial_id not in self._started:
            self._started[trial.trial_id] = time.monotonic()
            done = count_rounds(started.run_dir)
            text = f": {started.text}" * bool(started.values) + f" (continuing after round {done})" * bool(done)
            self._progress.message(f"started: {started.name}{text}")
        self._record(started, "running")

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report the loss of a trial's process."""
        self._progress.message(
            f"lost: {self._find_trial(trial).name}. Its process was killed, perhaps for lack of memory. The trial continues."
        )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record and report a completed trial."""
        completed, result = self._find_trial(trial), trial.last_result
        if FAILED in result:
            self._fail(completed, result[FAILED])
            return
        stopped = result[STATUS] != "finished"
        reason = self._study.settings.scheduler.name if stopped else result.get(WORTHLESS, "")
        status = "stopped" if stopped else "finished"
        self._record(completed, status, reason)
        self._ended += 1
        duration = format_duration(time.monotonic() - self._started.get(trial.trial_id, time.monotonic()))
        searched = bool(self._study.settings.domains)
        metric = completed.metric
        score = f", {metric.title} {metric.scale * result[SCORE]:.2f}" if searched else ""
        why = f" after round {result[ROUND]} ({reason})" if stopped else f"; worthless: {reason}" * bool(reason)
        self._progress.message(f"{status}: {completed.name}, {duration} ({self._ended} of {self._left}){score}{why}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record a trial that failed after too many losses of its process."""
        self._fail(self._find_trial(trial), "its process was lost repeatedly, perhaps for lack of memory")

    def _fail(self, trial: Trial, reason: str) -> None:
        self._record(trial, "failed", reason)
        self._ended += 1
        self._progress.message(f"failed: {trial.name}: {(reason.splitlines() or [''])[0][:SHORT]}")

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Remove the progress bars."""
        self._update_bars([])
