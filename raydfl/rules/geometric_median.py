"""Geometric median (RFA).

K. Pillutla, S. M. Kakade, Z. Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing
2022, algorithm 2, the smoothed Weiszfeld algorithm:

    v minimises  sum of a_k ||v - w_k||,         a_k: the client's weight
    repeat       b_k = a_k / max(nu, ||v - w_k||),    v <- sum of b_k w_k / sum of b_k
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.rules._group import Group
from raydfl.rules._robust import RobustRule
from raydfl.rules.centred_clipping import clip_factors


@dataclass(frozen=True)
class GeometricMedian(RobustRule):
    """Point with the smallest weighted sum of distances to the clients.

    Clients count by their weights, as in the paper. A client's tensors form one vector. The influence of a client is its
    factor in the last step, divided by the largest factor, so the nearest client has 1.

    The paper does not specify the starting point. This rule starts at the clients' mean, with differences to the server's
    tensors clipped to their median norm. A single attacker can move the plain mean arbitrarily far. The server's tensors
    would favour free riders, because the steps hardly leave a client that is very near (measured: with a fifth of free
    riders, training never started). nu is the option ``smoothing``.
    """

    iterations: Annotated[
        int, Field(ge=1, description="Number of Weiszfeld steps. Each reads all updates about three times.")
    ] = 4
    smoothing: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="nu: lower bound of the distances. A bound above all distances gives the weighted mean.",
        ),
    ] = 1e-6

    def decide(self, voters: Group) -> np.ndarray:
        """Run the smoothed Weiszfeld algorithm."""
        lengths = np.sqrt(voters.squared_distances(voters.server))
        factors = clip_factors(lengths, float(np.median(lengths)))
        vector = voters.average(factors, uniform=False, towards=voters.server)
        for _ in range(self.iterations):
            distances = np.maximum(self.smoothing, np.sqrt(voters.squared_distances(vector)))
            voters.influence = distances.min() / distances
            vector = voters.average(voters.influence, uniform=False)
        return vector
