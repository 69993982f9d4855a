"""Inner product manipulation: attackers send the opposite of the honest mean, small enough not to stand out.

C. Xie, O. Koyejo, I. Gupta, Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation, UAI 2019: sent =
- epsilon x the mean of the honest changes. A rule that lets it through then moves the model against the honest clients, or hardly
at all.
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
    """Inner product manipulation: the opposite of the honest mean."""

    epsilon: Annotated[float, Field(ge=0, description="factor on the opposite of the honest mean change")] = 0.5

    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        """See :class:`ColludingAttack`."""
        return -self.epsilon * known.mean
