"""A Little Is Enough: attackers move every parameter as far as hides among the differences between honest clients.

M. Baruch, G. Baruch, Y. Goldberg, A Little Is Enough: Circumventing Defenses For Distributed Learning, NeurIPS 2019, algorithm 3:
with n clients of which m attack, s = floor(n / 2 + 1) - m honest clients suffice for a majority, and

    z = the largest with Phi(z) < (n - m - s) / (n - m);     sent = mean - z standard deviation, parameter by parameter.

Deviations: mean and standard deviation are taken over the clients that ``knowledge`` says (the paper: ``own``). Where attackers
have the majority, s is taken as 1; z is never below 0.
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
    """A Little Is Enough: every parameter is moved as far as hides among honest clients."""

    z: Annotated[
        float | None,
        Field(ge=0, description="distance from the honest mean in standard deviations; null: the paper's formula"),
    ] = None

    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        """See :class:`ColludingAttack`."""
        z = largest_z(cohort.clients, cohort.attackers) if self.z is None else self.z
        return known.mean - z * known.deviation


def largest_z(clients: int, attackers: int) -> float:
    """Return the paper's z for this many clients in a round, attackers included; at least 0."""
    honest = clients - attackers
    supporters = max(1, math.floor(clients / 2 + 1) - attackers)
    if honest - supporters <= honest / 2:
        return 0.0
    return NormalDist().inv_cdf((honest - supporters) / honest)
