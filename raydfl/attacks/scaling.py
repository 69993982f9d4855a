"""Scaling, up to model replacement: attackers train honestly and send their change many times over.

E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov, How To Backdoor Federated Learning, AISTATS 2020, equation 3: with the
boost n / eta the mean becomes the attacker's model once the others' changes cancel out. ``boost: null`` is that for the mean
weighted by examples and any number of attackers: the examples of all clients of the round over those of its attackers. (For a
uniform mean give the number: clients of a round over attackers.)
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack


@dataclass(frozen=True, kw_only=True)
class Scaling(UpdateAttack):
    """Attackers send an honest change many times over."""

    boost: Annotated[
        float | None,
        Field(
            ge=0,
            description="factor on the change; 1: none; null: what replaces the model, examples of the round's clients over those "
            "of its attackers",
        ),
    ] = 10.0

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """See :class:`UpdateAttack`."""
        return boosted(change, self.boost, cohort)


def boosted(change: np.ndarray, boost: float | None, cohort: Cohort) -> np.ndarray:
    """Multiply the change (float64 [elements]) by ``boost``; ``None``: by what makes up for the others' weight in the mean."""
    factor = 1 / cohort.share if boost is None else boost
    return change if factor == 1 else factor * change
