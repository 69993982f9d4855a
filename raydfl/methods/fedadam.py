"""FedAdam: the server takes Adam steps along the clients' mean change.

S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, Adaptive Federated Optimization,
ICLR 2021, algorithm 2:

    delta = mean_k (w_k) - w        (the mean of the clients' models under the aggregation rule, minus the server's)
    m <- beta1 m + (1 - beta1) delta
    v <- beta2 v + (1 - beta2) delta^2
    w <- w + server_lr m / (sqrt(v) + tau),        m_0 = 0, v_0 = tau^2, no bias correction

Buffers are averaged and see no optimiser. With beta1 = 0 and tau -> infinity at server_lr = tau it is FedAvg.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.method import Method
from raydfl.types import Client, Metrics, State, Update


@dataclass(frozen=True, kw_only=True)
class FedAdam(Method):
    """FedAvg with Adam at the server."""

    server_lr: Annotated[
        float, Field(gt=0, description="server learning rate; the paper tries 0.001 to 0.1 and more")
    ] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the first moment; 0: no momentum")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the second moment")] = 0.99
    tau: Annotated[float, Field(gt=0, description="adaptivity: the larger, the more like plain averaging")] = 1e-3

    def init(
        self, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]], rng: np.random.Generator
    ) -> State:
        """FedAvg's state and both moments, which stay at the server."""
        state = super().init(clients, models, rng)
        shared = state.tensors["global"]
        parameters = {f"{n}/{k}" for built in models for n, m in built.items() for k, _ in m.named_parameters()}
        moments: dict[str, Tensor] = {}
        for name, value in shared.items():
            if name in parameters:
                moments[f"m/{name}"] = torch.zeros_like(value)
                moments[f"v/{name}"] = torch.full_like(value, self.tau**2)
        return dataclasses.replace(state, tensors={**state.tensors, "moments": moments})

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """One Adam step of every parameter along the clients' mean change."""
        averaged, report = super().aggregate(state, updates, rng)
        weights = dict(averaged.tensors["global"])
        moments = dict(state.tensors["moments"])
        for name, old in state.tensors["global"].items():
            if f"m/{name}" not in moments:
                continue  # a buffer
            delta = weights[name] - old
            m = self.beta1 * moments[f"m/{name}"] + (1 - self.beta1) * delta
            v = self.beta2 * moments[f"v/{name}"] + (1 - self.beta2) * delta.square()
            moments[f"m/{name}"], moments[f"v/{name}"] = m, v
            weights[name] = old + self.server_lr * m / (v.sqrt() + self.tau)
        tensors = {**averaged.tensors, "global": weights, "moments": moments}
        return dataclasses.replace(averaged, tensors=tensors), report
