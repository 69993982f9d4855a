"""The coordinate-wise trimmed mean.

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
    """The mean of each element without its largest and its smallest values.

    Of n clients floor(trim n) values are left out at either end: with few clients none, which is the plain mean. All clients
    count the same, whatever their weights. No client is judged as a whole: nothing is reported.
    """

    trim: Annotated[
        float,
        Field(ge=0, lt=0.5, description="share of the values left out at either end, 0..0.5; 0: the uniform mean"),
    ] = 0.1

    def cut(self, clients: np.ndarray) -> np.ndarray:
        """See :class:`MiddleRule`."""
        return np.floor(self.trim * clients + 1e-9).astype(np.int64)
