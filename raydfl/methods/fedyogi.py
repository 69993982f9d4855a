"""FedYogi: Yogi at the server. Unlike in FedAdam, the step size of the second moment depends only on the squared change.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2:

    delta = mean_k (w_k) - w        (the mean of the clients' models under the aggregation rule, minus the server's)
    m <- beta1 m + (1 - beta1) delta
    v <- v - (1 - beta2) delta^2 sign(v - delta^2)
    w <- w + server_lr m / (sqrt(v) + tau),        m_0 = 0, v_0 = tau^2, no bias correction

v grows below delta^2 and shrinks above it, by the same amount. It stays positive, because it shrinks by less than (1 - beta2) v.
Buffers are averaged without the optimiser. A round without updates changes nothing, including momentum.

    raydfl run jobs/tiny.yaml run.name=fedyogi train.rounds=1 method=fedyogi
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import PAPER
from raydfl.methods._adaptive import AdaptiveOptimiser


@dataclass(frozen=True, kw_only=True)
class FedYogi(AdaptiveOptimiser):
    """FedAvg with Yogi at the server."""

    beta2: Annotated[
        float,
        Field(ge=0, lt=1, description="1 minus the step of the second moment, as a fraction of the squared change."),
        PAPER,
    ] = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Move the second moment towards the squared change, by a fraction of this square."""
        return v - (1 - self.beta2) * squared * (v - squared).sign()
