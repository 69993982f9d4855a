"""Compact: clips are brought near each other, and what then lies far from them is strange (one-class learning).

    z_i   what the network gives for clip i, scaled to length 1
    m_c   the mean of z over the batch's clips of class c, or over all of the batch
    loss  mean over the batch of ||z_i - m||^2, plus ``spread`` times v
    v     mean over the d numbers j of z of max(0, 1 - sqrt(d var(z_j) + 1e-4)), var over the batch

after L. Ruff and others, Deep One-Class Classification, ICML 2018, with the batch's mean in the place of a fixed centre. What is
far is told by a running mean of the centres, which is a part of the network (``model/objective.sums`` and ``.counts``, decayed by
``momentum`` at each step), so that it travels and is averaged as the network is, each client counting as it does there. A
recording's score is the squared distance to the nearest centre of a class that some client has.

Brought near enough to each other, all clips are one point, and no score says anything: the loss of normal clips is then 0. Against
this stands v, the variance term of A. Bardes, J. Ponce and Y. LeCun, VICReg, ICLR 2022, equation 1. Their z has any length and its
deviation is held at 1; here z has length 1, so 1 / sqrt(d) takes that place: what z has where it is spread over the whole sphere.

With ``score`` a client holds its recordings against what its network makes of its own training clips, each time that it is measured
(raydfl.objectives._reference); nothing is then measured at the server, which has none.
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
from raydfl.objectives._reference import distances
from raydfl.training import Step, predict

_NONE = 1e-6
"""Clips in the running count of a class from which on it is known."""


@dataclass(frozen=True, kw_only=True)
class Compact(AnomalyObjective):
    """Clips near each other; a recording's score is its distance to where they are."""

    size: Annotated[int, Field(ge=2, description="numbers that the network gives for a clip")] = 32
    by: Annotated[
        Literal["all", "class"], Field(description="one centre for all training clips, or one for each class")
    ] = "all"
    momentum: Annotated[
        float,
        Field(ge=0, lt=1, description="what is kept of the running centres at each step; 0: those of the last batch"),
    ] = 0.9

    spread: Annotated[
        float,
        Field(
            ge=0,
            description="weight of a term that keeps all clips from becoming one point (VICReg's variance term); 0: none",
        ),
    ] = 0.0
    score: Annotated[
        Literal["centre", "own_centre", "mahalanobis", "nearest"],
        Field(
            description="what a score is the distance to. centre: the running centre, which travels. At clients alone, of their "
            "own training clips: own_centre, their mean; mahalanobis, their mean, by their covariance; nearest, the nearest one"
        ),
    ] = "centre"

    def outputs(self, classes: int) -> int:
        """Return ``size``."""
        return self.size

    def extension(self, spec: ModelSpec) -> nn.Module:
        """Return the running centres."""
        return Centres(spec.classes if self.by == "class" else 1, self.size)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Mean squared distance to the batch's own centres, and the spread's term; the running centres follow."""
        z = F.normalize(step.forward(name, batch), dim=1)
        return self.distance(z, self.follow(cast(Any, step.models[name]).objective, z, batch), batch)

    def follow(self, centres: Centres, z: Tensor, batch: Batch) -> Tensor:
        """Let running centres follow a batch, and return the batch's own centre of each example.

        Args:
            centres: of the network; ``network.objective``.
            z: float32 [batch, size], of length 1.
            batch: whose weights say what counts.

        Returns:
            float32 [batch, size], with gradients.
        """
        member = self._membership(batch, z, centres.counts)
        mass = member if batch.weight is None else member * batch.weight.unsqueeze(1)
        counts = mass.sum(dim=0)
        means = (mass.T @ z) / counts.clamp_min(_NONE).unsqueeze(1)
        with torch.no_grad():
            centres.sums.mul_(self.momentum).add_(mass.T @ z)
            centres.counts.mul_(self.momentum).add_(counts)
        return member @ means

    def distance(self, z: Tensor, places: Tensor, batch: Batch) -> Tensor:
        """Return the mean squared distance of z from some places, both float32 [batch, size], and the spread's term: a scalar."""
        away = (z - places).square().sum(dim=1)
        return batch.mean(away + self.spread * _narrowness(z, batch) if self.spread else away)

    def _membership(self, batch: Batch, z: Tensor, counts: Tensor) -> Tensor:
        """Return the centre that each example belongs to, float32 [batch, centres]; to the mean of several of a set of classes."""
        if self.by == "all":
            return torch.ones_like(z[:, :1])
        if batch.y.is_floating_point():
            return batch.y / batch.y.sum(dim=1, keepdim=True).clamp_min(1)
        return (batch.y.unsqueeze(1) == torch.arange(len(counts), device=batch.y.device)).float()

    def predictor(self, network: nn.Module) -> nn.Module:
        """Return the network with the distance to its nearest centre."""
        return _Distance(network)

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Measure a model by :attr:`score`; nothing where that needs training clips and there are none."""
        if self.score != "centre" and not len(self.normal_examples(step.data.train)):
            return {}
        return AnomalyObjective.evaluate(self, step, name, examples, batch_size)

    def answers_to(self, step: Step, name: str, examples: Examples, batch_size: int) -> Tensor:
        """Return the scores of some examples, float [examples, 1], on the CPU."""
        if self.score == "centre":
            return AnomalyObjective.answers_to(self, step, name, examples, batch_size)
        own = self.normal_examples(step.data.train).as_tested()
        reference, z = (F.normalize(predict(step, name, part, batch_size).double(), dim=1) for part in (own, examples))
        same = torch.from_numpy(examples.clips[:, None] == own.clips[None, :])
        return distances(self.score, z, reference, same)[:, None]


def _narrowness(z: Tensor, batch: Batch) -> Tensor:
    """Return how much the deviations of numbers fall short of those on the whole sphere: a scalar, 0 to 1, padding left out.

    Args:
        z: float32 [batch, size], of length 1.
        batch: whose weights say what is padding.
    """
    weight = torch.ones_like(z[:, :1]) if batch.weight is None else batch.weight.unsqueeze(1)
    mean = (weight * z).sum(dim=0) / weight.sum().clamp_min(1.0)
    variance = (weight * (z - mean).square()).sum(dim=0) / (weight.sum() - 1).clamp_min(1.0)
    return (1 - (z.shape[1] * variance + 1e-4).sqrt()).relu().mean()


class Centres(nn.Module):
    """Sums and counts of what the network gave, decayed step by step; their quotients are the centres.

    Args:
        centres: how many.
        size: numbers of each.
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, centres: int, size: int) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(centres, size))
        self.register_buffer("counts", torch.zeros(centres))


class _Distance(nn.Module):
    """From features to the squared distance to the nearest known centre: float32 [batch, 1]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        centres = cast(Any, self.network).objective
        z = F.normalize(self.network(x, lengths).float(), dim=1)
        places = centres.sums / centres.counts.clamp_min(_NONE).unsqueeze(1)
        away = (z.unsqueeze(1) - places).square().sum(dim=2)
        unknown = torch.where(centres.counts > _NONE, 0.0, 1e3)  # farther than any two points of length 1
        nearest: Tensor = (away + unknown).amin(dim=1, keepdim=True)
        return nearest
