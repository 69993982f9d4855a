"""MOON: a client's representations are drawn to those of the received model, and away from those of its own previous one.

Q. Li, B. He, D. Song, Model-Contrastive Federated Learning, CVPR 2021, equations 3 and 4. With z, z_g and z_p what the client's
model, the received one and the client's model of its last participation make of an example:

    loss   mean of CE + mu l_con
    l_con  -log( exp(cos(z, z_g) / T) / (exp(cos(z, z_g) / T) + exp(cos(z, z_p) / T)) )

The received and the previous model are constants, in evaluation mode. When a client takes part for the first time, its previous
model is the received one, so that l_con is log 2 and has no gradient.

z comes from a projection head between the features and the last layer, two linear layers with ReLU between them; the last layer
then sees z. It is a part of the network: its tensors are ``model/output.project...``, those of the last layer
``model/output.classify...``. ``projection: null`` leaves it out, so that z is what the network's last layer sees: with mu 0 that is
FedAvg to the bit. With the head, mu 0 is FedAvg of the larger network, as the paper has its baselines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.needs import Needs
from raydfl.core.types import Batch, ModelSpec, Update
from raydfl.methods._copies import find_retained, retain
from raydfl.methods._layers import check_features, last_layer
from raydfl.methods._method import Method
from raydfl.training import Step, fit

_PREVIOUS = "previous/"


@dataclass(frozen=True, kw_only=True)
class Moon(Method):
    """FedAvg plus a contrast of the received model with the client's previous one."""

    needs = Needs(objectives=("classify",))

    mu: Annotated[float, Field(ge=0, description="weight of the contrast; 0 is FedAvg; the paper tries 0.1 to 10")] = (
        1.0
    )
    temperature: Annotated[float, Field(gt=0, description="what similarities are divided by")] = 0.5
    projection: Annotated[
        int | None, Field(ge=1, description="outputs of the projection head; null: none, z is what the last layer sees")
    ] = 256

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build the network, and the projection head before its last layer.

        Raises:
            ConfigError: the network has no ``embed`` or ``output``; or the latter is not linear.
        """
        built = super().build(models)
        if self.projection is None:
            check_features(built["model"], "moon")
        else:
            add_projection(built["model"], self.projection)
        return built

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return cross-entropy plus the contrast."""
        network = cast(Any, step.models["model"])
        z = _representation(network, batch)
        logits = network.output.classify(z) if isinstance(network.output, _Projected) else network.output(z)
        value = batch.cross_entropy(logits)
        if self.mu == 0:
            return value
        previous = find_retained(step, _PREVIOUS)
        near, far = (self._similarity(step, batch, z, t) for t in (next(iter(step.received.values())), previous))
        return value + self.mu * batch.mean(F.softplus(far - near))  # -log(e^near / (e^near + e^far))

    def _similarity(self, step: Step, batch: Batch, z: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the cosine of z with the representation that other tensors make, divided by the temperature: [batch]."""
        with step.teacher("model", tensors) as network:
            other = _representation(network, batch)
        return F.cosine_similarity(z, other, dim=1) / self.temperature

    def local(self, step: Step) -> Update:
        """Train, and keep the model for the next time."""
        if not find_retained(step, _PREVIOUS):
            retain(step, _PREVIOUS, step.floating_state("model"))
        metrics = fit(step, self.loss)
        retain(step, _PREVIOUS, step.floating_state("model"))
        return step.update(metrics)


def add_projection(network: nn.Module, size: int) -> None:
    """Put a projection head of ``size`` outputs before the last layer of a network, which is drawn anew.

    Raises:
        ConfigError: the network has no ``embed`` or ``output``; or the latter is not linear.
    """
    layer = last_layer(network, "moon")
    network.output = _Projected(layer.in_features, size, layer.out_features)


class _Projected(nn.Module):
    """A projection head and the last layer behind it: features [batch, width] -> logits [batch, classes]."""

    def __init__(self, width: int, size: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size))
        self.classify = nn.Linear(size, classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.project(features))
        return logits


def _representation(network: nn.Module, batch: Batch) -> Tensor:
    """Return what a network makes of each example: float32 [batch, size of the projection or the features]."""
    top = cast(Any, network)
    features = top.embed(*batch.input_of(network))
    z: Tensor = (top.output.project(features) if isinstance(top.output, _Projected) else features).float()
    return z
