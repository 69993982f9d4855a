"""Base class of Min-Max and Min-Sum: the honest mean, moved along a direction up to a bound on distances.

V. Shejwalkar, A. Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated Learning,
NDSS 2021, section IV:

    sent = mean + gamma p,      p = - mean / |mean|, - sign(mean) or - standard deviation

with the largest gamma within the bound. The paper finds gamma by bisection. Both bounds are quadratic in gamma, so this
implementation solves for it.
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
    """Base class of attacks that move the honest mean along a direction up to a bound on distances."""

    direction: Annotated[
        Literal["std", "sign", "unit"],
        Field(
            description="Direction of the move, with its sign reversed. std: the standard deviation of each parameter. sign: the "
            "sign of the mean change. unit: the mean change, scaled to length 1."
        ),
    ] = "std"

    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        """Move the honest mean along the direction."""
        direction = self._compute_direction(known)
        square = float(direction @ direction)
        if square == 0:
            return known.mean
        gram, projections = known.products(direction)
        # ||a - b||^2 = ||a||^2 + ||b||^2 - 2 <a, b>, which rounding may make negative.
        to_mean = np.diag(gram)
        between = np.maximum(to_mean[:, None] + to_mean - 2 * gram, 0.0)
        return known.mean + self.gamma(square, projections, to_mean, between) * direction

    def _compute_direction(self, known: HonestUpdates) -> np.ndarray:
        if self.direction == "std":
            return -known.deviation
        if self.direction == "sign":
            sign: np.ndarray = np.sign(known.mean)
            return -sign
        length = float(np.sqrt(known.mean @ known.mean))
        return -known.mean / length if length > 0 else known.mean

    @abstractmethod
    def gamma(self, square: float, projections: np.ndarray, to_mean: np.ndarray, between: np.ndarray) -> float:
        """Compute the largest gamma within the bound, at least 0.

        Args:
            square: squared norm of the direction, above 0.
            projections: float64 [clients], inner products of (change - mean) and the direction.
            to_mean: float64 [clients], squared distance of each change from the mean.
            between: float64 [clients, clients], squared distances between the changes.
        """
