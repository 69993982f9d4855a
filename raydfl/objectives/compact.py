"""Compact: one-class learning, which clusters normal clips and scores recordings by their distance.

    z_i   output of the network for clip i, scaled to length 1
    m_c   mean of z over the batch's clips of class c, or over the whole batch
    loss  mean over the batch of ||z_i - m||^2, plus ``spread`` times v
    v     mean over the d dimensions j of z of max(0, 1 - sqrt(d var(z_j) + 1e-4)), var over the batch

After L. Ruff et al., Deep One-Class Classification, ICML 2018, with the mean of the batch in place of a fixed centre. The
network also contains running means of the centres (``model/objective.sums`` and ``.counts``, decayed by ``momentum`` at each
step). They are sent and averaged like the network, with the same weights of clients. The score of a recording is the squared
distance to the nearest centre. Only centres of classes that occur at a client count.

The loss of normal clips is 0 if all outputs collapse to one point, and scores are then meaningless. The term v prevents this.
It is the variance term of A. Bardes, J. Ponce, Y. LeCun, VICReg, ICLR 2022, equation 1. VICReg targets a standard deviation
of 1 for outputs of any length. Here z has length 1, so the target is 1 / sqrt(d), the deviation on the whole sphere.

With ``score`` other than ``centre``, each evaluation compares the recordings of a client with the outputs of its training
clips (raydfl.objectives._reference). The server has no training clips and measures no scores.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.types import Batch, Metrics, ModelSpec
from raydfl.data import Examples
from raydfl.objectives._anomaly import AnomalyObjective
from raydfl.objectives._reference import compare_with_training
from raydfl.training import Step

_NONE = 1e-6
"""Minimum running count of a class with a known centre."""


@dataclass(frozen=True, kw_only=True)
class Compact(AnomalyObjective):
    """One-class learning: a recording's score is its distance to the cluster of the training clips."""

    size: Annotated[int, Field(ge=2, description="Outputs of the network for a clip.")] = 32
    by: Annotated[
        Literal["all", "class"], Field(description="Centres: one for all training clips, or one for each class.")
    ] = "all"
    momentum: Annotated[
        float,
        Field(ge=0, lt=1, description="Momentum of the running centres. 0: the centres of the last batch."),
    ] = 0.9

    spread: Annotated[
        float,
        Field(
            ge=0,
            description="Weight of VICReg's variance term, which prevents a collapse to one point. 0 disables it.",
        ),
    ] = 0.0
    score: Annotated[
        Literal["centre", "own_centre", "mahalanobis", "nearest"],
        Field(
            description="Distance used as the score. centre: to the running centre, at server and clients. Only at clients, from "
            "their training clips: own_centre, to the mean; mahalanobis, Mahalanobis distance to the mean; nearest, to the nearest."
        ),
    ] = "centre"

    def outputs(self, classes: int) -> int:
        """Return ``size``."""
        return self.size

    def extension(self, spec: ModelSpec) -> nn.Module:
        """Build the running centres."""
        return Centres(spec.classes if self.by == "class" else 1, self.size)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean squared distance to the batch's centres and the variance term, and update the running centres."""
        z = F.normalize(step.forward(name, batch), dim=1)
        return self.distance(z, self.follow(cast(Any, step.models[name]).objective, z, batch), batch)

    def follow(self, centres: Centres, z: Tensor, batch: Batch) -> Tensor:
        """Update the running centres from a batch, and return the batch's centre of each example.

        Args:
            centres: running centres of the network, ``network.objective``.
            z: float32 [batch, size], of length 1.
            batch: the batch, with weights of 0 for padding.

        Returns:
            float32 [batch, size], with gradients.
        """
        member = self._compute_membership(batch, z, centres.counts)
        mass = member if batch.weight is None else member * batch.weight.unsqueeze(1)
        counts = mass.sum(dim=0)
        means = (mass.T @ z) / counts.clamp_min(_NONE).unsqueeze(1)
        with torch.no_grad():  # the running centres are statistics, not parameters
            centres.sums.mul_(self.momentum).add_(mass.T @ z)
            centres.counts.mul_(self.momentum).add_(counts)
        return member @ means

    def distance(self, z: Tensor, centres: Tensor, batch: Batch) -> Tensor:
        """Compute the mean squared distance between z and centres, both float32 [batch, size], plus the variance term."""
        squares = (z - centres).square().sum(dim=1)
        return batch.mean(squares + self.spread * _compute_narrowness(z, batch) if self.spread else squares)

    def _compute_membership(self, batch: Batch, z: Tensor, counts: Tensor) -> Tensor:
        """Compute the membership of examples in centres: float32 [batch, centres]. Sets of classes have equal shares."""
        if self.by == "all":
            return torch.ones_like(z[:, :1])
        if batch.y.is_floating_point():
            return batch.y / batch.y.sum(dim=1, keepdim=True).clamp_min(1)
        return (batch.y.unsqueeze(1) == torch.arange(len(counts), device=batch.y.device)).float()

    def predictor(self, network: nn.Module) -> nn.Module:
        """Wrap the network to compute the distance to its nearest centre."""
        return _Distance(network)

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Evaluate a model by :attr:`score`. Return no metrics if the score needs training clips and there are none."""
        if self.score != "centre" and not len(self.normal_examples(step.data.train)):
            return {}
        return AnomalyObjective.evaluate(self, step, name, examples, batch_size)

    def answers_to(self, step: Step, name: str, examples: Examples, batch_size: int) -> Tensor:
        """Compute the scores of examples: float [examples, 1], on the CPU."""
        if self.score == "centre":
            return AnomalyObjective.answers_to(self, step, name, examples, batch_size)
        normal = self.normal_examples(step.data.train).cut_for_test()
        return compare_with_training(self.score, step, name, examples, normal, batch_size)


def _compute_narrowness(z: Tensor, batch: Batch) -> Tensor:
    """Compute the variance term v, without padding: a scalar from 0 (spread over the sphere) to 1 (collapsed).

    Args:
        z: float32 [batch, size], of length 1.
        batch: the batch, with weights of 0 for padding.
    """
    weight = torch.ones_like(z[:, :1]) if batch.weight is None else batch.weight.unsqueeze(1)
    mean = (weight * z).sum(dim=0) / weight.sum().clamp_min(1.0)
    variance = (weight * (z - mean).square()).sum(dim=0) / (weight.sum() - 1).clamp_min(1.0)
    return (1 - (z.shape[1] * variance + 1e-4).sqrt()).relu().mean()


class Centres(nn.Module):
    """Decayed sums and counts of the network's outputs. Their quotients are the running centres.

    Args:
        centres: number of centres.
        size: dimension of a centre.
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, centres: int, size: int) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(centres, size))
        self.register_buffer("counts", torch.zeros(centres))


class _Distance(nn.Module):
    """Network with the squared distance to the nearest known centre as its output: float32 [batch, 1]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        centres = cast(Any, self.network).objective
        z = F.normalize(self.network(x, lengths).float(), dim=1)
        means = centres.sums / centres.counts.clamp_min(_NONE).unsqueeze(1)
        squares = (z.unsqueeze(1) - means).square().sum(dim=2)
        unknown = torch.where(centres.counts > _NONE, 0.0, 1e3)  # larger than any distance on the unit sphere
        nearest: Tensor = (squares + unknown).amin(dim=1, keepdim=True)
        return nearest
