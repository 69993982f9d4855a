"""The plateau of a curve: the rule of studies and of a run's verdict."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydfl.core.settings import Settings
from raydfl.runs.report.data import Curve

_ROUNDING = 1e-9
"""Largest difference of scores by rounding."""


class PlateauSettings(Settings):
    """The rule for the plateau of training, applied to the mean score of a contestant's runs on held-out data."""

    evaluations: int = Field(5, ge=1, description="Least number of evaluations after the plateau begins.")
    rise: float = Field(
        1.0,
        ge=0,
        description="Smallest relevant improvement of the best score, in the table's unit (points of per cent).",
    )
    score: str | None = Field(
        None,
        description="Score of a study's plateau, such as accuracy in a study of attacks. null: the headline.",
    )


def find_plateau(curve: Curve, rule: PlateauSettings, sign: float = 1.0) -> int | None:
    """Find the first evaluation with later improvements of the best score below ``rule.rise``.

    A plateau has at least ``rule.evaluations`` later evaluations.

    Args:
        curve: The score on held-out data, in the unit of ``rise``.
        rule: The rule.
        sign: 1 if larger scores are better, otherwise -1.

    Returns:
        Index of the evaluation; ``None`` if the score still improves at the end, or with too few evaluations.
    """
    best = np.maximum.accumulate(np.nan_to_num(sign * curve.values, nan=-np.inf))
    # Means of equal scores in another order differ by rounding.
    flat = (curve.rounds > 0) & (best[-1:] < best + max(rule.rise - _ROUNDING, _ROUNDING))
    places = np.flatnonzero(flat[: max(0, len(best) - rule.evaluations)])
    return int(places[0]) if len(places) else None
