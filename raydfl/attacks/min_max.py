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

    def gamma(self, square: float, along: np.ndarray, own: np.ndarray, between: np.ndarray) -> float:
        """Solve |mean + gamma p - change_i|^2 = gamma^2 |p|^2 - 2 gamma along_i + own_i <= max between, for every client."""
        room = np.maximum(between.max() - own, 0.0)
        return float(((along + np.sqrt(np.square(along) + square * room)) / square).min())
