"""FedAdam: the server takes Adam steps along the clients' mean change.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2 (:mod:`raydfl.methods._adaptive` has all of it):

    v <- beta2 v + (1 - beta2) delta^2

Buffers are averaged and see no optimiser. With beta1 = 0 and tau -> infinity at server_lr = tau it is FedAvg. PyTorch's Adam,
which differs in the bias correction and the defaults, is ``fedopt``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.methods._adaptive import AdaptiveOptimiser


@dataclass(frozen=True, kw_only=True)
class FedAdam(AdaptiveOptimiser):
    """FedAvg with Adam at the server."""

    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the second moment")] = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the mean of the squares, decaying."""
        return self.beta2 * v + (1 - self.beta2) * squared
