"""Min-Sum: attackers stay within the largest sum of squared distances of an honest change.

V. Shejwalkar, A. Houmansadr, Manipulating the Byzantine, NDSS 2021, equation 9: the sum of squared distances to all honest
changes is at most the largest sum for an honest change.
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.attacks._distance import DistanceAttack


@dataclass(frozen=True, kw_only=True)
class MinSum(DistanceAttack):
    """Honest mean, moved up to the largest sum of squared distances of an honest change."""

    def gamma(self, square: float, projections: np.ndarray, to_mean: np.ndarray, between: np.ndarray) -> float:
        """Solve sum_i |mean + gamma p - change_i|^2 = clients gamma^2 |p|^2 + sum to_mean <= max sum between."""
        # The mixed terms cancel, because the changes are centred.
        room = max(0.0, float(between.sum(axis=1).max() - to_mean.sum()))
        return float(np.sqrt(room / (len(to_mean) * square)))
