"""FedAdagrad: the server's steps shrink where the clients' mean changes have been large so far.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2 (:mod:`raydfl.methods._adaptive` has all of it):

    v <- v + delta^2

The paper runs it without momentum (beta1 = 0), which is the default here. Buffers are averaged and see no optimiser.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.methods._adaptive import AdaptiveOptimiser


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(AdaptiveOptimiser):
    """FedAvg with Adagrad at the server."""

    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the first moment; 0: no momentum")] = 0.0

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the sum of the squares."""
        return v + squared
