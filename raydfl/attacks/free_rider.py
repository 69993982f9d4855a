"""Free riders: attackers do not train and send back what they received, possibly with noise over it.

Y. Fraboni, R. Vidal, M. Lorenzi, Free-rider Attacks on Model Aggregation in Federated Learning, AISTATS 2021: plain free riders,
and disguised ones with noise. Here the noise has one standard deviation for all rounds (the paper's may decay).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack
from raydfl.core.types import Update
from raydfl.methods import Method
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class FreeRider(UpdateAttack):
    """Attackers do not train: they send back what they received."""

    std: Annotated[
        float, Field(ge=0, description="standard deviation of Gaussian noise on every value that is sent; 0: none")
    ] = 0.0

    def local(self, method: Method, step: Step) -> Update:
        """Send all that may leave a client as it was received; differences are 0. Private state stays as it was."""
        # Of the client's networks the server may have asked for some only, as in a later phase.
        tensors = next((each for each in step.received.values() if each), None) or step.floating_state()
        sent = {
            name: torch.zeros_like(value) if name.startswith(method.changes) else value
            for name, value in tensors.items()
            if method.shared(name)
        }
        return step.update(tensors=sent)

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """See :class:`UpdateAttack`."""
        return change if self.std == 0 else change + rng.standard_normal(len(change)) * self.std
