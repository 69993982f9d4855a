"""Selection of the best round by a metric, and detection of training without improvement.

Both depend only on scores of evaluated rounds, so a resumed run restores them from its metrics table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from raydfl.core.errors import ConfigError
from raydfl.core.metrics import HARMONIC_MEAN, HIGHER_IS_BETTER, OF_CLIENTS, base_name
from raydfl.data import DataSettings
from raydfl.engine.needs import has_clip_table
from raydfl.engine.phases import Phases, check_phases
from raydfl.engine.settings import EvaluateSettings, MetricChoice, RunSettings
from raydfl.training import TrainSettings

_VALIDATION = ("validation", "server_validation")
"""Splits for selection. All others are test data."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """Metric for the comparison of rounds."""

    metric: str
    """Metric with its split, such as ``"validation model/accuracy"``."""
    higher: bool
    """Whether higher is better."""

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Return whether a value improves on another. A value that is not finite never does.

        Args:
            value: New value.
            than: Best value so far; NaN if there is none.
            by: Smallest improvement that counts.
        """
        if not math.isfinite(value) or math.isnan(than):
            return math.isfinite(value)
        gain = value - than if self.higher else than - value
        return gain > 0 and gain >= by

    @property
    def split(self) -> str:
        """Data split of the metric."""
        return self.metric.partition(" ")[0]

    @property
    def chooser(self) -> str:
        """Kind of the split, for reports: "validation" or "the test"."""
        return "validation" if self.split in _VALIDATION else "the test"


@dataclass(frozen=True, slots=True)
class Leader:
    """Best round so far by a criterion."""

    criterion: Criterion
    round: int = 0
    """Number of the best round; 0: none yet."""
    value: float = math.nan
    waited: int = 0
    """Evaluations without improvement since the best round."""

    def update(self, round_index: int, scores: Mapping[str, float], by: float = 0.0, kept: bool = True) -> Leader:
        """Return the best round after another evaluation. Only a ``kept`` round can become the best."""
        value = scores.get(self.criterion.metric, math.nan)
        if kept and self.criterion.is_better(value, self.value, by):
            return Leader(self.criterion, round_index, value)
        return dataclasses.replace(self, waited=self.waited + 1)

    @property
    def text(self) -> str:
        """Description, such as ``round 7 (validation model/accuracy 0.8123, chosen by validation)``."""
        return f"round {self.round} ({self.criterion.metric} {self.value:.4f}, chosen by {self.criterion.chooser})"


@dataclass(frozen=True, slots=True)
class Selection:
    """Progress of a run by the criteria of ``run.best`` and ``run.stop``. Compares rounds of the same phase."""

    for_best: Mapping[str, Criterion] = field(default_factory=dict)
    """Criteria of ``run.best`` by phase; empty: the option is off."""
    for_stop: Mapping[str, Criterion] = field(default_factory=dict)
    """Criteria of ``run.stop`` by phase; empty: the option is off."""
    patience: int = 0
    min_delta: float = 0.0
    goal: float | None = None
    """Value of ``run.stop.goal``; ``None``: no goal."""
    phase: str = ""
    """Phase of the last evaluated round."""
    best: Leader | None = None
    """Best round of the phase; ``None`` without ``run.best``, or before the first evaluation."""
    progress: Leader | None = None
    """Last round of the phase with an improvement of at least ``min_delta``."""
    reached: float | None = None
    """Value that reached the goal in the phase; ``None``: none did."""

    @classmethod
    def from_settings(
        cls, run: RunSettings, phases: Phases, model: str, headline: str, validation: str, method: str
    ) -> Selection:
        """Create the selection of a run before its first evaluation.

        Args:
            run: Settings of the run.
            phases: Phases of the run.
            model: Default model of metrics: the name of the first model.
            headline: Default metric: the objective's headline.
            validation: Default split of metrics.
            method: Name of the method, for messages.

        Raises:
            ConfigError: The direction of a metric is unknown, or a phase does not exist.
        """

        def build_criteria(choice: MetricChoice | None, where: str) -> dict[str, Criterion]:
            if choice is None:
                return {}
            by_phase = choice.metric if isinstance(choice.metric, dict) else {}
            check_phases(by_phase, phases.names, f"{where}.metric", method)
            criteria = {}
            for phase in phases.names:
                metric = by_phase.get(phase, headline) if isinstance(choice.metric, dict) else choice.metric or headline
                if " " not in metric:
                    metric = f"{validation} {metric if '/' in metric else f'{model}/{metric}'}"
                criteria[phase] = Criterion(metric, _is_higher_better(metric, choice.mode, where))
            return criteria

        stop = run.stop if run.stop is not None and run.stop.by_metric else None
        return cls(
            build_criteria(run.best, "run.best"),
            build_criteria(stop, "run.stop"),
            0 if stop is None else stop.patience,
            0.0 if stop is None else stop.min_delta,
            None if stop is None else stop.goal,
        )

    @property
    def wanted(self) -> dict[str, list[tuple[str, Criterion]]]:
        """Settings and criteria of each phase; empty: rounds are not compared."""
        wanted: dict[str, list[tuple[str, Criterion]]] = {}
        for setting, criteria in (("run.best", self.for_best), ("run.stop", self.for_stop)):
            for phase, criterion in criteria.items():
                wanted.setdefault(phase, []).append((setting, criterion))
        return wanted

    def update(self, round_index: int, phase: str, scores: Mapping[str, float], kept: bool = True) -> Selection:
        """Return the selection after another evaluated round.

        Args:
            round_index: Completed rounds.
            phase: Phase of the round.
            scores: Scores of the evaluation, by split and metric.
            kept: Whether the models of the round are still available.
        """
        same = phase == self.phase
        best, progress, reached = (self.best, self.progress, self.reached) if same else (None, None, None)
        if self.for_best:
            best = (best or Leader(self.for_best[phase])).update(round_index, scores, kept=kept)
        if self.for_stop:
            progress = (progress or Leader(self.for_stop[phase])).update(round_index, scores, self.min_delta)
            value = scores.get(progress.criterion.metric, math.nan)
            if self.goal is not None and (value == self.goal or progress.criterion.is_better(value, self.goal)):
                reached = value
        return dataclasses.replace(self, phase=phase, best=best, progress=progress, reached=reached)

    def check(self, phase: str, names: Collection[str]) -> None:
        """Reject a criterion whose metric is not measured.

        Args:
            phase: Phase of the method.
            names: Measured metrics of the phase, with their splits.

        Raises:
            ConfigError: A metric is not measured. The message lists the measured ones.
        """
        for setting, criterion in self.wanted.get(phase, ()):
            if criterion.metric not in names:
                during = f" in phase {phase!r}" if len(self.wanted) > 1 else ""
                scores = sorted(name for name in names if _find_base_name(name) in HIGHER_IS_BETTER) or sorted(names)
                raise ConfigError(
                    f"{setting}.metric: {criterion.metric!r} is not measured{during}. Choose one of: "
                    f"{', '.join(scores) or 'none is measured'}"
                )

    @property
    def reason(self) -> str:
        """Reason to stop the training or its phase; empty: continue."""
        if self.progress is not None and self.reached is not None:
            return f"{self.progress.criterion.metric} {self.reached:.4g} reaches the goal {self.goal:g}"
        if self.progress is None or self.progress.waited < self.patience:
            return ""
        metric, since = self.progress.criterion.metric, self.progress.round
        return f"no better {metric} since round {since}" if since else f"{metric} was never a finite number"


def holds_out(data: DataSettings, split: str) -> bool:
    """Return whether the settings may assign clips to a split. A table of clips may do so for every split."""
    own = data.split
    held_out = {
        "validation": bool(own.validation),
        "client_test": own.tested_by_clients,
        "server_validation": own.server_validation is not None or own.official_validation == "validation",
    }
    return held_out.get(split, True) or has_clip_table(data)


def is_evaluated(split: str, evaluate: EvaluateSettings) -> bool:
    """Return whether the settings evaluate models on a split."""
    if split in ("validation", "client_test"):
        return evaluate.clients != "none"
    return evaluate.server or (split == "test" and evaluate.clients != "none")


def check_measured(
    setting: str, criterion: Criterion, evaluate: EvaluateSettings, parts: Iterable[DataSettings]
) -> None:
    """Reject a criterion on a split that is not held out or not evaluated. The first round checks the metric itself.

    Args:
        setting: Setting of the criterion, for the message.
        criterion: The criterion.
        evaluate: Settings of the evaluation.
        parts: Settings of each part of the data.

    Raises:
        ConfigError: The split is not measured. The message names the setting to change.
    """
    if not any(holds_out(data, criterion.split) for data in parts):
        reason = {
            "validation": "clients have no validation clips (data.split.validation is 0)",
            "client_test": "clients have no test clips",
            "server_validation": "the server has no validation clips",
        }[criterion.split]
        raise ConfigError(
            f"{setting}: {criterion.metric!r} is not measured, because {reason}. Set data.split.{criterion.split}, or choose a "
            f"metric of another split in {setting}.metric"
        )
    if not is_evaluated(criterion.split, evaluate):
        of_clients = criterion.split in ("validation", "client_test")
        reason = (
            "evaluate.clients is none. Set it to cohort or all"
            if of_clients
            else "evaluate.server is false. Set it to true"
        )
        raise ConfigError(f"{setting}: {criterion.metric!r} is not measured, because {reason}")


def check_begins(phases: Phases, train: TrainSettings, best: MetricChoice | None, every: int) -> None:
    """Reject phases with ``begin: best`` if no best round can exist.

    Args:
        phases: Phases of the run.
        train: Training settings.
        best: Setting ``run.best``.
        every: Setting ``evaluate.every``.

    Raises:
        ConfigError: A phase cannot begin with a best round. The message names it.
    """
    for name, own in train.phases.items():
        if own.begin == "last":
            continue
        number, where = phases.number(name) - 1, f"train.phases.{name}.begin: best"
        if number == 0:
            raise ConfigError(
                f"{where}: {name!r} is the first phase, so there is no earlier round. Remove this setting"
            )
        if best is None:
            raise ConfigError(f"{where} needs a metric to choose the best round. Set run.best.metric")
        first, last = phases.first[number - 1], phases.first[number]
        if last < train.rounds and first // every == last // every:
            raise ConfigError(
                f"{where}: no round of phase {phases.names[number - 1]!r} ({first + 1} to {last}) is evaluated. Lower "
                f"evaluate.every (now {every})"
            )


def _find_base_name(metric: str) -> str:
    """Return the base name of a metric with its split, such as ``accuracy``."""
    return base_name(metric.partition(" ")[2])


def _is_higher_better(metric: str, mode: str | None, where: str) -> bool:
    """Return the direction of a metric.

    Raises:
        ConfigError: The direction is unknown.
    """
    if mode is not None:
        return mode == "max"
    base = _find_base_name(metric)
    for ending in (HARMONIC_MEAN, *(ending for ending in OF_CLIENTS if not ending.endswith("_std"))):
        base = base.removesuffix(ending)
    if base in HIGHER_IS_BETTER:
        return HIGHER_IS_BETTER[base]
    if base.endswith(("loss", "error")):
        return False
    raise ConfigError(f"{where}.mode: the direction of {metric!r} is unknown. Set it to max (higher is better) or min")
