"""Base of methods with an optimiser at the server.

The clients train as in FedAvg, and the rule averages their models. The change from the server's model to this mean is the negative
gradient of the optimiser. The entry ``"moments"`` of the server's state has the optimiser's moments, such as
``"m/model/gru.weight_ih_l0"``. No client receives it.

Buffers are averaged without the optimiser. A round without updates leaves all parameters and moments unchanged. With several
data.parts, the optimiser counts the steps of each part's private tensors separately.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.part_names import mark_like
from raydfl.core.types import BuiltModels, Client, Metrics, State, Update
from raydfl.methods._control import global_parameters
from raydfl.methods._method import Method, UpdateCounter

_STEPS = "server_steps"


@dataclass(frozen=True, kw_only=True)
class ServerOptimiser(Method, ABC):
    """FedAvg with an optimiser at the server. A subclass defines its moments and its step."""

    associative: ClassVar[bool] = True

    @abstractmethod
    def moments(self) -> Mapping[str, float]:
        """Return the initial value of each moment, by name."""

    @abstractmethod
    def move(
        self, old: Tensor, mean: Tensor, moments: Mapping[str, Tensor], number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Take one step of one parameter.

        Args:
            old: The server's value, float32 of any shape.
            mean: The clients' mean, of the same shape.
            moments: The moments by name, of the same shape.
            number: Number of this step, from 1.

        Returns:
            The server's new value, and the new moments.
        """

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state with the initial moments of every parameter."""
        state = super().init(clients, models, rng)
        moments = {
            f"{moment}/{name}": torch.full_like(value, first)
            for name, value in global_parameters(state, models, tied=True).items()
            for moment, first in self.moments().items()
        }
        return dataclasses.replace(state, tensors={**state.tensors, "moments": moments})

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Take one step of every parameter along the clients' mean change."""
        counter = UpdateCounter(updates)
        averaged, report = super().aggregate(state, counter, rng)
        weights, all_moments = dict(averaged.tensors["global"]), dict(state.tensors["moments"])
        steps: dict[str, int] = {}
        for name, old in state.tensors["global"].items():
            moments = {
                moment: all_moments[f"{moment}/{name}"]
                for moment in self.moments()
                if f"{moment}/{name}" in all_moments
            }
            if moments and name in counter.senders:  # Otherwise it is a buffer, or no client of its part sent it.
                key = mark_like(_STEPS, name)
                steps[key] = state.extra.get(key, 0) + 1
                weights[name], moved = self.move(old, weights[name], moments, steps[key])
                all_moments.update({f"{moment}/{name}": value for moment, value in moved.items()})
        tensors = {**averaged.tensors, "global": weights, "moments": all_moments}
        return dataclasses.replace(averaged, tensors=tensors, extra={**averaged.extra, **steps}), report
