"""Methods in which a client trains a part of the network: a smaller one, made of some of its channels."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.needs import Needs
from raydfl.core.types import Batch, Client, ModelSpec, State, Task, Update
from raydfl.methods._method import Method, drawn
from raydfl.methods._profiles import read_number
from raydfl.models import make_cuts, model_options, narrow
from raydfl.objectives import Classify
from raydfl.training import Step, fit

Share = Annotated[float, Field(gt=0, le=1)]

_HELD = "fedrolex/classes"
_LAST = "model/output."


@dataclass(frozen=True, kw_only=True)
class CuttingMethod(Method, ABC):
    """FedAvg over parts of the network; a subclass says which channels a client has in a round.

    The client's network is built with that many channels. It receives the slices of the tensors that lie between these channels,
    and sends slices back. The server averages each element over the clients that had it; what nobody had stays as it was.
    """

    share: Annotated[
        Share | str,
        Field(
            description="share of its channels that a client has, above 0 and at most 1, or the name under which its profile "
            "says so (data.profile); 1: FedAvg"
        ),
    ] = 0.5

    @abstractmethod
    def chosen(self, state: State, client: Client, group: str, channels: int, kept: int) -> np.ndarray:
        """Return which channels a client has in the next round: int [kept], ascending, of those of the whole network.

        Args:
            state: with its ``round_index``.
            client: whose they are.
            group: the channels' name in the network.
            channels: of the whole network.
            kept: that the client has.
        """

    @property
    def needs(self) -> Needs:
        """The profile column of the clients' shares."""
        return Needs(columns=(self.share,) if isinstance(self.share, str) else ())

    def client_models(self, models: Sequence[ModelSpec], profile: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
        """Return the networks with the client's share of their channels."""
        share = self.share
        if isinstance(share, str):
            meaning = "the share of the channels that the client has, above 0 and at most 1"
            share = read_number(profile, share, "share", meaning, lambda number: 0 < number <= 1)
        return tuple(narrow(spec, share, **self.options_of(spec)) for spec in models)

    def options_of(self, spec: ModelSpec) -> dict[str, Any]:
        """Return further options with which narrower networks are built; by default none."""
        return {}

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Give each client of the cohort its slices."""
        return [Task(client.id, cuts=self._cuts(state, client)) for client in drawn(clients, rng, cohort)]

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Measure at clients what they would receive in the next round."""
        return [Task(client.id, phase="evaluate", cuts=self._cuts(state, client)) for client in clients]

    def _cuts(self, state: State, client: Client) -> dict[str, Cut]:
        def choose(group: str, channels: int, kept: int) -> np.ndarray:
            return self.chosen(state, client, group, channels, kept)

        return {name: cut for spec in client.models for name, cut in make_cuts(spec, choose).items()}


@dataclass(frozen=True, kw_only=True)
class ScaledCutting(CuttingMethod, ABC):
    """Cutting as in HeteroFL's code: scaled outputs of convolutions, and a loss without the classes that a client lacks."""

    scaled: Annotated[
        bool,
        Field(
            description="divide what a convolution gives by the share while training (networks that have convolutions)"
        ),
    ] = True
    masked: Annotated[
        bool,
        Field(description="learn and send nothing of classes that the client has no example of (objective classify)"),
    ] = True

    def options_of(self, spec: ModelSpec) -> dict[str, Any]:
        """Scale a network that can."""
        return {"scaled": True} if self.scaled and "scaled" in model_options(spec.architecture) else {}

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss, or the cross-entropy in which other classes' logits are 0."""
        if not self._masks:
            return super().loss(step, batch)
        logits = step.forward("model", batch) * step.state[_HELD]
        return batch.cross_entropy(logits)

    def local(self, step: Step) -> Update:
        """Train; send of the last layer what belongs to the client's classes."""
        if not self._masks:
            return super().local(step)
        labels = np.unique(step.data.train.labels)
        held = torch.zeros(next(spec.width for spec in step.client.models if spec.name == "model"))
        held[labels] = 1
        step.state[_HELD] = held.to(step.device)
        update = step.update(fit(step, self.loss))
        del step.state[_HELD]  # it is no state: the data say it in every round
        return update if len(labels) in (0, len(held)) else _rows(update, labels, len(held))

    @property
    def _masks(self) -> bool:
        return self.masked and isinstance(self.objective, Classify)


def _rows(update: Update, rows: np.ndarray, classes: int) -> Update:
    """Return an update with some rows of the last layer alone."""
    tensors, cuts = dict(update.tensors), dict(update.cuts)
    for name, value in update.tensors.items():
        if name.startswith(_LAST) and value.ndim and len(value) == classes:
            rest = cuts[name].indices[1:] if name in cuts else (None,) * (value.ndim - 1)
            tensors[name], cuts[name] = value[torch.from_numpy(rows).to(value.device)], Cut([rows, *rest])
    return dataclasses.replace(update, tensors=tensors, cuts=cuts)
