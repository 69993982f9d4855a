"""ProFiLA as run: Fed-ProFiLA-AD with the readings of the authors' code as options, and with its terms for anomalous clips.

The code does what the paper does not say: batches have anomalous clips too, of the pools ``normal`` and ``anomalous``. Three terms
keep these away, in the notation of :mod:`raydfl.methods.profila`:

    push        mean of relu(margin - ||z - u(m)||)^2 over the anomalous clips, and the same from the batch's normal centre
    contrast    the supervised contrastive loss of two classes (P. Khosla and others, NeurIPS 2020, equation 2)

``anomalous_share: 0`` leaves the anomalous clips out, so that each reading can be tried with normal clips alone. Readings of the
code that are no defaults here (docs/profila.md has the reasons):

- ``centre_of: all``: the whole batch is in the mean and in the first term.
- ``align: smoothed``: u(m) is aligned, so that a twentieth of the gradient is left.
- ``first_round: 0`` and ``ramp``: the code counts rounds from 0, and lambda rises within a round as well.
- ``temperature: 2`` and ``history: 5``: the code divides by 2 and takes the mean of five rounds.
- ``steer: test``: the code's A_k is of the test data.

``schedule: literal`` is equation 5 as printed, and ``task: compact`` is the objective's own loss in place of the first term.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.types import Batch, Metrics, Update
from raydfl.data import Examples
from raydfl.methods.profila import LAMBDA, ProFiLA, Share, Weight, follow, pool_epochs
from raydfl.training import Plan, Step

NORMAL, ANOMALOUS = "normal", "anomalous"
"""The pools of a batch."""

_LARGE = 1e9


@dataclass(frozen=True, kw_only=True)
class ProFiLAAsRun(ProFiLA):
    """ProFiLA with all readings, and with anomalous clips in training."""

    task: Annotated[
        Literal["prototype", "compact"],
        Field(
            description="what clips are drawn to: the client's prototype with some of the batch's mean (the code's), or the "
            "batch's mean, which is the objective's own loss"
        ),
    ] = "prototype"
    schedule: Annotated[
        Literal["rising", "literal", "constant"],
        Field(
            description="after the warm-up: from 0.8 to 1 of its last value (the code), from 1 to 0.8 (equation 5), or all of it"
        ),
    ] = "rising"
    first_round: Annotated[
        int, Field(ge=0, le=1, description="number of the first round; 1: the paper's, 0: the code's")
    ] = 1
    ramp: Annotated[
        bool, Field(description="the weight also rises within a round, from a share of 1 / epochs on, as in the code")
    ] = False
    align: Annotated[
        Literal["batch", "smoothed"],
        Field(
            description="what is aligned with the common prototype: the batch's mean, or that and the client's prototype"
        ),
    ] = "batch"
    temperature: Annotated[float, Field(gt=0, description="what performance is divided by; the code: 2")] = 1.0
    history: Annotated[int, Field(ge=1, description="rounds whose mean is a client's performance; the code: 5")] = 1
    auc_threshold: Annotated[Share, Field(description="performance below which a learning rate is raised")] = 0.7
    eta: Annotated[float, Field(ge=1, description="what a learning rate is raised by")] = 1.2
    shrink: Annotated[float, Field(gt=0, le=1, description="what it is lowered by after a best performance")] = 0.99
    steer: Annotated[
        Literal["validation", "test", "off"],
        Field(
            description="a client's clips that its performance is measured on: its validation; its test, as the code does, which "
            "leaks; or none"
        ),
    ] = "validation"
    anomalous_share: Annotated[
        float, Field(ge=0, lt=1, description="share of a batch that is anomalous, rounded; 0: normal clips alone")
    ] = 0.25
    centre_of: Annotated[
        Literal["normal", "all"],
        Field(description="clips that make the batch's mean and are drawn to it; the code: all of the batch"),
    ] = "normal"
    push: Annotated[
        tuple[Weight, Weight],
        Field(description="weights of pushing anomalous clips from the prototype, and from the normal centre"),
    ] = (1.0, 0.5)
    margin: Annotated[tuple[Weight, Weight], Field(description="distances up to which they are pushed, at most 2")] = (
        1.0,
        0.8,
    )
    contrast: Annotated[Weight, Field(description="weight of the supervised contrastive loss")] = 1.0
    contrast_temperature: Annotated[float, Field(gt=0, description="what its similarities are divided by")] = 0.2

    @property
    def needs(self) -> Needs:
        """Both pools, and room for both in a batch."""
        if not self.anomalous_share:
            return super().needs
        return dataclasses.replace(super().needs, pools=(NORMAL, ANOMALOUS), batch_size=2)

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return ProFiLA's loss by the chosen readings, and the terms of anomalous clips."""
        network, objective = cast(Any, step.models["model"]), cast(Any, self.objective)
        z = F.normalize(step.forward("model", batch), dim=1)
        anomalous = batch.columns["pool"] if self.anomalous_share else None
        learnt = batch if anomalous is None or self.centre_of == "all" else _select(batch, anomalous == 0)
        own = self.prototype(network)
        if self.task == "prototype":
            mean = follow(network.own_prototype, z, learnt, objective.momentum)
        else:
            means = objective.follow(network.objective, z, learnt)
            mean = means[0]
        smoothed = F.normalize(self.memory * own + (1 - self.memory) * mean, dim=0)
        targets = smoothed.expand_as(z) if self.task == "prototype" else means
        value: Tensor = objective.distance(z, targets, learnt)
        if self.aligns:
            near = smoothed if self.align == "smoothed" else F.normalize(mean, dim=0)
            value = value + step.state[LAMBDA] * (near - F.normalize(network.prototype, dim=0)).square().sum()
        return value if anomalous is None else value + self._push(z, smoothed, batch, anomalous)

    def _push(self, z: Tensor, prototype: Tensor, batch: Batch, anomalous: Tensor) -> Tensor:
        """Return the terms that keep anomalous clips away: a scalar."""
        strange, usual = _select(batch, anomalous == 1), _select(batch, anomalous == 0)
        usual_weight = cast(Tensor, usual.weight)
        normal_centre = F.normalize((usual_weight[:, None] * z).sum(dim=0) / usual_weight.sum().clamp_min(1.0), dim=0)
        value = z.new_zeros(())
        for weight, margin, place in zip(self.push, self.margin, (prototype, normal_centre), strict=True):
            away = ((z - place).square().sum(dim=1) + 1e-12).sqrt()
            value = value + weight * strange.mean((margin - away).relu().square())
        if self.contrast:
            value = value + self.contrast * _contrast(z, anomalous, batch, self.contrast_temperature)
        return value

    def weight_in(self, round_index: int, done: float = 1.0) -> float:
        """Return the weight of the alignment by the chosen readings of equation 5."""
        curves = {"rising": lambda angle: 1 - math.cos(angle), "literal": math.cos, "constant": lambda angle: 1.0}
        weight = self.weight_at(round_index + self.first_round, curves[self.schedule])
        return weight * done if self.ramp else weight

    def train(self, step: Step, rate: float | None) -> Metrics:
        """Train for all epochs; with ``task: compact`` without a prototype to renew."""
        if self.task == "prototype":
            return super().train(step, rate)
        parts = range(step.training.local_epochs) if self.ramp and self.aligns else (None,)
        return pool_epochs([self.train_epoch(step, epoch, rate) for epoch in parts])

    def plan_batches(self, step: Step) -> Plan | None:
        """Return batches of both pools; the epoch ends where either pool would."""
        if not self.anomalous_share:
            return None
        size = step.training.batch_size
        anomalous = min(size - 1, max(1, round(self.anomalous_share * size)))
        rows = {NORMAL: size - anomalous, ANOMALOUS: anomalous}
        steps = [len(step.data.pools[name]) // count for name, count in rows.items() if len(step.data.pools[name])]
        return Plan(rows, steps=max(1, min(steps, default=1)))

    def prototype(self, network: Any) -> Tensor:
        """Return the client's prototype, with ``task: compact`` the direction of the objective's running mean."""
        return super().prototype(network) if self.task == "prototype" else F.normalize(network.objective.sums[0], dim=0)

    @property
    def steers(self) -> bool:
        """True where something depends on what clients detect."""
        return self.steer != "off" and super().steers

    def steering_clips(self, step: Step) -> Examples:
        """Return the clips that ``steer`` names."""
        return step.data.test if self.steer == "test" else step.data.validation

    def performance_of(self, update: Update, extra: dict[str, Any]) -> float | None:
        """Return a client's mean performance over its last rounds, which ``extra`` keeps."""
        now = super().performance_of(update, extra)
        if self.history == 1:
            return now
        of_clients = extra.get("performance", {})
        kept = [*of_clients.get(update.client_id, ()), *([] if now is None else [now])][-self.history :]
        extra["performance"] = {**of_clients, update.client_id: kept} if kept else of_clients
        return float(np.mean(kept)) if kept else None


def _select(batch: Batch, which: Tensor) -> Batch:
    """Return a batch in which examples count only where ``which`` (bool [batch]) is true."""
    weight = which.float() if batch.weight is None else which.float() * batch.weight
    return dataclasses.replace(batch, weight=weight)


def _contrast(z: Tensor, kind: Tensor, batch: Batch, temperature: float) -> Tensor:
    """Return the supervised contrastive loss, a mean over the examples that have another of their kind: a scalar.

    Args:
        z: float32 [batch, size], of length 1.
        kind: int64 [batch].
        batch: whose weights say what counts.
        temperature: what similarities are divided by.
    """
    counts = torch.ones_like(z[:, 0]) if batch.weight is None else batch.weight
    others = (1 - torch.eye(len(z), device=z.device)) * counts[:, None] * counts[None, :]
    similarity = z @ z.T / temperature
    logs = similarity - torch.where(others > 0, similarity, -_LARGE).logsumexp(dim=1, keepdim=True)
    alike = others * (kind[:, None] == kind[None, :])
    pairs = alike.sum(dim=1)
    each = -(alike * logs).sum(dim=1) / pairs.clamp_min(1.0)
    having = (pairs > 0).float()
    return (each * having).sum() / having.sum().clamp_min(1.0)
