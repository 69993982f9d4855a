"""Coordinate-wise trimmed mean.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML
2018, definition 2 and algorithm 1 (option II).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.rules._robust import MiddleRule


@dataclass(frozen=True)
class TrimmedMean(MiddleRule):
    """Mean of each element over the clients, without the smallest and the largest values.

    With n clients, floor(trim n) values are removed at either end, which is none for few clients. All clients of positive
    weight count the same. The rule reports no metrics, because each element may exclude other clients.
    """

    trim: Annotated[
        float,
        Field(ge=0, lt=0.5, description="Fraction of values removed at either end. 0: the uniform mean."),
    ] = 0.1

    def count_trimmed(self, clients: np.ndarray) -> np.ndarray:
        """Trim the fraction ``trim``."""
        return np.floor(self.trim * clients + 1e-9).astype(np.int64)
