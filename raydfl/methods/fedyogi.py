"""FedYogi: FedAdam whose second moment moves by the size of the squared change, not by a share of the distance to it.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2:

    delta = mean_k (w_k) - w        (the mean of the clients' models under the aggregation rule, minus the server's)
    m <- beta1 m + (1 - beta1) delta
    v <- v - (1 - beta2) delta^2 sign(v - delta^2)
    w <- w + server_lr m / (sqrt(v) + tau),        m_0 = 0, v_0 = tau^2, no bias correction

So v grows where it is below delta^2 and shrinks where it is above, by the same amount, and it stays positive: it shrinks by less
than (1 - beta2) v. Buffers are averaged and see no optimiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.methods._server_optimiser import ServerOptimiser


@dataclass(frozen=True, kw_only=True)
class FedYogi(ServerOptimiser):
    """FedAvg with Yogi at the server."""

    server_lr: Annotated[
        float, Field(gt=0, description="server learning rate; the paper tries 0.001 to 0.1 and more")
    ] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the first moment; 0: no momentum")] = 0.9
    beta2: Annotated[
        float, Field(ge=0, lt=1, description="1 minus the share of the squared change that the second moment moves by")
    ] = 0.99
    tau: Annotated[float, Field(gt=0, description="adaptivity: the larger, the more like plain averaging")] = 1e-3

    def moments(self) -> Mapping[str, float]:
        """Both moments."""
        return {"m": 0.0, "v": self.tau**2}

    def move(
        self, old: Tensor, mean: Tensor, moments: Mapping[str, Tensor], number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Algorithm 2's FedYogi step."""
        delta = mean - old
        squared = delta.square()
        m = self.beta1 * moments["m"] + (1 - self.beta1) * delta
        v = moments["v"] - (1 - self.beta2) * squared * (moments["v"] - squared).sign()
        return old + self.server_lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}
