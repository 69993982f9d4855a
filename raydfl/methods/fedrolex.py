"""FedRolex: clients train windows of the network's channels, which move on in every round.

S. Alam, L. Liu, M. Yan, M. Zhang, FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022,
algorithm 1 and equation 3. In round j a client with the share b has of a layer with K channels

    {(j + i) mod K : i = 0 ... ceil(b K) - 1}

and of the next layer the same channels' inputs; inputs of the first layer and outputs of the last one stay whole. Each element
of the server's tensors is averaged over the clients that had it, weighted by their examples; what nobody had stays. ``stride: 0``
leaves the windows where they are: these are the sub-networks of HeteroFL (E. Diao et al., 2021).

As the released code does: ``scaled``, a convolution's outputs are divided by the share while training (and not in evaluation),
which makes up for the inputs that the next layer has not; and ``masked``, the logits of classes of which the client has no example
are 0 in its loss, and of the last layer it sends the rows of its own classes alone. The latter tells the server which they are.

Deviations: means are weighted by examples, where the code counts each client once (``rule: uniform_mean``). GRUs lose units (with
their three gates, each direction by itself), which the paper has not; they are not scaled. Channels stay in the network's order
where a window goes past the end. Only the objective ``classify`` has logits to mask. The settings of the code's runs (SGD with
momentum 0.9, learning rate 2e-4, weight decay 1e-3, batches of 10, one epoch, gradients clipped at 1, shares 1, 1/2, 1/4, 1/8 and
1/16) are for ``train`` and ``data.profile`` to say.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.types import Batch, Client, ModelSpec, State, Update
from raydfl.methods._cutting import CuttingMethod
from raydfl.models import model_options
from raydfl.objectives import Classify
from raydfl.training import Step, fit

_HELD = "fedrolex/classes"
_LAST = "model/output."


@dataclass(frozen=True, kw_only=True)
class FedRolex(CuttingMethod):
    """FedAvg over windows of the network's channels that roll on."""

    pure: ClassVar[bool] = True

    stride: Annotated[
        int, Field(ge=0, description="channels by which windows move in a round; 0: they stay, as in HeteroFL")
    ] = 1
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

    def chosen(self, state: State, client: Client, group: str, channels: int, kept: int) -> np.ndarray:
        """Return the window of the round."""
        return np.sort((state.round_index * self.stride + np.arange(kept)) % channels)

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
