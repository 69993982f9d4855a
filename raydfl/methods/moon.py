"""MOON: a contrast pulls representations to the received model's, and away from the client's previous model's.

Q. Li, B. He, D. Song, Model-Contrastive Federated Learning, CVPR 2021, equations 3 and 4. z, z_g and z_p are an example's
representations by the client's model, by the received model, and by the client's model of its last participation:

    loss   mean of CE + mu l_con
    l_con  -log( exp(cos(z, z_g) / T) / (exp(cos(z, z_g) / T) + exp(cos(z, z_p) / T)) )

The received and the previous model are constants, in evaluation mode. At a client's first participation, its previous model is
the received model, so l_con is log 2 without a gradient.

A projection head between the features and the last layer yields z, the input of the last layer. It has two linear layers with a
ReLU between them. Its tensors are ``model/output.project...``, and the last layer's ``model/output.classify...``. With
``projection: null`` there is no head, and z is the features. With mu 0 this is FedAvg to the bit. With the head, mu 0 is FedAvg
of the larger network, as in the paper's baselines.

The objective must be ``classify``. A client stores its previous model, and a step takes three forward passes instead of one.
Files for ``models.model.init_from`` name the last layer differently, so exclude it (``keep`` and ``ignore``). A network of your
own needs ``embed(x, lengths=None)``, float32 [batch, width], and a linear last layer ``output``.

    raydfl run jobs/tiny.yaml run.name=moon train.rounds=1 method='{name: moon, projection: 16}'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.needs import Needs
from raydfl.core.options import PAPER
from raydfl.core.types import Batch, ModelSpec, Update
from raydfl.methods._copies import find_retained, retain
from raydfl.methods._layers import check_features, last_layer
from raydfl.methods._method import Method
from raydfl.training import Step, fit

_PREVIOUS = "previous/"


@dataclass(frozen=True, kw_only=True)
class Moon(Method):
    """FedAvg plus a contrastive loss with the received model and the client's previous model."""

    needs = Needs(objectives=("classify",))

    mu: Annotated[
        float, Field(ge=0, description="Weight of the contrastive loss. 0: FedAvg. The paper tries 0.1 to 10."), PAPER
    ] = 1.0
    temperature: Annotated[
        float, Field(gt=0, description="Divisor of the similarities. Small values sharpen the contrast."), PAPER
    ] = 0.5
    projection: Annotated[
        int | None, Field(ge=1, description="Number of outputs of the projection head. null: no head."), PAPER
    ] = 256

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build the network, with the projection head before its last layer.

        Raises:
            ConfigError: The network has no ``embed``, or no linear ``output``.
        """
        built = super().build(models)
        if self.projection is None:
            check_features(built["model"], "moon")
        else:
            add_projection(built["model"], self.projection)
        return built

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the cross-entropy plus the contrastive loss."""
        network = cast(Any, step.models["model"])
        z = _compute_representation(network, batch)
        logits = network.output.classify(z) if isinstance(network.output, _ProjectionHead) else network.output(z)
        value = batch.cross_entropy(logits)
        if self.mu == 0:
            return value
        previous = find_retained(step, _PREVIOUS)
        near, far = (
            self._compute_similarity(step, batch, z, t) for t in (next(iter(step.received.values())), previous)
        )
        return value + self.mu * batch.mean(F.softplus(far - near))  # -log(e^near / (e^near + e^far))

    def _compute_similarity(self, step: Step, batch: Batch, z: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the cosine of z and a teacher's representation, divided by the temperature: [batch]."""
        with step.teacher("model", tensors) as network:
            target = _compute_representation(network, batch)
        return F.cosine_similarity(z, target, dim=1) / self.temperature

    def local(self, step: Step) -> Update:
        """Train, and retain the model for the next participation."""
        if not find_retained(step, _PREVIOUS):  # At the first participation, the previous model is the received one.
            retain(step, _PREVIOUS, step.floating_state("model"))
        metrics = fit(step, self.loss)
        retain(step, _PREVIOUS, step.floating_state("model"))
        return step.update(metrics)


def add_projection(network: nn.Module, size: int) -> None:
    """Put a projection head with ``size`` outputs before a network's last layer, and initialise both.

    Raises:
        ConfigError: The network has no ``embed``, or no linear ``output``.
    """
    layer = last_layer(network, "moon")
    network.output = _ProjectionHead(layer.in_features, size, layer.out_features)


class _ProjectionHead(nn.Module):
    """A projection head and the last layer: features [batch, width] -> logits [batch, classes]."""

    def __init__(self, width: int, size: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size))
        self.classify = nn.Linear(size, classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.project(features))
        return logits


def _compute_representation(network: nn.Module, batch: Batch) -> Tensor:
    """Return the projected features of a batch, or without a head its features: float32 [batch, size]."""
    top = cast(Any, network)
    features = top.embed(*batch.input_of(network))
    z: Tensor = (top.output.project(features) if isinstance(top.output, _ProjectionHead) else features).float()
    return z
