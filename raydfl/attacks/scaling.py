"""Scaling, up to model replacement: attackers multiply an honest change.

E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov, How To Backdoor Federated Learning, AISTATS 2020, equation 3: with a
boost of n / eta the mean becomes the attacker's model as soon as the honest changes cancel out. ``boost: null`` computes this
factor for a mean weighted by examples: the cohort's examples divided by the attackers' examples. For a uniform mean, set
the number of clients divided by the number of attackers.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack


@dataclass(frozen=True, kw_only=True)
class Scaling(UpdateAttack):
    """Honest change, multiplied by a factor."""

    boost: Annotated[
        float | None,
        Field(
            ge=0,
            description="Factor that multiplies the change. 1: unchanged. null: model replacement, the cohort's examples divided "
            "by the attackers' examples.",
        ),
    ] = 10.0

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """Boost the change."""
        return boost_change(change, self.boost, cohort)


def boost_change(change: np.ndarray, boost: float | None, cohort: Cohort) -> np.ndarray:
    """Multiply a change by a factor.

    Args:
        change: float64 [elements].
        boost: the factor. ``None`` compensates for the attackers' weight in the mean.
        cohort: size of the cohort.
    """
    factor = 1 / cohort.share if boost is None else boost
    return change if factor == 1 else factor * change  # the same array keeps the update unchanged to the bit
