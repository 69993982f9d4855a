"""Gaussian noise: attackers send noise, over an honest change or instead of one.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
NeurIPS 2017, section 5 ("Gaussian": values of a normal distribution in place of a gradient; here ``keep: false``). The paper's
standard deviation of 200 is absolute; here it is relative to the honest change, so that a value means the same for all models.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(UpdateAttack):
    """Attackers send Gaussian noise, over an honest change or instead of one."""

    std: Annotated[
        float,
        Field(ge=0, description="standard deviation of the noise, in units of the honest change's root mean square"),
    ] = 10.0
    keep: Annotated[bool, Field(description="true: honest change plus noise; false: noise alone")] = True

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """See :class:`UpdateAttack`."""
        if self.std == 0 and self.keep:
            return change
        size = float(np.sqrt(np.mean(np.square(change)))) if len(change) else 0.0
        noise = rng.standard_normal(len(change)) * (self.std * size)
        return change + noise if self.keep else noise
