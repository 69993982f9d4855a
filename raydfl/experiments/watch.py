"""The user's view of a study while Ray Tune trains: messages, progress bars, the study's state, and its end."""

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
from raydfl.experiments.federation import FAILED, ROUND, SCORE, STATUS, WORTHLESS
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Trial, rounds_done
from raydfl.runs import Advance, Progress, StopSignals, format_duration

_QUIET = 10.0
"""Seconds without a running trial after which the user is told what the study waits for."""
_LOOK = 0.5
"""Seconds between two updates of the progress bars."""
SHORT = 300
"""Characters of a failure that a message repeats; the log has all."""


def point_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the point in a trial's configuration of Ray Tune."""
    found: Mapping[str, Any] = config.get("point", config)
    return found


LIVE: list[Watch] = []
"""The watch of the experiment in this process: a restored experiment gets it in place of the one that it was saved with."""


def _find_watch() -> Watch:
    return LIVE[-1]


class Watch(tune.Callback):
    """Messages and progress bars for the user, the study's state, and an end when trials cannot begin or shall stop."""

    def __init__(self, state: StudyState, progress: Progress, signals: StopSignals, stop: Path) -> None:
        self.error: Exception | None = None
        self._study, self._state, self._left = state.study, state, state.left
        self._seconds = state.study.first.config.ray.ready_timeout
        self._progress, self._signals, self._stop = progress, signals, stop
        self._before = list_placement_groups()
        self._since = self._looked = time.monotonic()
        self._told = self._ending = False
        self._started: dict[str, float] = {}
        self._over = 0
        self._bars: dict[str, tuple[contextlib.ExitStack, Advance, int]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_watch, ()

    def _trial(self, trial: Any) -> Trial:
        return self._study.trial(point_of(trial.config), trial.trial_id)

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Look at the trials; called in Ray Tune's loop, many times a second.

        Raises:
            ResourcesError: no trial could begin for too long, or the state could not be written.
        """
        if self.error is not None:
            raise self.error
        if self._signals.asked and not self._ending:
            self._ending = True
            signal.raise_signal(signal.SIGUSR1)  # Ray Tune saves the experiment, stops the trials and returns
        running = [trial for trial in trials if trial.status == "RUNNING"]
        now = time.monotonic()
        if self._progress.live and now - self._looked > _LOOK:
            self._looked = now
            self._show([self._trial(trial) for trial in running])
        pending = next((trial for trial in trials if trial.status == "PENDING"), None)
        if running or pending is None:
            self._since = now
        elif now - self._since >= min(_QUIET, self._seconds):
            self._wait(tuple(make_bundles(self._trial(pending).config, self._study.settings.cpus, clients=0)), now)

    def _wait(self, bundles: Sequence[Bundle], now: float) -> None:
        if is_granted(bundles, self._before):  # a process is starting, which takes time on a busy machine
            self._since = now
            return
        text = format_shortage(bundles)
        if not self._told:
            self._told = True
            self._progress.message(f"waiting for resources: {text}")
        if now - self._since > self._seconds:
            self.error = ResourcesError(
                f"no trial could begin within {self._seconds:g} s (ray.ready_timeout): {text}; wait until others have ended, "
                f"lower actors, ray.cpus, ray.gpus or cpus, or raise ray.ready_timeout if nodes are still starting; the "
                f"same command continues"
            )
            raise self.error

    def _show(self, running: Sequence[Trial]) -> None:
        """Show a bar for each running trial on a terminal."""
        for name in self._bars.keys() - {trial.name for trial in running}:
            self._bars.pop(name)[0].close()
        for trial in running:
            if trial.name not in self._bars:
                stack = contextlib.ExitStack()
                advance = stack.enter_context(self._progress.steps(trial.name, trial.config.train.rounds))
                self._bars[trial.name] = (stack, advance, 0)
            stack, advance, shown = self._bars[trial.name]
            done = rounds_done(trial.run_dir)
            if done != shown:
                advance(done - shown)
                self._bars[trial.name] = (stack, advance, done)

    def _note(self, trial: Trial, *status: Any) -> None:
        """Write a state down. Ray Tune would take a failure for the loss of the trial: the next step raises it."""
        try:
            self._state.note(trial, *status)
        except Exception as error:  # noqa: BLE001
            self.error = self.error or error
            with contextlib.suppress(OSError):
                self._stop.touch()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report a trial that started."""
        found = self._trial(trial)
        if trial.trial_id not in self._started:
            self._started[trial.trial_id] = time.monotonic()
            done = rounds_done(found.run_dir)
            text = f": {found.text}" * bool(found.values) + f" (continuing after round {done})" * bool(done)
            self._progress.message(f"started: {found.name}{text}")
        self._note(found, "running")

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report a trial whose process was lost."""
        self._progress.message(
            f"lost: {self._trial(trial).name}; its process was killed, perhaps for lack of memory; it continues"
        )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note a trial that is over."""
        found, result = self._trial(trial), trial.last_result
        if FAILED in result:
            self._fail(found, result[FAILED])
            return
        stopped = result[STATUS] != "finished"
        reason = self._study.settings.scheduler.name if stopped else result.get(WORTHLESS, "")
        status = "stopped" if stopped else "finished"
        self._note(found, status, reason)
        self._over += 1
        took = format_duration(time.monotonic() - self._started.get(trial.trial_id, time.monotonic()))
        searched = bool(self._study.settings.domains)
        score = f", {found.metric.title} {found.metric.scale * result[SCORE]:.2f}" if searched else ""
        why = f" after round {result[ROUND]} ({reason})" if stopped else f"; worthless: {reason}" * bool(reason)
        self._progress.message(f"{status}: {found.name}, {took} ({self._over} of {self._left}){score}{why}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Note a trial whose process was lost too often."""
        self._fail(self._trial(trial), "its process was lost again and again, perhaps for lack of memory")

    def _fail(self, trial: Trial, reason: str) -> None:
        self._note(trial, "failed", reason)
        self._over += 1
        self._progress.message(f"failed: {trial.name}: {(reason.splitlines() or [''])[0][:SHORT]}")

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Remove the progress bars."""
        self._show([])
