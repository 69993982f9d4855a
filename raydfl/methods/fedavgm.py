"""FedAvgM: momentum at the server.

T.-M. H. Hsu, H. Qi, M. Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019:

    delta    = mean_k (w_k) - w     (the mean of the clients' models under the aggregation rule, minus the server's)
    velocity <- momentum velocity + delta
    w        <- w + server_lr velocity,        velocity_0 = 0

With momentum = 0 and server_lr = 1 it is FedAvg. Buffers are averaged and see no optimiser. (Some audio benchmarks call server
momentum on delta divided by the clients' learning rate "FedOPT": that is server_lr divided by that rate.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.methods._server_optimiser import ServerOptimiser


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimiser):
    """FedAvg with momentum at the server."""

    server_lr: Annotated[
        float, Field(gt=0, description="server learning rate; 1 takes the clients' mean where there is no momentum")
    ] = 1.0
    momentum: Annotated[
        float, Field(ge=0, lt=1, description="share of the last step that is kept; 0 (at server_lr 1) is FedAvg")
    ] = 0.9

    def moments(self) -> Mapping[str, float]:
        """Return the velocity."""
        return {"velocity": 0.0}

    def move(
        self, old: Tensor, mean: Tensor, moments: Mapping[str, Tensor], number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Take a step of heavy-ball momentum."""
        delta, before = mean - old, self.momentum * moments["velocity"]
        # old + server_lr (before + delta), in the form that at neutral values is the mean itself, without rounding.
        return mean + (self.server_lr - 1) * delta + self.server_lr * before, {"velocity": before + delta}
