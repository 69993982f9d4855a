"""Centred clipping: clients move the server's model, none of them further than a radius.

S. P. Karimireddy, L. He, M. Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021, section 4 (equation CC):

    v <- v + 1/n sum of (w_k - v) min(1, radius / ||w_k - v||),    repeated, from v = w, the server's model
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.types import Ratio
from raydfl.rules._group import Group
from raydfl.rules._robust import RobustRule


def shortening(lengths: np.ndarray, limit: float) -> np.ndarray:
    """Return ``min(1, limit / lengths)``: float64, 1 where a length is 0."""
    factors = np.ones(len(lengths))
    np.divide(limit, lengths, out=factors, where=lengths > limit)
    return factors


@dataclass(frozen=True)
class CentredClipping(RobustRule):
    """The server's tensors plus the uniform mean of the clients' differences to them, none longer than a radius.

    The paper clips momenta of gradients and starts from the last aggregate; here models are sent, and the server's present one
    is that. Clients count the same, as in the paper. Over all tensors of a key that the same clients sent, taken as one vector;
    where the server has no such tensor the differences are to 0. The report has the clients clipped in the last iteration
    (``centred_clipping/clipped``) and its radius; a client's influence is the share of its difference that was left.
    """

    relative: ClassVar[bool] = True

    radius: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=True,
            description="longest difference to the server's model that counts in full; null: the median of the clients' "
            "in each iteration (a deviation from the paper, which sets it by hand); .inf: the uniform mean",
        ),
    ] = None
    iterations: Annotated[
        int,
        Field(
            ge=1, description="repetitions, each around the last one's result; each reads all updates about three times"
        ),
    ] = 1

    def decide(self, voters: Group) -> np.ndarray:
        """See :class:`RobustRule`."""
        vector = voters.server
        for _ in range(self.iterations):
            lengths = np.sqrt(voters.squared_distances(vector))
            radius = float(np.median(lengths)) if self.radius is None else self.radius
            voters.influence = shortening(lengths, radius)
            vector = voters.average(voters.influence, uniform=True, towards=vector)
            voters.report["centred_clipping/clipped"] = Ratio(float((lengths > radius).sum()), len(lengths))
            voters.report["centred_clipping/radius"] = Ratio(radius, 1)
        return vector
