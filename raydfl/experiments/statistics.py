"""Statistics of a study: scores over repeats, paired differences with intervals, and conclusions."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import stats

Key = TypeVar("Key", bound=Hashable)

CONFIDENCE = 0.95
"""Confidence level of the intervals of means and differences."""


def format_number(value: float | None, signed: bool = False) -> str:
    """Format a number for tables, with ``-`` for None and NaN."""
    return "-" if value is None or np.isnan(value) else f"{value:{'+' if signed else ''}.2f}"


@dataclass(frozen=True)
class Spread:
    """A score of several runs, in the table's unit."""

    by_repeat: Mapping[str, float]
    """Scores by the value of the repeated setting, ``run.seed=1``."""

    @property
    def values(self) -> list[float]:
        """The values in the order of the repeats."""
        return list(self.by_repeat.values())

    @property
    def mean(self) -> float:
        """The mean; NaN without values."""
        return float(np.mean(self.values)) if self.by_repeat else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation (divided by n - 1); NaN for fewer than two values."""
        return float(np.std(self.values, ddof=1)) if len(self.by_repeat) > 1 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Student's t confidence interval of the mean; NaN for fewer than two values."""
        n = len(self.by_repeat)
        half = float(stats.sem(self.values) * stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) if n > 1 else math.nan
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        return (
            format_number(self.mean)
            if len(self.by_repeat) < 2 or math.isnan(self.mean)
            else f"{format_number(self.mean)} ± {format_number(self.std)}"
        )


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its confidence interval."""

    mean: float
    low: float
    """Lower end of the interval; NaN for fewer than two pairs."""
    high: float
    """Upper end of the interval; NaN for fewer than two pairs."""
    n: int
    """Number of pairs."""
    error: float = math.nan
    """Standard error of the mean."""

    @classmethod
    def between(cls, treatment: Spread, control: Spread) -> Difference | None:
        """Compute the mean of ``treatment - control`` over common repeats, with Student's t confidence interval.

        Returns:
            The difference. ``None`` without common repeats, or if a score is not finite.
        """
        scores, baseline = treatment.by_repeat, control.by_repeat
        differences = [scores[repeat] - baseline[repeat] for repeat in scores if repeat in baseline]
        if not differences or not np.isfinite(differences).all():
            return None
        mean, n = float(np.mean(differences)), len(differences)
        error = float(stats.sem(differences)) if n > 1 else math.nan
        half = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) if n > 1 else math.nan
        return cls(mean, mean - half, mean + half, n, error)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of Student's t test that the mean is 0; NaN for fewer than two pairs."""
        if self.n < 2:
            return math.nan
        if self.error == 0.0:
            return float(self.mean == 0.0)
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.n - 1))

    def correct(self, comparisons: int) -> tuple[float, float]:
        """Return the interval after Bonferroni's correction for the number of comparisons. At least two pairs."""
        level = 1 - (1 - CONFIDENCE) / max(1, comparisons)
        half = self.error * float(stats.t.ppf((1 + level) / 2, self.n - 1))
        return self.mean - half, self.mean + half

    @property
    def spread(self) -> float:
        """Sample standard deviation of the paired differences; NaN for fewer than two pairs."""
        return self.error * math.sqrt(self.n)

    @property
    def excludes_zero(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def is_below(self, smallest: float, comparisons: int) -> bool:
        """Return whether the interval after Bonferroni's correction is within ``smallest`` of 0. At least two pairs."""
        return max(map(abs, self.correct(comparisons))) < smallest

    def __str__(self) -> str:
        interval = (
            "" if math.isnan(self.low) else f" [{format_number(self.low, True)}, {format_number(self.high, True)}]"
        )
        return f"{format_number(self.mean, True)}{interval}"


def find_significant(p_values: Mapping[Key, float], comparisons: int) -> set[Key]:
    """Find the significant differences after Holm's correction (S. Holm, A Simple Sequentially Rejective Procedure, 1979).

    It keeps the probability of a wrong claim in a study at 5 %, as Bonferroni's correction does, and finds more.

    Args:
        p_values: P-values by comparison. NaN for unknown.
        comparisons: Planned number of comparisons. Without a p-value a comparison is not significant.
    """
    found: set[Key] = set()
    for key in sorted(p_values, key=lambda key: (math.isnan(p_values[key]), p_values[key])):
        if not p_values[key] <= (1 - CONFIDENCE) / max(1, comparisons - len(found)):
            break
        found.add(key)
    return found


def describe_difference(
    difference: Difference, significant: bool, comparisons: int, smallest: float | None, sign: float = 1.0
) -> str:
    """Draw the conclusion from a paired difference.

    Args:
        difference: The difference from the control.
        significant: Whether the difference is significant after the correction for all comparisons of the study.
        comparisons: Number of comparisons in the study, to compare the interval with the difference of interest.
        smallest: Smallest difference of interest. The conclusion says if the difference is below it.
        sign: 1 if larger scores are better, otherwise -1.
    """
    if difference.n < 2:
        return "one pair, so no interval"
    below = f" (difference below {smallest:g})" * (smallest is not None and difference.is_below(smallest, comparisons))
    if significant or difference.excludes_zero:
        return "perhaps " * (not significant) + ("better" if sign * difference.mean > 0 else "worse") + below
    return "no difference seen" + below


def get_kind(conclusion: str) -> str:
    """Return a conclusion without its remarks: ``better`` for ``better (not tuned)``."""
    return re.split(r" \(|,", conclusion)[0]
