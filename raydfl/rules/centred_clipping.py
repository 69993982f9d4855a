"""Centred clipping: mean of the clients' differences to the server's model, each clipped to a radius.

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


def clip_factors(lengths: np.ndarray, limit: float | np.ndarray) -> np.ndarray:
    """Compute clipping factors ``min(1, limit / lengths)``: float64, 1 for lengths of 0."""
    factors = np.ones(len(lengths))
    np.divide(limit, lengths, out=factors, where=lengths > limit)
    return factors


@dataclass(frozen=True)
class CentredClipping(RobustRule):
    """The server's tensors plus the uniform mean of the clients' differences, clipped to a radius.

    The paper clips momenta of gradients around the last aggregate. Here clients send models, and the server's current model
    is the last aggregate. All clients count the same, as in the paper. A client's tensors form one vector. If the server
    lacks a tensor, its values count as 0. The report contains the clients clipped in the last iteration
    (``centred_clipping/clipped``) and its radius (``centred_clipping/radius``). The influence of a client is the factor that
    clipped its difference.
    """

    relative: ClassVar[bool] = True

    radius: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=True,
            description="Euclidean norm to which differences to the server's model are clipped. null: their median in each "
            "iteration (deviation: the paper sets a constant). .inf: no clipping, the uniform mean.",
        ),
    ] = None
    iterations: Annotated[
        int,
        Field(
            ge=1,
            description="Number of iterations, each around the previous result. Each reads all updates about three times.",
        ),
    ] = 1

    def decide(self, voters: Group) -> np.ndarray:
        """Clip and average the differences repeatedly."""
        vector = voters.server
        for _ in range(self.iterations):
            lengths = np.sqrt(voters.squared_distances(vector))
            radius = float(np.median(lengths)) if self.radius is None else self.radius
            voters.influence = clip_factors(lengths, radius)
            vector = voters.average(voters.influence, uniform=True, towards=vector)
            voters.report["centred_clipping/clipped"] = Ratio(float((lengths > radius).sum()), len(lengths))
            voters.report["centred_clipping/radius"] = Ratio(radius, 1)
        return vector
