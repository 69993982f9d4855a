"""Min-Sum: attackers stay as near to the honest clients, in sum, as the remotest honest client is.

V. Shejwalkar, A. Houmansadr, Manipulating the Byzantine, NDSS 2021, equation 9: the sum of the squared distances to all honest
changes is at most the largest such sum of an honest change.
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.attacks._distance import DistanceAttack


@dataclass(frozen=True, kw_only=True)
class MinSum(DistanceAttack):
    """Min-Sum: in sum no farther from the honest clients than the remotest of them is."""

    def gamma(self, square: float, along: np.ndarray, own: np.ndarray, between: np.ndarray) -> float:
        """sum_i |mean + gamma p - change_i|^2 = clients gamma^2 |p|^2 + sum own (the mixed terms cancel) <= max sum between."""
        room = max(0.0, float(between.sum(axis=1).max() - own.sum()))
        return float(np.sqrt(room / (len(own) * square)))
