r"""UniFL: two separate federations, for clients with all views and for clients with missing views.

A baseline of ModalityMirror: separate FedAvg for each population. Clients with a missing view train the networks of their views,
encoder and head, in the entry ``global``. Clients with all views train their own encoders and the fusion classifier, in the entry
``fused``. With the views audio and video, the reported audio model is thus FedAvg's over the audio-only clients, to the bit.

Readings and deviations:

- The paper samples 10 clients in a round, and does not say whether from each population. ``cohort: each`` samples ``train.cohort``
  clients from each population, or all clients of a smaller one. ``shared`` samples them from all clients, as in MultiFL.
- The mean is uniform (``uniform_mean``). ``rule: weighted_mean`` weights by examples.
- The work cited by the paper under this name is a co-attention framework. The paper's baseline is the method above.
- Both federations start from the same weights.

Networks and data are as in all methods of several views (docs/methods.md#methods-of-several-views). Each round records the
clients with and without the fusion (``clients/fused``, ``clients/apart``).

    raydfl run jobs/tiny.yaml run.name=unifl train.rounds=1 method=unifl \
      models='{a: crnn_tiny, b: crnn_tiny}'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.options import OURS
from raydfl.core.types import BuiltModels, Client, State, Task
from raydfl.methods._method import sample_clients
from raydfl.methods._views import ALL, FUSION, GLOBAL, SOME, WithFusion, select_clients
from raydfl.training import Step

FUSED = "fused"
"""The entry of the state with the networks of clients with all views."""


@dataclass(frozen=True, kw_only=True)
class UniFL(WithFusion):
    """Separate FedAvg for clients with all views and for clients with missing views."""

    cohort: Annotated[
        Literal["each", "shared"],
        Field(
            description="Clients of a round. each: train.cohort clients of each federation. shared: train.cohort clients in total."
        ),
        OURS,
    ] = "each"

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return the state of both federations."""
        state = super().init(clients, models, rng)
        whole = state.tensors[GLOBAL]
        separate = {name: value for name, value in whole.items() if not name.startswith(f"{FUSION}/")}
        return dataclasses.replace(state, tensors={GLOBAL: separate, FUSED: {n: t.clone() for n, t in whole.items()}})

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Sample a cohort from each federation, or one cohort from all clients."""
        if self.cohort == "shared":
            return [Task(client.id, receive=(_find_entry(client),)) for client in sample_clients(clients, rng, cohort)]
        tasks: list[Task] = []
        for kind, key in ((SOME, GLOBAL), (ALL, FUSED)):
            members = select_clients(state, clients, kind)
            tasks += [
                Task(client.id, receive=(key,)) for client in sample_clients(members, rng, min(cohort, len(members)))
            ]
        return tasks

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Measure the student in ``global`` and the fusion in ``fused``. A client has one of the two."""
        if not clients:
            return [Task("", phase="evaluate", receive=(key,)) for key in (GLOBAL, FUSED)]
        return [Task(client.id, phase="evaluate", receive=(_find_entry(client),)) for client in clients]

    def select_models(self, step: Step) -> Sequence[str]:
        """Return the fusion for the entry ``fused``, else the default."""
        return [FUSION] if FUSED in step.received else super().select_models(step)


def _find_entry(client: Client) -> str:
    """Return the entry of a client's federation."""
    return FUSED if any(spec.name == FUSION for spec in client.models) else GLOBAL
