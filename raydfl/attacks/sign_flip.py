"""Sign flip: attackers train honestly and send the opposite change.

L. Li, W. Xu, T. Chen, G. B. Giannakis, Q. Ling, RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
Heterogeneous Datasets, AAAI 2019, section 5. There the model itself is multiplied by a negative number; here the change to the
received model, which does harm in every round and not only while weights are large.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack


@dataclass(frozen=True, kw_only=True)
class SignFlip(UpdateAttack):
    """Attackers send the opposite of an honest change."""

    scale: Annotated[
        float, Field(ge=0, description="factor on the opposite change; 0: what was received is sent back")
    ] = 1.0

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """See :class:`UpdateAttack`."""
        return -self.scale * change
