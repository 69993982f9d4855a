"""FedAvgM: momentum at the server.

T.-M. H. Hsu, H. Qi, M. Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019:

    delta    = mean_k (w_k) - w     (the mean of the clients' models under the aggregation rule, minus the server's)
    velocity <- momentum velocity + delta
    w        <- w + server_lr velocity,        velocity_0 = 0

With momentum = 0 and server_lr = 1 it is FedAvg. Buffers are averaged without the optimiser. A round without updates changes
nothing, including momentum.

FedMultimodal uses the name "FedOPT" for momentum 0.9 on delta divided by the clients' learning rate. For the same result, set
server_lr to its server learning rate divided by the clients'.

    raydfl run jobs/tiny.yaml run.name=fedavgm train.rounds=1 method=fedavgm method.momentum=0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import OURS
from raydfl.methods._server_optimiser import ServerOptimiser


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimiser):
    """FedAvg with momentum at the server."""

    server_lr: Annotated[
        float, Field(gt=0, description="Server learning rate. 1 takes the clients' mean if momentum is 0."), OURS
    ] = 1.0
    momentum: Annotated[
        float, Field(ge=0, lt=1, description="Decay of the velocity. 0 with server_lr 1 is FedAvg."), OURS
    ] = 0.9

    def moments(self) -> Mapping[str, float]:
        """Return the velocity's initial value."""
        return {"velocity": 0.0}

    def move(
        self, old: Tensor, mean: Tensor, moments: Mapping[str, Tensor], number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Take a step of heavy-ball momentum."""
        delta, before = mean - old, self.momentum * moments["velocity"]
        # Equals old + server_lr (before + delta). In this form, neutral values return the mean without a rounding error.
        return mean + (self.server_lr - 1) * delta + self.server_lr * before, {"velocity": before + delta}
