"""FedAdam: Adam at the server, on the clients' mean change.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2:

    delta = mean_k (w_k) - w        (the mean of the clients' models under the aggregation rule, minus the server's)
    m <- beta1 m + (1 - beta1) delta
    v <- beta2 v + (1 - beta2) delta^2
    w <- w + server_lr m / (sqrt(v) + tau),        m_0 = 0, v_0 = tau^2, no bias correction

With beta1 = 0 and server_lr = tau -> infinity it is FedAvg. Buffers are averaged without the optimiser. A round without updates
changes nothing, including momentum. ``fedopt`` is PyTorch's Adam, with bias correction and different defaults.

    raydfl run jobs/tiny.yaml run.name=fedadam train.rounds=1 method=fedadam method.server_lr=0.003
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import PAPER
from raydfl.methods._adaptive import AdaptiveOptimiser


@dataclass(frozen=True, kw_only=True)
class FedAdam(AdaptiveOptimiser):
    """FedAvg with Adam at the server."""

    beta2: Annotated[float, Field(ge=0, lt=1, description="Decay of the second moment."), PAPER] = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Update the decaying mean of squared changes."""
        return self.beta2 * v + (1 - self.beta2) * squared
