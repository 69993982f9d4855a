"""The common part of Min-Max and Min-Sum: the honest mean moved along a direction as far as a bound on distances allows.

V. Shejwalkar, A. Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated Learning,
NDSS 2021, section IV:

    sent = mean + gamma p,      p = - mean / |mean|, - sign(mean) or - standard deviation

with the largest gamma that the bound allows. The paper searches gamma by halving steps; both bounds are quadratic in gamma, so it
is computed here.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, ColludingAttack
from raydfl.attacks._statistics import HonestUpdates


@dataclass(frozen=True, kw_only=True)
class DistanceAttack(ColludingAttack):
    """The honest mean, moved as far along a direction as a bound on distances allows."""

    direction: Annotated[
        Literal["std", "sign", "unit"],
        Field(
            description="against what the mean is moved: std: the standard deviation of each parameter; sign: the sign of the mean "
            "change; unit: the mean change itself"
        ),
    ] = "std"

    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        """See :class:`ColludingAttack`."""
        direction = self._direction(known)
        square = float(direction @ direction)
        if square == 0:
            return known.mean
        gram, along = known.products(direction)
        own = np.diag(gram)
        between = np.maximum(own[:, None] + own - 2 * gram, 0.0)
        return known.mean + self.gamma(square, along, own, between) * direction

    def _direction(self, known: HonestUpdates) -> np.ndarray:
        if self.direction == "std":
            return -known.deviation
        if self.direction == "sign":
            sign: np.ndarray = np.sign(known.mean)
            return -sign
        length = float(np.sqrt(known.mean @ known.mean))
        return -known.mean / length if length > 0 else known.mean

    @abstractmethod
    def gamma(self, square: float, along: np.ndarray, own: np.ndarray, between: np.ndarray) -> float:
        """Return the largest gamma, at least 0, that the bound allows.

        Args:
            square: the direction's squared length, above 0.
            along: float64 [clients]: (change - mean) times the direction.
            own: float64 [clients]: squared distance of each change from the mean.
            between: float64 [clients, clients]: squared distances between the changes.
        """
