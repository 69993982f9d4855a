"""Free riders: attackers return the received model without training, optionally with noise.

Y. Fraboni, R. Vidal, M. Lorenzi, Free-rider Attacks on Model Aggregation in Federated Learning, AISTATS 2021: plain free riders,
and free riders disguised by noise. Deviation: the standard deviation of the noise is constant (the paper's may decay).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack, return_received
from raydfl.core.types import Update
from raydfl.methods import Method
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class FreeRider(UpdateAttack):
    """Return of the received model without training, optionally with noise."""

    std: Annotated[
        float, Field(ge=0, description="Standard deviation of Gaussian noise added to every value. 0: no noise.")
    ] = 0.0

    def local(self, method: Method, step: Step) -> Update:
        """Return the shared tensors as received, with differences of 0. Private state does not change."""
        return return_received(method, step)

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """Add noise."""
        return change if self.std == 0 else change + rng.standard_normal(len(change)) * self.std
