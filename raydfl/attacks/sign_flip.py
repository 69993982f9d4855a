"""Sign flip: attackers train honestly and send the negative change.

L. Li, W. Xu, T. Chen, G. B. Giannakis, Q. Ling, RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
Heterogeneous Datasets, AAAI 2019, section 5. Deviation: the paper multiplies the model by a negative number. This attack
multiplies the change, which does harm in every round, even with small weights.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack


@dataclass(frozen=True, kw_only=True)
class SignFlip(UpdateAttack):
    """Negative of an honest change."""

    scale: Annotated[
        float, Field(ge=0, description="Factor that multiplies the negative change. 0: return the received model.")
    ] = 1.0

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """Negate the change."""
        return -self.scale * change
