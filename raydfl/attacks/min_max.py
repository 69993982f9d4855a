"""Min-Max: attackers stay within the largest distance between honest changes.

V. Shejwalkar, A. Houmansadr, Manipulating the Byzantine, NDSS 2021, equation 8: the largest distance to an honest change is at most
the largest distance between honest changes.
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.attacks._distance import DistanceAttack


@dataclass(frozen=True, kw_only=True)
class MinMax(DistanceAttack):
    """Honest mean, moved up to the largest distance between honest changes."""

    def gamma(self, square: float, projections: np.ndarray, to_mean: np.ndarray, between: np.ndarray) -> float:
        """Solve |mean + gamma p - change_i|^2 = gamma^2 |p|^2 - 2 gamma projections_i + to_mean_i <= max between."""
        # Each client gives a quadratic equation, whose positive root bounds gamma.
        room = np.maximum(between.max() - to_mean, 0.0)
        return float(((projections + np.sqrt(np.square(projections) + square * room)) / square).min())
