"""FedAdagrad: Adagrad at the server, on the clients' mean change.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2:

    delta = mean_k (w_k) - w        (the mean of the clients' models under the aggregation rule, minus the server's)
    m <- beta1 m + (1 - beta1) delta
    v <- v + delta^2
    w <- w + server_lr m / (sqrt(v) + tau),        m_0 = 0, v_0 = tau^2, no bias correction

The default beta1 = 0 is the paper's: no momentum. Buffers are averaged without the optimiser. A round without updates changes
nothing.

    raydfl run jobs/tiny.yaml run.name=fedadagrad train.rounds=1 method=fedadagrad method.server_lr=0.1
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import PAPER
from raydfl.methods._adaptive import AdaptiveOptimiser


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(AdaptiveOptimiser):
    """FedAvg with Adagrad at the server."""

    beta1: Annotated[float, Field(ge=0, lt=1, description="Decay of the first moment. 0: no momentum."), PAPER] = 0.0

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Add the squared change."""
        return v + squared
