r"""ProFiLA as run: Fed-ProFiLA-AD with the readings and the anomalous clips of the authors' code as options.

Equations, requirements and private layers are those of ``profila`` (docs/methods.md#profila), where options here do not change
them. Unlike in the paper, the code's batches contain anomalous clips too, from the pools ``normal`` and ``anomalous``
(docs/data.md#pools), required unless ``anomalous_share`` is 0. Three terms push them away:

    push        mean of relu(margin - ||z - u(m)||)^2 over the anomalous clips, and the same for the batch's normal centre
    contrast    the supervised contrastive loss of two classes (P. Khosla et al., NeurIPS 2020, equation 2)

``anomalous_share: 0`` removes the anomalous clips, to test each reading with normal clips alone. With defaults for the rest it is
then ``profila`` to the bit. The following readings of the code are not defaults here (docs/profila.md explains them):

- ``centre_of: all``: the mean and the first term include the whole batch.
- ``align: smoothed``: u(m) is aligned, so a twentieth of the gradient remains.
- ``first_round: 0`` and ``ramp``: the code counts rounds from 0, and lambda also rises within a round.
- ``temperature: 2`` and ``history: 5``: the code divides A_k by 2 and averages it over five rounds.
- ``steer: test``: the code computes A_k on test data.

``schedule: literal`` is equation 5 as printed. ``task: compact`` replaces the first term by the objective's own loss.

With ``anomalous_share: 0``, ``task: compact``, ``lam: [0, 0]``, ``prototype_momentum: 1`` and ``steer: off`` it is FedPer. With
``personal: []`` too it is FedAvg.

Earlier versions had these options in ``profila``, and anomalous clips with ``mode: as_run``. Their configurations are read as
this method's.

    raydfl run jobs/tiny.yaml run.name=as_run train.rounds=1 models.model=film_cnn_tiny \
      objective='{name: compact, size: 8}' \
      method='{name: profila_as_run, anomalous_share: 0, schedule: literal}'
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
from raydfl.core.options import OURS, PAPER, RELEASE
from raydfl.core.types import Batch, Metrics, Update
from raydfl.data import Examples
from raydfl.methods.profila import LAMBDA, ProFiLA, Share, Weight, pool_epochs, update_prototype
from raydfl.training import Plan, Step

NORMAL, ANOMALOUS = "normal", "anomalous"
"""The pools of a batch."""

_LARGE = 1e9
"""Replacement of infinity in masked logits, where infinity gives NaN for an example without pairs."""


@dataclass(frozen=True, kw_only=True)
class ProFiLAAsRun(ProFiLA):
    """ProFiLA with the readings of its code as options, and with anomalous clips in training."""

    task: Annotated[
        Literal["prototype", "compact"],
        Field(
            description="Target of normal clips. prototype: the client's prototype mixed with the batch's mean, as in the code. "
            "compact: the batch's mean, the objective's own loss."
        ),
        RELEASE,
    ] = "prototype"
    schedule: Annotated[
        Literal["rising", "literal", "constant"],
        Field(
            description="Weight of the alignment after the warm-up, as a fraction of its last value. rising: from 0.8 to 1, as in "
            "the code. literal: from 1 to 0.8, as in equation 5. constant: 1."
        ),
        RELEASE,
    ] = "rising"
    first_round: Annotated[
        int, Field(ge=0, le=1, description="Number of the first round. 1: the paper's. 0: the code's."), PAPER
    ] = 1
    ramp: Annotated[
        bool, Field(description="Raise the weight within each round too, from 1 / epochs to 1, as in the code."), PAPER
    ] = False
    align: Annotated[
        Literal["batch", "smoothed"],
        Field(
            description="Vector aligned with the common prototype. batch: the batch's mean. smoothed: mixed with the client's "
            "prototype."
        ),
        OURS,
    ] = "batch"
    temperature: Annotated[
        float, Field(gt=0, description="Divisor of the performance in equation 4. The code: 2."), PAPER
    ] = 1.0
    history: Annotated[int, Field(ge=1, description="Rounds in a client's mean performance. The code: 5."), PAPER] = 1
    auc_threshold: Annotated[Share, Field(description="Raise learning rates below this performance."), PAPER] = 0.7
    eta: Annotated[float, Field(ge=1, description="Factor of a raised learning rate."), RELEASE] = 1.2
    shrink: Annotated[
        float, Field(gt=0, le=1, description="Factor of the learning rate after a best performance."), PAPER
    ] = 0.99
    steer: Annotated[
        Literal["validation", "test", "off"],
        Field(
            description="Clips of the performance measure. validation: the client's validation clips. test: its test clips, a leak "
            "of the code. off: no measure."
        ),
        OURS,
    ] = "validation"
    anomalous_share: Annotated[
        float,
        Field(ge=0, lt=1, description="Fraction of anomalous clips in a batch, rounded. 0: only normal clips."),
        RELEASE,
    ] = 0.25
    centre_of: Annotated[
        Literal["normal", "all"],
        Field(description="Clips in the batch's mean and in the first term. The code: all."),
        OURS,
    ] = "normal"
    push: Annotated[
        tuple[Weight, Weight],
        Field(description="Weights of the push from the prototype and from the normal centre."),
        RELEASE,
    ] = (1.0, 0.5)
    margin: Annotated[
        tuple[Weight, Weight],
        Field(description="Margins of both pushes, distances between 0 and 2. 0 disables a push."),
        RELEASE,
    ] = (1.0, 0.8)
    contrast: Annotated[
        Weight, Field(description="Weight of the supervised contrastive loss. 0 disables it."), RELEASE
    ] = 1.0
    contrast_temperature: Annotated[float, Field(gt=0, description="Divisor of its similarities."), RELEASE] = 0.2

    @property
    def needs(self) -> Needs:
        """Require both pools, and a batch with room for both."""
        if not self.anomalous_share:
            return super().needs
        return dataclasses.replace(super().needs, pools=(NORMAL, ANOMALOUS), batch_size=2)

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return ProFiLA's loss by the configured readings, plus the terms of anomalous clips."""
        network, objective = cast(Any, step.models["model"]), cast(Any, self.objective)
        z = F.normalize(step.forward("model", batch), dim=1)
        anomalous = batch.columns["pool"] if self.anomalous_share else None
        normal = batch if anomalous is None or self.centre_of == "all" else _select(batch, anomalous == 0)
        prototype = self.get_prototype(network)
        if self.task == "prototype":
            mean = update_prototype(network.own_prototype, z, normal, objective.momentum)
        else:
            means = objective.follow(network.objective, z, normal)
            mean = means[0]
        smoothed = F.normalize(self.memory * prototype + (1 - self.memory) * mean, dim=0)
        targets = smoothed.expand_as(z) if self.task == "prototype" else means
        value: Tensor = objective.distance(z, targets, normal)
        if self.aligns:
            near = smoothed if self.align == "smoothed" else F.normalize(mean, dim=0)
            value = value + step.state[LAMBDA] * (near - F.normalize(network.prototype, dim=0)).square().sum()
        return value if anomalous is None else value + self._push(z, smoothed, batch, anomalous)

    def _push(self, z: Tensor, prototype: Tensor, batch: Batch, anomalous: Tensor) -> Tensor:
        """Return the terms that push anomalous clips away, a scalar."""
        pushed = _select(batch, anomalous == 1)
        normal = cast(Tensor, _select(batch, anomalous == 0).weight)
        normal_centre = F.normalize((normal[:, None] * z).sum(dim=0) / normal.sum().clamp_min(1.0), dim=0)
        value = z.new_zeros(())
        for weight, margin, centre in zip(self.push, self.margin, (prototype, normal_centre), strict=True):
            # The offset keeps the gradient of the root finite at 0.
            distances = ((z - centre).square().sum(dim=1) + 1e-12).sqrt()
            value = value + weight * pushed.mean((margin - distances).relu().square())
        if self.contrast:
            value = value + self.contrast * _compute_contrast(z, anomalous, batch, self.contrast_temperature)
        return value

    def compute_weight(self, round_index: int, progress: float = 1.0) -> float:
        """Return the weight of the alignment by the configured reading of equation 5."""
        curves = {"rising": lambda angle: 1 - math.cos(angle), "literal": math.cos, "constant": lambda angle: 1.0}
        weight = self.follow_curve(round_index + self.first_round, curves[self.schedule])
        return weight * progress if self.ramp else weight

    def train(self, step: Step, rate: float | None) -> Metrics:
        """Train for all epochs, with ``task: compact`` without updates of the prototype."""
        if self.task == "prototype":
            return super().train(step, rate)
        epochs = range(step.training.local_epochs) if self.ramp and self.aligns else (None,)
        return pool_epochs([self.train_epoch(step, epoch, rate) for epoch in epochs])

    def plan_batches(self, step: Step) -> Plan | None:
        """Return batches of both pools. The epoch ends with the shorter pool."""
        if not self.anomalous_share:
            return None
        size = step.training.batch_size
        anomalous = min(size - 1, max(1, round(self.anomalous_share * size)))
        rows = {NORMAL: size - anomalous, ANOMALOUS: anomalous}
        steps = [len(step.data.pools[name]) // count for name, count in rows.items() if len(step.data.pools[name])]
        return Plan(rows, steps=max(1, min(steps, default=1)))

    def get_prototype(self, network: Any) -> Tensor:
        """Return the client's prototype, with ``task: compact`` the direction of the objective's running mean."""
        return (
            super().get_prototype(network)
            if self.task == "prototype"
            else F.normalize(network.objective.sums[0], dim=0)
        )

    @property
    def steers(self) -> bool:
        """True if detection performance affects the training and is measured."""
        return self.steer != "off" and super().steers

    def select_clips(self, step: Step) -> Examples:
        """Return the test or validation clips, by ``steer``."""
        return step.data.test if self.steer == "test" else step.data.validation

    def read_performance(self, update: Update, extra: dict[str, Any]) -> float | None:
        """Return a client's mean performance over its last rounds, stored in ``extra``."""
        current = super().read_performance(update, extra)
        if self.history == 1:
            return current
        histories = extra.get("performance", {})
        history = [*histories.get(update.client_id, ()), *([] if current is None else [current])][-self.history :]
        extra["performance"] = {**histories, update.client_id: history} if history else histories
        return float(np.mean(history)) if history else None


def _select(batch: Batch, mask: Tensor) -> Batch:
    """Return a batch with weight 0 outside a mask, bool [batch]."""
    weight = mask.float() if batch.weight is None else mask.float() * batch.weight
    return dataclasses.replace(batch, weight=weight)


def _compute_contrast(z: Tensor, kind: Tensor, batch: Batch, temperature: float) -> Tensor:
    """Return the supervised contrastive loss, a scalar. It is a mean over the examples with a second example of their kind.

    Args:
        z: Outputs of length 1, float32 [batch, size].
        kind: Classes, int64 [batch].
        batch: The examples' weights.
        temperature: Divisor of the similarities.
    """
    counts = torch.ones_like(z[:, 0]) if batch.weight is None else batch.weight
    pairs = (1 - torch.eye(len(z), device=z.device)) * counts[:, None] * counts[None, :]
    similarity = z @ z.T / temperature
    logs = similarity - torch.where(pairs > 0, similarity, -_LARGE).logsumexp(dim=1, keepdim=True)
    positive_pairs = pairs * (kind[:, None] == kind[None, :])
    positives = positive_pairs.sum(dim=1)
    losses = -(positive_pairs * logs).sum(dim=1) / positives.clamp_min(1.0)
    anchors = (positives > 0).float()
    return (losses * anchors).sum() / anchors.sum().clamp_min(1.0)
