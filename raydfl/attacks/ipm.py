"""Inner product manipulation: attackers send a small negative multiple of the honest mean.

C. Xie, O. Koyejo, I. Gupta, Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation, UAI 2019:

    sent = - epsilon * mean of the honest changes

A rule that accepts this change moves the model against the honest clients, or hardly moves it.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, ColludingAttack
from raydfl.attacks._statistics import HonestUpdates


@dataclass(frozen=True, kw_only=True)
class IPM(ColludingAttack):
    """Inner product manipulation: a negative multiple of the honest mean."""

    epsilon: Annotated[
        float, Field(ge=0, description="Factor that multiplies the negative mean of the honest changes. 0: no change.")
    ] = 0.5

    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        """Return the negative multiple of the mean."""
        return -self.epsilon * known.mean
