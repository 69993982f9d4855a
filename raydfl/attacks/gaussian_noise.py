"""Gaussian noise: attackers add noise to an honest change, or replace the change by noise.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
NeurIPS 2017, section 5 ("Gaussian": normal values in place of a gradient; here ``keep: false``). Deviation: the standard
deviation is relative to the honest change, so a value has the same effect on all models. The paper's is absolute (200).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(UpdateAttack):
    """Gaussian noise, added to the honest change or in its place."""

    std: Annotated[
        float,
        Field(
            ge=0,
            description="Standard deviation of the noise, relative to the root mean square of the honest change. 0: no noise.",
        ),
    ] = 10.0
    keep: Annotated[bool, Field(description="true: add the noise to the honest change. false: send only noise.")] = True

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """Add the noise to the change, or return only the noise."""
        if self.std == 0 and self.keep:
            return change  # the same array keeps the update unchanged to the bit
        size = float(np.sqrt(np.mean(np.square(change)))) if len(change) else 0.0
        noise = rng.standard_normal(len(change)) * (self.std * size)
        return change + noise if self.keep else noise
