"""FedYogi: FedAdam whose second moment moves by the size of the squared change, not by a share of the distance to it.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2 (:mod:`raydfl.methods._adaptive` has all of it):

    v <- v - (1 - beta2) delta^2 sign(v - delta^2)

So v grows where it is below delta^2 and shrinks where it is above, by the same amount, and it stays positive: it shrinks by less
than (1 - beta2) v. Buffers are averaged and see no optimiser.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.methods._adaptive import AdaptiveOptimiser


@dataclass(frozen=True, kw_only=True)
class FedYogi(AdaptiveOptimiser):
    """FedAvg with Yogi at the server."""

    beta2: Annotated[
        float, Field(ge=0, lt=1, description="1 minus the share of the squared change that the second moment moves by")
    ] = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Towards the square, by a share of the square."""
        return v - (1 - self.beta2) * squared * (v - squared).sign()
