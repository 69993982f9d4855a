"""FedAdam: the server takes Adam steps along the clients' mean change.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2:

    delta = mean_k (w_k) - w        (the mean of the clients' models under the aggregation rule, minus the server's)
    m <- beta1 m + (1 - beta1) delta
    v <- beta2 v + (1 - beta2) delta^2
    w <- w + server_lr m / (sqrt(v) + tau),        m_0 = 0, v_0 = tau^2, no bias correction

Buffers are averaged and see no optimiser. With beta1 = 0 and tau -> infinity at server_lr = tau it is FedAvg. PyTorch's Adam,
which differs in the bias correction and the defaults, is ``fedopt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.methods._server_optimiser import ServerOptimiser


@dataclass(frozen=True, kw_only=True)
class FedAdam(ServerOptimiser):
    """FedAvg with Adam at the server."""

    server_lr: Annotated[
        float, Field(gt=0, description="server learning rate; the paper tries 0.001 to 0.1 and more")
    ] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the first moment; 0: no momentum")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the second moment")] = 0.99
    tau: Annotated[float, Field(gt=0, description="adaptivity: the larger, the more like plain averaging")] = 1e-3

    def moments(self) -> Mapping[str, float]:
        """Both moments."""
        return {"m": 0.0, "v": self.tau**2}

    def move(
        self, old: Tensor, mean: Tensor, moments: Mapping[str, Tensor], number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Algorithm 2's FedAdam step."""
        delta = mean - old
        m = self.beta1 * moments["m"] + (1 - self.beta1) * delta
        v = self.beta2 * moments["v"] + (1 - self.beta2) * delta.square()
        return old + self.server_lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}
