"""The search as Ray Tune sees it: what :class:`~raydfl.experiments.search.controller.Judge` decides, behind Tune's interfaces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ray import tune
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from raydfl.cluster import Bundle, granted, placement_groups, waiting_text
from raydfl.core.errors import ResourcesError
from raydfl.experiments.search.controller import SearchController
from raydfl.experiments.search.plan import Trial
from raydfl.experiments.trial import REASON, ROUND, SCORE, STATUS, TrialOrder

_QUIET = 10.0
"""Seconds without a running trial after which it is said what is waited for."""


class Observer(Protocol):
    """Is told what happens to trials, in the driver."""

    def begun(self, trial: Trial) -> None:
        """A trial was handed out: anew, or to go on."""

    def scored(self, number: int) -> None:
        """A trial has a new score."""

    def over(self, number: int) -> None:
        """A trial is over, or has failed."""


class JudgeScheduler(FIFOScheduler):
    """Trials begin in their order; after each evaluation the judge decides."""

    def __init__(self, judge: SearchController, observers: list[Observer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._judge = judge
        self._observers = observers

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Ray Tune writes its parts down; nothing of this one is needed again, because the journal has everything."""
        return object, ()

    def __deepcopy__(self, memo: Any) -> JudgeScheduler:
        return self

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """A trial that goes on."""
        number = _number(trial)
        known = self._judge.journal.trials[number].reported
        decision = self._judge.result(number, result[ROUND], result[SCORE])
        if self._judge.journal.trials[number].reported > known:
            for observer in self._observers:
                observer.scored(number)
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """A trial that was stopped, or says itself that it is over."""
        number, status = _number(trial), result[STATUS]
        if status == "interrupted":
            return
        if status == "running":
            self._judge.ended(number, "stopped", self._judge.rule_of(number))
        elif status == "finished":
            self._judge.ended(number, "finished", result[REASON], round_index=result[ROUND], score=result[SCORE])
        else:
            self._judge.ended(number, "failed", result[REASON])
        for observer in self._observers:
            observer.over(number)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """The trial's process was lost; Ray Tune starts it again as often as it may."""
        if trial.should_recover():
            return
        number = _number(trial)
        self._judge.ended(number, "failed", "its process was lost again and again, for lack of memory perhaps")
        for observer in self._observers:
            observer.over(number)


def _number(trial: Any) -> int:
    order: TrialOrder = trial.config["order"]
    return order.number


class JudgeSearcher(Searcher):
    """Hands out the judge's trials."""

    def __init__(
        self, judge: SearchController, order: Callable[[Trial], TrialOrder], stop: Path, observers: list[Observer]
    ) -> None:
        super().__init__(metric=SCORE, mode=judge.search.settings.metric.best)
        self._judge = judge
        self._order = order
        self._stop = stop
        self._observers = observers

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Ray Tune writes its parts down; nothing of this one is needed again, because the journal has everything."""
        return object, ()

    def __deepcopy__(self, memo: Any) -> JudgeSearcher:
        return self

    def suggest(self, trial_id: str) -> Any:
        """The next trial's order, unless the search shall stop."""
        trial = None if self._stop.exists() else self._judge.suggest()
        if trial is None:
            return Searcher.FINISHED
        for observer in self._observers:
            observer.begun(trial)
        return {"order": self._order(trial)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The judge knows already."""

    def save(self, checkpoint_path: str) -> None:
        """The journal has everything."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """The journal has everything."""


class Watchdog(tune.Callback):
    """Says what is waited for when no trial can begin, and gives up when that takes too long."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        seconds: float,
        say: Callable[[str], None],
        give_up: Callable[[ResourcesError], None],
    ) -> None:
        """Begin to watch.

        Args:
            bundles: of a trial.
            seconds: after which it gives up.
            say: told once what is waited for.
            give_up: told that nothing came.
        """
        self._bundles = bundles
        self._seconds = seconds
        self._before = placement_groups()
        self._say = say
        self._give_up = give_up
        self._since = time.monotonic()
        self._told = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Ray Tune writes its parts down; nothing of this one is needed again, because the journal has everything."""
        return object, ()

    def __deepcopy__(self, memo: Any) -> Watchdog:
        return self

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Ray Tune's loop, many times a second."""
        waited = time.monotonic() - self._since
        if not trials or any(trial.status == "RUNNING" for trial in trials):
            self._since = time.monotonic()
        elif waited < min(_QUIET, self._seconds):
            return
        elif granted(self._bundles, self._before):  # a process is starting, which a busy machine takes its time for
            self._since = time.monotonic()
        else:
            if not self._told:
                self._told = True
                self._say(f"waiting for resources: {waiting_text(self._bundles)}")
            if waited > self._seconds:
                self._give_up(
                    ResourcesError(
                        f"no trial could begin within {self._seconds:g} s (ray.ready_timeout): {waiting_text(self._bundles)}; wait "
                        f"until others have ended, lower ray.actors, ray.cpus, ray.gpus or cpus, or raise ray.ready_timeout if "
                        f"nodes are still starting; the same command goes on"
                    )
                )
