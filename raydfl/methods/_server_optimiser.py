"""The common part of methods with an optimiser at the server.

The clients train as in FedAvg and the rule averages their models; the change from the server's model to that mean takes the place
of a gradient (with the opposite sign: the server steps along it). What the optimiser keeps lies in the entry ``"moments"`` of the
server's state, which no client receives: ``"m/model/gru.weight_ih_l0"`` is what it calls ``m`` of that parameter.

Buffers are averaged and see no optimiser. A round in which nothing arrived moves nothing, momentum included; over several
data.parts that holds for what each part has of its own, whose steps are counted by themselves.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.part_names import beside
from raydfl.core.types import BuiltModels, Client, Metrics, State, Update
from raydfl.methods._control import global_parameters
from raydfl.methods._method import Counted, Method

_STEPS = "server_steps"


@dataclass(frozen=True, kw_only=True)
class ServerOptimiser(Method, ABC):
    """FedAvg with an optimiser at the server; a subclass says what it keeps and how it moves one parameter."""

    @abstractmethod
    def moments(self) -> Mapping[str, float]:
        """Return what is kept for every element of a parameter: name -> its first value."""

    @abstractmethod
    def move(
        self, old: Tensor, mean: Tensor, moments: Mapping[str, Tensor], number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Take one step of one parameter.

        Args:
            old: the server's, float32 of any shape.
            mean: the clients', of that shape.
            moments: what is kept, by the names of :meth:`moments`, each of that shape.
            number: of this step; the first is 1.

        Returns:
            The server's new value, and what is kept from now on.
        """

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """FedAvg's state and the moments of every parameter."""
        state = super().init(clients, models, rng)
        moments = {
            f"{moment}/{name}": torch.full_like(value, first)
            for name, value in global_parameters(state, models, tied=True).items()
            for moment, first in self.moments().items()
        }
        return dataclasses.replace(state, tensors={**state.tensors, "moments": moments})

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Take one step of every parameter along the clients' mean change."""
        arriving = Counted(updates)
        averaged, report = super().aggregate(state, arriving, rng)
        weights, kept = dict(averaged.tensors["global"]), dict(state.tensors["moments"])
        steps: dict[str, int] = {}
        for name, old in state.tensors["global"].items():
            own = {moment: kept[f"{moment}/{name}"] for moment in self.moments() if f"{moment}/{name}" in kept}
            if own and name in arriving.senders:  # else it is a buffer, or nobody of its part was in the round
                counter = beside(_STEPS, name)
                steps[counter] = state.extra.get(counter, 0) + 1
                weights[name], moved = self.move(old, weights[name], own, steps[counter])
                kept.update({f"{moment}/{name}": value for moment, value in moved.items()})
        tensors = {**averaged.tensors, "global": weights, "moments": kept}
        return dataclasses.replace(averaged, tensors=tensors, extra={**averaged.extra, **steps}), report
