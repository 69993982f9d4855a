"""Coordinate-wise median: for an even number of clients the mean of the two middle values.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML
2018, definition 1 and algorithm 1 (option I).
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.rules._robust import MiddleRule


@dataclass(frozen=True)
class Median(MiddleRule):
    """Median of each element over the clients, or the mean of the two middle values.

    All clients of positive weight count the same. The rule reports no metrics, because each element may come from another
    client.
    """

    def count_trimmed(self, clients: np.ndarray) -> np.ndarray:
        """Trim all values except one or two in the middle."""
        return np.asarray(np.maximum(clients - 1, 0) // 2)
