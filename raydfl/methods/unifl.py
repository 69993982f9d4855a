"""UniFL: clients that have all views and clients that do not are two federations, which share nothing.

The baseline UniFL of ModalityMirror: separate FedAvg for each population. A client that lacks a view trains the network of each
view that it has, encoder and head; these are in ``global``. A client that has all views trains encoders of their own and the
fusion classifier; these are in the entry ``fused``. With two views, audio and video, the reported audio model is thus FedAvg's
over the audio-only clients.

Readings and deviations:

- ``train.cohort`` clients are drawn from each population, or all of it where it has fewer.
- The mean is uniform; ``rule: weighted_mean`` weighs by examples.
- The work that the paper cites under this name is a co-attention framework; its paper uses it as said above.
- Both federations begin from the same weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.core.types import BuiltModels, Client, State, Task
from raydfl.methods._method import sample_clients
from raydfl.methods._views import ALL, FUSION, GLOBAL, SOME, select_clients
from raydfl.methods.multifl import MultiFL
from raydfl.training import Step

FUSED = "fused"
"""The entry of the state with the networks of the clients that have all views."""


@dataclass(frozen=True, kw_only=True)
class UniFL(MultiFL):
    """A federation of the clients that have all views, and one of the others."""

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return both federations' networks."""
        state = super().init(clients, models, rng)
        whole = state.tensors[GLOBAL]
        apart = {name: value for name, value in whole.items() if not name.startswith(f"{FUSION}/")}
        return dataclasses.replace(state, tensors={GLOBAL: apart, FUSED: {n: t.clone() for n, t in whole.items()}})

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Draw from each population."""
        tasks: list[Task] = []
        for kind, key in ((SOME, GLOBAL), (ALL, FUSED)):
            members = select_clients(state, clients, kind)
            tasks += [
                Task(client.id, receive=(key,)) for client in sample_clients(members, rng, min(cohort, len(members)))
            ]
        return tasks

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Measure the student in ``global``, and the fusion in ``fused``; clients have one of both."""
        if not clients:
            return [Task("", phase="evaluate", receive=(key,)) for key in (GLOBAL, FUSED)]
        fused = {client.id for client in clients if any(spec.name == FUSION for spec in client.models)}
        return [
            Task(client.id, phase="evaluate", receive=(FUSED if client.id in fused else GLOBAL,)) for client in clients
        ]

    def measured(self, step: Step) -> Sequence[str]:
        """Return what the entry received is for."""
        return [FUSION] if FUSED in step.received else super().measured(step)
