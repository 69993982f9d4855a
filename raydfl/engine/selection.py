"""Selection: the best round so far by a metric of the record, and whether training has stopped to get better.

All of it follows from the scores of the evaluated rounds, so a run that is resumed reads them back from its record.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from raydfl.core.errors import ConfigError
from raydfl.core.metrics import HARMONIC_MEAN, HIGHER_IS_BETTER, OF_CLIENTS, base_name
from raydfl.data import DataSettings
from raydfl.engine.needs import may_be_assigned_by_table
from raydfl.engine.phases import Phases, check_phases
from raydfl.engine.settings import EvaluateSettings, MetricChoice, RunSettings
from raydfl.training import TrainSettings

_VALIDATION = ("validation", "server_validation")
"""Splits that are there to choose by. All others are tests."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """A metric by which rounds are compared."""

    metric: str
    """With its split, ``"validation model/accuracy"``."""
    higher: bool
    """True where the larger value is the better one."""

    def better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Return whether a value is better than another one by so much; one that is not finite never is.

        Args:
            than: NaN: there is none yet.
        """
        if not math.isfinite(value) or math.isnan(than):
            return math.isfinite(value)
        gain = value - than if self.higher else than - value
        return gain > 0 and gain >= by

    @property
    def split(self) -> str:
        """The data that it is measured on."""
        return self.metric.partition(" ")[0]

    @property
    def chooser(self) -> str:
        """The kind of data that chooses, in words: the validation, or the test."""
        return "validation" if self.split in _VALIDATION else "the test"


@dataclass(frozen=True, slots=True)
class Leader:
    """The best round so far by a criterion."""

    criterion: Criterion
    round: int = 0
    """0: there is none yet."""
    value: float = math.nan
    waited: int = 0
    """Evaluations since then that were not better."""

    def update(self, round_index: int, scores: Mapping[str, float], by: float = 0.0, kept: bool = True) -> Leader:
        """Return the leader after one more evaluated round; a round that is not ``kept`` cannot become it."""
        value = scores.get(self.criterion.metric, math.nan)
        if kept and self.criterion.better(value, self.value, by):
            return Leader(self.criterion, round_index, value)
        return dataclasses.replace(self, waited=self.waited + 1)

    @property
    def text(self) -> str:
        """``round 7 (validation model/accuracy 0.8123, chosen by validation)``."""
        return f"round {self.round} ({self.criterion.metric} {self.value:.4f}, chosen by {self.criterion.chooser})"


@dataclass(frozen=True, slots=True)
class Selection:
    """The evaluated rounds of a run so far, as ``run.best`` and ``run.stop`` see them. Rounds of one phase are compared."""

    for_best: Mapping[str, Criterion] = field(default_factory=dict)
    """By phase; empty: nothing is to be kept."""
    for_stop: Mapping[str, Criterion] = field(default_factory=dict)
    """By phase; empty: training does not stop early."""
    patience: int = 0
    min_delta: float = 0.0
    phase: str = ""
    """The phase of the newest evaluated round."""
    best: Leader | None = None
    """The best round of that phase; ``None``: none is asked for, or none is evaluated yet."""
    progress: Leader | None = None
    """The last round of that phase that was better by ``min_delta`` than all before it."""

    @classmethod
    def from_settings(
        cls, run: RunSettings, phases: Phases, model: str, headline: str, validation: str, method: str
    ) -> Selection:
        """Return the selection of a run of which no round is evaluated yet.

        Args:
            run: its settings.
            phases: of the run.
            model: name of the first model, for metrics that name none.
            headline: of the objective, where no metric is given.
            validation: split of metrics that name none.
            method: its name, for the messages.

        Raises:
            ConfigError: a metric of which it is not known whether larger is better, or a phase that there is not.
        """

        def criteria(choice: MetricChoice | None, where: str) -> dict[str, Criterion]:
            if choice is None:
                return {}
            given = choice.metric if isinstance(choice.metric, dict) else {}
            check_phases(given, phases.names, f"{where}.metric", method)
            found = {}
            for phase in phases.names:
                metric = given.get(phase, headline) if isinstance(choice.metric, dict) else choice.metric or headline
                if " " not in metric:
                    metric = f"{validation} {metric if '/' in metric else f'{model}/{metric}'}"
                found[phase] = Criterion(metric, _higher(metric, choice.mode, where))
            return found

        stop = run.stop
        return cls(
            criteria(run.best, "run.best"),
            criteria(stop, "run.stop"),
            0 if stop is None else stop.patience,
            0.0 if stop is None else stop.min_delta,
        )

    @property
    def wanted(self) -> dict[str, list[tuple[str, Criterion]]]:
        """The criteria of each phase, with the settings that ask for them; empty: rounds are not compared."""
        found: dict[str, list[tuple[str, Criterion]]] = {}
        for setting, criteria in (("run.best", self.for_best), ("run.stop", self.for_stop)):
            for phase, criterion in criteria.items():
                found.setdefault(phase, []).append((setting, criterion))
        return found

    def update(self, round_index: int, phase: str, scores: Mapping[str, float], kept: bool = True) -> Selection:
        """Return the selection after one more evaluated round.

        Args:
            round_index: rounds completed.
            phase: of the round.
            scores: of the evaluation, by split and metric.
            kept: whether the models of the round can still be had.
        """
        best, progress = (self.best, self.progress) if phase == self.phase else (None, None)
        if self.for_best:
            best = (best or Leader(self.for_best[phase])).update(round_index, scores, kept=kept)
        if self.for_stop:
            progress = (progress or Leader(self.for_stop[phase])).update(round_index, scores, self.min_delta)
        return dataclasses.replace(self, phase=phase, best=best, progress=progress)

    def check(self, phase: str, names: Collection[str]) -> None:
        """Refuse a metric that is not measured.

        Args:
            phase: of the method.
            names: of what is measured in it, by split and metric.

        Raises:
            ConfigError: naming it, and what is measured.
        """
        for setting, criterion in self.wanted.get(phase, ()):
            if criterion.metric not in names:
                during = f" in phase {phase!r}" if len(self.wanted) > 1 else ""
                scores = sorted(name for name in names if _base(name) in HIGHER_IS_BETTER) or sorted(names)
                raise ConfigError(
                    f"{setting}.metric: {criterion.metric!r} is not measured{during}; what is: {', '.join(scores) or 'nothing'}"
                )

    @property
    def reason(self) -> str:
        """The reason for training, or its phase, to stop; empty: it goes on."""
        if self.progress is None or self.progress.waited < self.patience:
            return ""
        metric, since = self.progress.criterion.metric, self.progress.round
        return f"no better {metric} since round {since}" if since else f"{metric} was never a finite number"


def holds_out(data: DataSettings, split: str) -> bool:
    """Return whether the settings can hold clips out for a split. A user's table of clips can for every split."""
    own = data.split
    held_out = {
        "validation": bool(own.validation),
        "client_test": own.tested_by_clients,
        "server_validation": own.server_validation is not None or own.official_validation == "validation",
    }
    return held_out.get(split, True) or may_be_assigned_by_table(data)


def check_measured(
    setting: str, criterion: Criterion, evaluate: EvaluateSettings, parts: Iterable[DataSettings]
) -> None:
    """Refuse a metric on data that nobody holds out, or that are not measured. Which metrics there are a round must show.

    Args:
        setting: that asks for it.
        criterion: the metric.
        evaluate: what is measured.
        parts: settings of each part of the data.

    Raises:
        ConfigError: naming the setting to change.
    """
    of_clients = criterion.split in ("validation", "client_test")
    if not any(holds_out(data, criterion.split) for data in parts):
        reason = {
            "validation": "clients hold nothing out: data.split.validation is 0",
            "client_test": "clients have no test data",
            "server_validation": "the server holds nothing out",
        }[criterion.split]
        raise ConfigError(
            f"{setting}: {criterion.metric!r} is not measured, because {reason}; set data.split.{criterion.split}, or name a "
            f"metric of other data in {setting}.metric"
        )
    if of_clients and evaluate.clients == "none":
        raise ConfigError(
            f"{setting}: {criterion.metric!r} is not measured, because evaluate.clients is none; set it to cohort or all"
        )
    if not of_clients and not evaluate.server and (criterion.split != "test" or evaluate.clients == "none"):
        raise ConfigError(
            f"{setting}: {criterion.metric!r} is not measured, because evaluate.server is false; set it to true"
        )


def check_begins(phases: Phases, train: TrainSettings, best: MetricChoice | None, every: int) -> None:
    """Refuse phases that would begin with a best round that there is not.

    Args:
        phases: of the run.
        train: its settings.
        best: ``run.best``.
        every: ``evaluate.every``.

    Raises:
        ConfigError: naming the phase.
    """
    for name, own in train.phases.items():
        if own.begin == "last":
            continue
        number, where = phases.number(name) - 1, f"train.phases.{name}.begin: best"
        if number == 0:
            raise ConfigError(f"{where}: {name!r} is the first phase, there is no round before it; leave it out")
        if best is None:
            raise ConfigError(f"{where} needs a metric by which a round is the best; set run.best.metric")
        first, last = phases.first[number - 1], phases.first[number]
        if last < train.rounds and first // every == last // every:
            raise ConfigError(
                f"{where}: no round of phase {phases.names[number - 1]!r}, {first + 1} to {last}, is evaluated; lower "
                f"evaluate.every, which is {every}"
            )


def _base(metric: str) -> str:
    """Return the score that a metric with its split is of."""
    return base_name(metric.partition(" ")[2])


def _higher(metric: str, mode: str | None, where: str) -> bool:
    """Return whether the larger of two values is the better one.

    Raises:
        ConfigError: that is not known.
    """
    if mode is not None:
        return mode == "max"
    base = _base(metric)
    for ending in (HARMONIC_MEAN, *(ending for ending in OF_CLIENTS if not ending.endswith("_std"))):
        base = base.removesuffix(ending)
    if base in HIGHER_IS_BETTER:
        return HIGHER_IS_BETTER[base]
    if base.endswith(("loss", "error")):
        return False
    raise ConfigError(f"{where}.mode: whether a larger {metric!r} is better is not known; set it to max or min")
