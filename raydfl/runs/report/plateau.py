"""The plateau of a curve: the rule of studies and of a run's verdict."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydfl.core.settings import Settings
from raydfl.runs.report.data import Curve


class PlateauSettings(Settings):
    """The rule for the plateau of training, applied to the control's score on held-out data."""

    evaluations: int = Field(5, ge=1, description="Number of consecutive evaluations without a rise of the best score.")
    rise: float = Field(
        1.0, ge=0, description="Smallest relevant rise of the best score, in the table's unit (points of per cent)."
    )


def find_plateau(curve: Curve, rule: PlateauSettings, sign: float = 1.0) -> int | None:
    """Find the first evaluation without a rise of the best score by ``rule.rise`` in the next ``rule.evaluations``.

    Args:
        curve: The score on held-out data, in the unit of ``rise``.
        rule: The rule.
        sign: 1 if larger scores are better, otherwise -1.

    Returns:
        Index of the evaluation; ``None`` if the score was still rising, or has too few evaluations.
    """
    scores = sign * curve.values
    best = np.maximum.accumulate(np.nan_to_num(scores, nan=-np.inf))
    for place in range(len(best) - rule.evaluations):
        if curve.rounds[place] > 0 and best[place + rule.evaluations] < best[place] + max(rule.rise, 1e-12):
            return place
    return None
