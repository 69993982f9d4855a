"""The decisions of a search: which settings come next and which trials stop, by Ray Tune's own rules.

Ray Tune does not keep a scheduler's state, so a search that it restores forgets what it had compared. Here every event is in the
journal before anything is done because of it, and a search that goes on tells its scheduler and searcher all of them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raydfl.core.errors import InputError
from raydfl.experiments.execute import Decision
from raydfl.experiments.search.journal import Journal, plain_score
from raydfl.experiments.search.pbt import members_of
from raydfl.experiments.search.plan import Search, Trial, Values
from raydfl.experiments.search.settings import AshaScheduler, MedianScheduler, PopulationScheduler
from raydfl.experiments.search.space import Domain

_WORST = 1e9
"""Stands for a score that is no number: worse than any other, and finite, so that medians can be taken."""
_SCORE, _ROUND = "score", "round"
_STOP = "STOP"


@dataclass(frozen=True)
class _Named:
    """A trial, as far as Ray Tune's schedulers need one."""

    trial_id: str


class _NobodyWaits:
    """The controller as the median rule sees it: it shall never pause a trial in favour of a waiting one."""

    def get_live_trials(self) -> list[Any]:
        return []


class _Optuna:
    """Optuna's tree-structured Parzen estimator, by way of Ray Tune, with a study in memory."""

    def __init__(self, space: Mapping[str, Domain], mode: str, seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise InputError(
                "searcher: optuna needs the package optuna; install it with pip install 'raydfl[optuna]', or take searcher: random"
            ) from error
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        distributions = {key: domain.distribution() for key, domain in space.items()}
        self._search = OptunaSearch(distributions, metric=_SCORE, mode=mode, seed=seed)

    def suggest(self, number: int) -> Values:
        found = self._search.suggest(str(number)) or {}
        return {key: domain.from_optuna(found[key]) for key, domain in self._space.items()}

    def learn(self, number: int, round_index: int, score: float, over: bool) -> None:
        tell = self._search.on_trial_complete if over else self._search.on_trial_result
        tell(str(number), {_SCORE: score, "training_iteration": round_index})


class SearchController:
    """Decisions of a search, each written down before anything is done because of it."""

    def __init__(self, search: Search, journal: Journal) -> None:
        """Bring scheduler and searcher to where they were.

        Raises:
            InputError: a package that the searcher needs is missing.
        """
        self.search = search
        self.journal = journal
        self._scheduler = _make_scheduler(search)
        settings = search.settings
        self._optuna = (
            _Optuna(settings.space, settings.metric.best, settings.seed) if settings.searcher == "optuna" else None
        )
        for event in journal.events:
            self._tell(event)
        for record in journal.trials.values():
            last = next((e for e in reversed(journal.events) if e["trial"] == record.number), None)
            if last is not None and last["event"] == "round" and last["decision"] == _STOP:
                self.ended(record.number, "stopped", str(last.get("rule", "")))
        self._waiting: list[Trial] = []

    def _tell(self, event: Mapping[str, Any]) -> None:
        """Pass an event of the journal to scheduler and searcher."""
        number = event["trial"]
        if event["event"] == "trial":
            self._begin(number)
            self._suggested(number)
        elif event["event"] == "round":
            self._score(number, event["round"], event["score"])
            if event["decision"] != _STOP:
                self._learn(number, event["round"], event["score"])
        elif event["status"] != "failed":
            self._complete(number, event["round"], event["score"])

    # -- what comes next ---------------------------------------------------------------------------------------------

    def open_turn(self, turn: int) -> bool:
        """Make the trials of a turn ready, those that are not over first; without pbt there is one turn, 0.

        Returns:
            ``False``: the turn before is not finished, as it must be.
        """
        trials, members = self.journal.trials, self.search.samples
        scheduler = self.search.settings.scheduler
        if not isinstance(scheduler, PopulationScheduler):
            self._waiting = [self.search.trial(r.number, r.values) for r in trials.values() if not r.over]
            return True
        before = [trials[number] for number in range((turn - 1) * members, turn * members) if turn and number in trials]
        if turn and (len(before) < members or not all(record.status == "finished" for record in before)):
            return False
        self._waiting = [
            trial
            for trial in members_of(self.search, scheduler, turn, before)
            if trial.number not in trials or not trials[trial.number].over
        ]
        return True

    @property
    def left(self) -> int:
        """Number of trials of this turn that are still to be done or to be finished."""
        return len(self._waiting) + (0 if self._in_turns else max(0, self.search.samples - len(self.journal.trials)))

    @property
    def _in_turns(self) -> bool:
        return isinstance(self.search.settings.scheduler, PopulationScheduler)

    def suggest(self) -> Trial | None:
        """Return the next trial: those that are not over come first; ``None``: there is none.

        Raises:
            ConfigError: the values that the searcher suggests do not make a valid configuration.
        """
        if self._waiting:
            trial = self._waiting.pop(0)
        elif not self._in_turns and len(self.journal.trials) < self.search.samples:
            number = len(self.journal.trials)
            trial = self.search.trial(number, self._suggested(number))
        else:
            return None
        if trial.number not in self.journal.trials:
            self._begin(trial.number)
            self.journal.add("trial", trial.number, values=trial.values, parent=trial.parent)
        return trial

    # -- what came of it ---------------------------------------------------------------------------------------------

    def result(self, number: int, round_index: int, score: float) -> Decision:
        """Return what becomes of a trial after an evaluation; what is known already changes nothing."""
        record = self.journal.trials[number]
        if round_index <= record.reported:
            return "CONTINUE"
        decision, rule = self._score(number, round_index, score), ""
        if decision == _STOP:
            rule = self.search.settings.scheduler.name
        elif self._without_progress([*record.scores, score]):
            decision, rule = "STOP", "patience"
        self.journal.add(
            "round",
            number,
            round=round_index,
            score=plain_score(score),
            decision=decision,
            **({"rule": rule} if rule else {}),
        )
        if decision != _STOP:
            self._learn(number, round_index, score)
        return decision

    def ended(
        self, number: int, status: Literal["finished", "stopped", "failed"], reason: str = "",
        round_index: int | None = None, score: float = math.nan,
    ) -> None:  # fmt: skip
        """Take note of a trial that is over.

        Args:
            round_index: the last round, when it was not reported before; with its ``score``.
        """
        record = self.journal.trials[number]
        if record.over:
            return
        if round_index is None:
            round_index, score = record.reported, record.score
        if status != "failed":
            self._complete(number, round_index, score)
        self.journal.add("end", number, status=status, reason=reason, round=round_index, score=plain_score(score))

    def rule_of(self, number: int) -> str:
        """Return the name of the rule that stopped a trial."""
        last = next(e for e in reversed(self.journal.events) if e["trial"] == number and e["event"] == "round")
        return str(last.get("rule", ""))

    def _without_progress(self, scores: list[float]) -> bool:
        patience = self.search.settings.patience
        if patience is None:
            return False
        sign = self.search.settings.metric.sign
        values = [sign * self._comparable(score) for score in scores]
        return len(values) - 1 - values.index(max(values)) >= patience

    # -- Ray Tune's part ---------------------------------------------------------------------------------------------

    def _suggested(self, number: int) -> Values:
        return self.search.drawn(number) if self._optuna is None else self._optuna.suggest(number)

    def _learn(self, number: int, round_index: int, score: float | None, over: bool = False) -> None:
        if self._optuna is not None:
            self._optuna.learn(number, round_index, self._comparable(score), over)

    def _comparable(self, score: float | None) -> float:
        known = score is not None and math.isfinite(score)
        return score if known else -self.search.settings.metric.sign * _WORST  # type: ignore[return-value]

    def _begin(self, number: int) -> None:
        if self._scheduler is not None:
            self._scheduler.on_trial_add(_NobodyWaits(), _Named(str(number)))

    def _score(self, number: int, round_index: int, score: float | None) -> Decision:
        if self._scheduler is None:
            return "CONTINUE"
        result = {_ROUND: round_index, _SCORE: self._comparable(score)}
        decision = self._scheduler.on_trial_result(_NobodyWaits(), _Named(str(number)), result)
        return "STOP" if decision == _STOP else "CONTINUE"

    def _complete(self, number: int, round_index: int, score: float | None) -> None:
        if self._scheduler is not None:
            result = {_ROUND: round_index, _SCORE: self._comparable(score)}
            self._scheduler.on_trial_complete(_NobodyWaits(), _Named(str(number)), result)
        self._learn(number, round_index, score, over=True)


def _make_scheduler(search: Search) -> Any:
    """Return Ray Tune's scheduler; ``None``: nothing is stopped early."""
    from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule

    settings = search.settings.scheduler
    common: dict[str, Any] = {"time_attr": _ROUND, "metric": _SCORE, "mode": search.settings.metric.best}
    if isinstance(settings, AshaScheduler):
        grace = min(settings.grace, search.rounds)
        return AsyncHyperBandScheduler(
            **common, max_t=search.rounds, grace_period=grace, reduction_factor=settings.factor
        )
    if isinstance(settings, MedianScheduler):
        return MedianStoppingRule(**common, grace_period=settings.grace, min_samples_required=settings.trials)
    return None
