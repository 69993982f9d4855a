"""A method with two server states: one model for even clients, and one for odd clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl import Client, Method, State, Task

KEYS = ("even", "odd")


@dataclass(frozen=True, kw_only=True)
class TwoStates(Method):
    models: ClassVar[Mapping[str, str]] = {"model": "linear"}

    def init(self, clients: Sequence[Client], models: Any, rng: np.random.Generator) -> State:
        state = super().init(clients, models, rng)
        tensors = state.tensors["global"]
        return dataclasses.replace(state, tensors={k: {n: t.clone() for n, t in tensors.items()} for k in KEYS})

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        return [Task(client.id, receive=(KEYS[client.index % 2],)) for client in clients]

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        return [Task(client.id, phase="evaluate", receive=(KEYS[client.index % 2],)) for client in clients]
