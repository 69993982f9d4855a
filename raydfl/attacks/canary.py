"""Canaries: clients that send a random direction instead of a trained change, to audit differential privacy.

G. Andrew, P. Kairouz, S. Oh, A. Oprea, H. B. McMahan, V. Suriyakumar, One-shot Empirical Privacy Estimation for Federated
Learning, ICLR 2024, algorithm 2. ``raydfl audit`` compares the canaries' directions with the movement of the final model.

Deviation: the paper adds canaries to the clients. These canaries replace drawn clients, so that cohorts and accounting stay as
configured.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack, return_received
from raydfl.core.types import Update
from raydfl.methods import Method
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class Canary(UpdateAttack):
    """Random direction of a fixed length, the same in every round, without training."""

    repeats: ClassVar[bool] = True

    length: Annotated[
        float,
        Field(gt=0, description="Euclidean norm of the change. The audit is strongest with clip of the rule gaussian."),
    ] = 1.0

    def local(self, method: Method, step: Step) -> Update:
        """Return the shared tensors as received. The change is replaced later."""
        return return_received(method, step)

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """Return the client's direction with the canary's length."""
        return self.length * draw_direction(len(change), rng)


def draw_direction(size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a uniformly distributed vector of norm 1: float64 [size]."""
    direction = rng.standard_normal(size)
    return direction / np.linalg.norm(direction)
