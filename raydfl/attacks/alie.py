"""A Little Is Enough: attackers shift every parameter by an amount that honest variance hides.

M. Baruch, G. Baruch, Y. Goldberg, A Little Is Enough: Circumventing Defenses For Distributed Learning, NeurIPS 2019, algorithm 3:
with n clients and m attackers, s = floor(n / 2 + 1) - m honest supporters give the attackers a majority, and

    z = largest value with Phi(z) < (n - m - s) / (n - m)
    sent = mean - z * standard deviation of each parameter

Deviations: the option ``knowledge`` selects the clients of the mean and the standard deviation (the paper: ``own``). If
attackers have the majority, s is 1. z is at least 0.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, ColludingAttack
from raydfl.attacks._statistics import HonestUpdates


@dataclass(frozen=True, kw_only=True)
class ALIE(ColludingAttack):
    """A Little Is Enough: shift every parameter of the honest mean by z standard deviations."""

    z: Annotated[
        float | None,
        Field(
            ge=0,
            description="Distance from the honest mean in standard deviations. 0: the mean. null: the paper's formula.",
        ),
    ] = None

    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        """Return the honest mean, shifted by a multiple of the standard deviation."""
        z = largest_z(cohort.clients, cohort.attackers) if self.z is None else self.z
        return known.mean - z * known.deviation


def largest_z(clients: int, attackers: int) -> float:
    """Compute the paper's z, at least 0, for a cohort of ``clients``, attackers included."""
    honest = clients - attackers
    supporters = max(1, math.floor(clients / 2 + 1) - attackers)
    if honest - supporters <= honest / 2:
        return 0.0  # the quantile of one half or less is not positive
    return NormalDist().inv_cdf((honest - supporters) / honest)
