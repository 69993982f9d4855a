"""The coordinate-wise median.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML
2018, definition 1 and algorithm 1 (option I).
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.rules._robust import MiddleRule


@dataclass(frozen=True)
class Median(MiddleRule):
    """The median of each element over the clients; with an even number of them the mean of the two in the middle.

    All clients count the same, whatever their weights. As an element's value may come from any client, no client is judged as a
    whole: nothing is reported.
    """

    def cut(self, clients: np.ndarray) -> np.ndarray:
        """See :class:`MiddleRule`."""
        return np.asarray(np.maximum(clients - 1, 0) // 2)
