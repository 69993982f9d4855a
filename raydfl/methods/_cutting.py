"""Methods whose clients train a sub-network of some of the network's channels."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.needs import Needs
from raydfl.core.options import OURS, PAPER
from raydfl.core.types import Batch, Client, ModelSpec, State, Task, Update
from raydfl.methods._method import Method, sample_clients
from raydfl.methods._profiles import read_number
from raydfl.methods._pruning import count_kept
from raydfl.models import fit_width, make_cuts, model_options, narrow
from raydfl.objectives import Classify
from raydfl.training import Step, fit

Share = Annotated[float, Field(gt=0, le=1)]

_PRESENT = "fedrolex/classes"
_LAST = "model/output."


@dataclass(frozen=True, kw_only=True)
class CuttingMethod(Method, ABC):
    """FedAvg over sub-networks. A subclass chooses each client's channels in :meth:`chosen`.

    A client builds a network with only its channels, receives their slices of the server's tensors, and sends slices back. The
    server averages each element over its senders. Elements without senders keep their values.
    """

    share: Annotated[
        Share | str,
        Field(
            description="Fraction of each layer's channels at a client, in (0, 1], or a profile column with the fraction "
            "(data.profile). 1: FedAvg."
        ),
        OURS,
    ] = 0.5

    share_of: Annotated[
        Literal["channels", "weights"],
        Field(
            description="Base of the fraction. channels: the channels of each layer. weights: the trainable weights of the "
            "network, as nearly as whole channels allow."
        ),
        PAPER,
    ] = "channels"

    @abstractmethod
    def chosen(self, state: State, client: Client, group: str, channels: int, kept: int) -> np.ndarray:
        """Choose a client's channels of the next round.

        Args:
            state: The state before the round.
            client: The client.
            group: Name of the channels in the network.
            channels: Number of channels in the whole network.
            kept: Number of channels to choose.

        Returns:
            Channel indices, int [kept], ascending.
        """

    @property
    def needs(self) -> Needs:
        """The profile column of the clients' shares."""
        return Needs(columns=(self.share,) if isinstance(self.share, str) else ())

    def client_models(self, models: Sequence[ModelSpec], profile: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
        """Narrow the architectures to the client's fraction of their channels or weights."""
        share = self.share
        if isinstance(share, str):
            meaning = f"the client's fraction of the {self.share_of}, above 0 and at most 1"
            share = read_number(profile, share, "share", meaning, lambda number: 0 < number <= 1)
        widths = [share if self.share_of == "channels" else fit_width(spec, share) for spec in models]
        return tuple(narrow(spec, width, **self.options_of(spec)) for spec, width in zip(models, widths, strict=True))

    def options_of(self, spec: ModelSpec) -> dict[str, Any]:
        """Return further options for building the narrow networks. The default has none."""
        return {}

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Give each client of the cohort its slices."""
        return [Task(client.id, cuts=self._cuts(state, client)) for client in sample_clients(clients, rng, cohort)]

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Plan each client's evaluation with its slices of the next round."""
        return [Task(client.id, phase="evaluate", cuts=self._cuts(state, client)) for client in clients]

    def local(self, step: Step) -> Update:
        """Train, and count the weights of the sub-network."""
        return step.update({**fit(step, self.loss), **count_kept(step, {})})

    def _cuts(self, state: State, client: Client) -> dict[str, Cut]:
        def choose(group: str, channels: int, kept: int) -> np.ndarray:
            return self.chosen(state, client, group, channels, kept)

        return {name: cut for spec in client.models for name, cut in make_cuts(spec, choose).items()}


@dataclass(frozen=True, kw_only=True)
class ScaledCutting(CuttingMethod, ABC):
    """Sub-networks as in HeteroFL's code: scaled convolutions, and a loss over the client's own classes."""

    scaled: Annotated[
        bool,
        Field(description="Divide the outputs of convolutions by the fraction during training."),
        PAPER,
    ] = True
    masked: Annotated[
        bool,
        Field(description="Neither train nor send outputs of classes without local examples (objective classify)."),
        PAPER,
    ] = True

    def options_of(self, spec: ModelSpec) -> dict[str, Any]:
        """Return ``scaled`` if the architecture has this option."""
        return {"scaled": True} if self.scaled and "scaled" in model_options(spec.architecture) else {}

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss, or cross-entropy with the logits of missing classes set to 0."""
        if not self._masks:
            return super().loss(step, batch)
        logits = step.forward("model", batch) * step.state[_PRESENT]
        return batch.cross_entropy(logits)

    def local(self, step: Step) -> Update:
        """Train, and send only the client's own classes of the last layer."""
        if not self._masks:
            return super().local(step)
        labels = np.unique(step.data.train.labels)
        present = torch.zeros(next(spec.width for spec in step.client.models if spec.name == "model"))
        present[labels] = 1
        step.state[_PRESENT] = present.to(step.device)
        update = super().local(step)
        del step.state[_PRESENT]  # The data determine it, so it needs no place in the checkpoint.
        return update if len(labels) in (0, len(present)) else _select_rows(update, labels, len(present))

    @property
    def _masks(self) -> bool:
        return self.masked and isinstance(self.objective, Classify)


def _select_rows(update: Update, rows: np.ndarray, classes: int) -> Update:
    """Return an update with only some rows of the last layer."""
    tensors, cuts = dict(update.tensors), dict(update.cuts)
    for name, value in update.tensors.items():
        if name.startswith(_LAST) and value.ndim and len(value) == classes:
            rest = cuts[name].indices[1:] if name in cuts else (None,) * (value.ndim - 1)
            tensors[name], cuts[name] = value[torch.from_numpy(rows).to(value.device)], Cut([rows, *rest])
    return dataclasses.replace(update, tensors=tensors, cuts=cuts)
