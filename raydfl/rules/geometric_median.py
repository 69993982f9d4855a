"""The geometric median (RFA).

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
from raydfl.rules.centred_clipping import shortening


@dataclass(frozen=True)
class GeometricMedian(RobustRule):
    """The point of least summed distance to the clients, by the smoothed Weiszfeld algorithm.

    Clients count by their weights, as in the paper, which leaves the start open. A start at the mean can be moved away as far as
    anybody likes, and one at the server's tensors is where free riders are: the steps hardly leave a client that they are very near
    to. So it starts at the mean of the clients, with differences to the server's tensors (0 where it has none) that are longer than
    the median one shortened to it. Over all tensors of a key that the same clients sent, taken as one vector. A client's influence
    is its factor in the last step in relation to the largest: the nearest clients have 1.
    """

    iterations: Annotated[
        int, Field(ge=1, description="steps of the algorithm; each reads all updates about three times")
    ] = 4
    smoothing: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="nu: distances below it count as this; larger than all of them: the weighted mean",
        ),
    ] = 1e-6

    def decide(self, voters: Group) -> np.ndarray:
        """See :class:`RobustRule`."""
        lengths = np.sqrt(voters.squared_distances(voters.server))
        factors = shortening(lengths, float(np.median(lengths)))
        vector = voters.average(factors, uniform=False, towards=voters.server)
        for _ in range(self.iterations):
            near = np.maximum(self.smoothing, np.sqrt(voters.squared_distances(vector)))
            voters.influence = near.min() / near
            vector = voters.average(voters.influence, uniform=False)
        return vector
