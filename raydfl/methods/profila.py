"""ProFiLA: machines' normal clips are drawn to a prototype of each client, and these to a common one, which conditions the network.

Fed-ProFiLA-AD, a method for anomalous sounds of machines, equations 4 to 6. Client k keeps its adapter, its projection and its
prototype mu_k to itself; the server has all else and the common prototype mu. z is what the network gives for a clip, scaled to
length 1; u(x) is x scaled to length 1. A round t = 1, 2, ... of E local epochs:

    (5)  lambda = l0 + (l1 - l0) t / Tw                               as long as t <= Tw; p = (t - Tw) / (T - Tw)
         lambda = l1 (0.8 + 0.2 (1 - cos(pi p / 2)))                  after that, rising (the code); as printed, falling:
         lambda = l1 (0.8 + 0.2 cos(pi p / 2))
    (6)  lr_k <- eta lr_k, at most lr_max, where A_k < threshold; else shrink lr_k, at least lr_min, and best_k <- A_k where
         A_k > best_k, which begins as the first A_k
         mu_k = u(mean of z over the training clips), before each epoch, then s mu_k + (1 - s) of it; running within an epoch
         m = memory mu_k + (1 - memory) b                             b: the batch's mean of z
         loss = mean of ||z - u(m)||^2 + lambda ||u(b) - u(mu)||^2
    (4)  w_k = alpha n_k / sum n + beta exp(A_k / temperature) / sum exp(A / temperature)
         theta <- sum w_k theta_k,    mu <- u(r mu + (1 - r) u(sum w_k mu_k))

A_k is the area under the ROC curve on clips that client k holds out. Where it holds out no anomalous ones it has none: its learning
rate stays, and it counts as the mean of the others does; where nobody has any, (4) is FedAvg's weights. So ``mode: normal`` learns
of normal clips alone unless somebody asks for more.

``mode: as_run`` is what the authors' code does besides, which the paper does not say: batches with anomalous clips, of the pools
``normal`` and ``anomalous``, three terms that keep these away, and the whole batch in the mean and in the first term
(``centre_of: all``):

    push_away   mean of relu(1 - ||z - u(m)||)^2 over the anomalous, and from the batch's normal centre with the margin 0.8
    contrast    the supervised contrastive loss of two classes (P. Khosla and others, NeurIPS 2020, equation 2)

Readings, each a field; docs/profila.md says why:

- ``task``: the paper does not define the first term. ``prototype`` is the code's; ``compact`` is the objective's own.
- ``align``: the code takes u(m) for u(b), so that a twentieth of the gradient is left.
- ``schedule``, ``first_round`` and ``ramp``: see (5); the code counts rounds from 0, and lambda rises within a round as well.
- ``temperature`` and ``history``: the code divides by 2 and takes the mean of five rounds. Weights always add up to 1.
- ``steer``: the code's A_k is of the test data.

Deviations: the adapters are private (in the code all clients share one object); clients are measured after the aggregation;
networks train in training mode in each epoch. The running mean within an epoch is that of ``compact``, with its ``momentum``, 0.9.
With ``train.optimiser.keep`` false, the optimiser begins anew in each epoch where the prototype is renewed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.metrics import pool, ranking_metrics
from raydfl.core.needs import Needs
from raydfl.core.spool import Spool
from raydfl.core.types import Batch, Client, Metrics, ModelSpec, Ratio, Scores, State, Update
from raydfl.methods._layers import check_prefixes
from raydfl.methods._method import Counted, Method
from raydfl.training import Plan, Step, fit, predict

PROTOTYPE = "model/prototype"
"""The common prototype, a buffer of the network; what clients send under this name is theirs."""

NORMAL, ANOMALOUS = "normal", "anomalous"
"""The pools of ``mode: as_run``."""

_LAMBDA = "lambda"
_RATE, _BEST, _AUC = "rate", "best", "auc"

_PERSONAL = ("model/adapter", "model/output", "model/objective")
_PROTOTYPE_SPREAD = 0.1
_LARGE = 1e9

Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class ProFiLA(Method):
    """Prototypes, private adapters, and weights and learning rates by what clients detect."""

    pure: ClassVar[bool] = True

    models: ClassVar[Mapping[str, str]] = {"model": "film_cnn"}

    mode: Annotated[
        Literal["normal", "as_run"],
        Field(description="normal: normal clips alone; as_run: the code's, with anomalous clips and three more terms"),
    ] = "normal"
    personal: Annotated[
        tuple[str, ...] | None,
        Field(
            description="beginnings of the names of personal tensors; null: model/adapter, model/output (the projection) and "
            "model/objective (the client's centre), as far as there are such; empty: all is shared"
        ),
    ] = None
    task: Annotated[
        Literal["prototype", "compact"],
        Field(
            description="what clips are drawn to: the client's prototype with some of the batch's mean (the code's), or the "
            "batch's mean, which is the objective's own loss"
        ),
    ] = "prototype"
    memory: Annotated[
        Share, Field(description="share of the client's prototype in what clips are drawn to; the rest is the batch's")
    ] = 0.95
    renewal: Annotated[
        Share, Field(description="share of the former prototype that stays when it is renewed before an epoch")
    ] = 0.8
    lam: Annotated[
        tuple[Weight, Weight],
        Field(description="weight of the alignment at the beginning and after the warm-up; [0, 0]: no alignment"),
    ] = (0.001, 0.01)
    warm_rounds: Annotated[int, Field(ge=0, description="rounds of the warm-up")] = 5
    total_rounds: Annotated[
        int, Field(ge=1, description="rounds until the weight has its last value; it stays there")
    ] = 100
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
    prototype_momentum: Annotated[
        Share,
        Field(description="share of the common prototype that stays in a round; 1: it never moves; the code: 0.7"),
    ] = 0.7
    alpha: Annotated[Weight, Field(description="weight of a client's share of the clips (equation 4)")] = 0.5
    beta: Annotated[
        Weight, Field(description="weight of a client's share of the performance (equation 4); 0: FedAvg's weights")
    ] = 0.5
    temperature: Annotated[float, Field(gt=0, description="what performance is divided by; the code: 2")] = 1.0
    history: Annotated[int, Field(ge=1, description="rounds whose mean is a client's performance; the code: 5")] = 1
    adaptive_lr: Annotated[bool, Field(description="learning rates by performance (equation 6)")] = True
    auc_threshold: Annotated[Share, Field(description="performance below which a learning rate is raised")] = 0.7
    eta: Annotated[float, Field(ge=1, description="what a learning rate is raised by")] = 1.2
    shrink: Annotated[float, Field(gt=0, le=1, description="what it is lowered by after a best performance")] = 0.99
    lr_min: Annotated[float, Field(gt=0, description="the lowest learning rate that it is lowered to")] = 1e-5
    lr_max: Annotated[float, Field(gt=0, description="the highest learning rate that it is raised to")] = 1e-3
    steer: Annotated[
        Literal["validation", "test", "off"],
        Field(
            description="a client's clips that its performance is measured on: its validation; its test, as the code does, which "
            "leaks; or none"
        ),
    ] = "validation"
    centre_of: Annotated[
        Literal["normal", "all"],
        Field(description="as_run: clips that make the batch's mean and are drawn to it; the code: all of the batch"),
    ] = "normal"
    anomalous_share: Annotated[
        float, Field(gt=0, lt=1, description="as_run: share of a batch that is anomalous, rounded")
    ] = 0.25
    push: Annotated[
        tuple[Weight, Weight],
        Field(description="as_run: weights of pushing anomalous clips from the prototype, and from the normal centre"),
    ] = (1.0, 0.5)
    margin: Annotated[
        tuple[Weight, Weight], Field(description="as_run: distances up to which they are pushed, at most 2")
    ] = (1.0, 0.8)
    contrast: Annotated[Weight, Field(description="as_run: weight of the supervised contrastive loss")] = 1.0
    contrast_temperature: Annotated[float, Field(gt=0, description="as_run: what its similarities are divided by")] = (
        0.2
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.alpha + self.beta == 0:
            raise ConfigError("method.alpha and method.beta are both 0, so that no client counts; raise one of them")
        if self.lr_min > self.lr_max:
            raise ConfigError(f"method.lr_min {self.lr_min} is above method.lr_max {self.lr_max}; swap them")
        return self

    def needs(self) -> Needs:
        """Need the objective ``compact``, and with ``mode: as_run`` both pools and room for both in a batch."""
        both = self.mode == "as_run"
        return dataclasses.replace(
            super().needs(),
            objectives=("compact",),
            pools=(NORMAL, ANOMALOUS) if both else (),
            batch_size=2 if both else 1,
        )

    def shared(self, name: str) -> bool:
        """Share all but the personal tensors."""
        return not name.startswith(_PERSONAL if self.personal is None else self.personal)

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build the network; one that knows no prototype gets one as a buffer, and is not conditioned on it."""
        built = super().build(models)
        add_prototype(built["model"], next(spec.width for spec in models if spec.name == "model"))
        return built

    def init(
        self, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]], rng: np.random.Generator
    ) -> State:
        """FedAvg's state without the personal tensors.

        Raises:
            ConfigError: an entry of ``personal`` names no tensor; the common prototype is among them; or there are several centres.
        """
        check_prefixes(models, self.personal or (), "method.personal")
        if not self.shared(PROTOTYPE):
            raise ConfigError(f"method.personal: {PROTOTYPE} is the common prototype and must be shared; leave it out")
        if getattr(self.objective, "by", "all") != "all":
            raise ConfigError("profila has one prototype a client, and objective.by is class; set objective.by=all")
        return super().init(clients, models, rng)

    # -- at the client -------------------------------------------------------------------------------------------------

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the distance from the client's prototype, the alignment, and with ``as_run`` the terms of anomalous clips."""
        network, objective = cast(Any, step.models["model"]), cast(Any, self.objective)
        z = F.normalize(step.forward("model", batch), dim=1)
        anomalous = batch.columns["pool"] if self.mode == "as_run" else None
        learnt = batch if anomalous is None or self.centre_of == "all" else _only(batch, anomalous == 0)
        own = self._prototype(network)
        if self.task == "prototype":
            mean = _follow(network.own_prototype, z, learnt, objective.momentum)
        else:
            mean = objective.follow(network.objective, z, learnt)[0]
        smoothed = F.normalize(self.memory * own + (1 - self.memory) * mean, dim=0)
        target = smoothed if self.task == "prototype" else mean
        value: Tensor = objective.distance(z, target.expand_as(z), learnt)
        if self.aligns:
            near = smoothed if self.align == "smoothed" else F.normalize(mean, dim=0)
            value = value + step.state[_LAMBDA] * (near - F.normalize(network.prototype, dim=0)).square().sum()
        if anomalous is not None:
            value = value + self._apart(z, smoothed, batch, anomalous)
        return value

    def _apart(self, z: Tensor, prototype: Tensor, batch: Batch, anomalous: Tensor) -> Tensor:
        """Return the terms that keep anomalous clips away: a scalar."""
        strange, usual = _only(batch, anomalous == 1), _only(batch, anomalous == 0)
        usual_weight = cast(Tensor, usual.weight)
        normal_centre = F.normalize((usual_weight[:, None] * z).sum(dim=0) / usual_weight.sum().clamp_min(1.0), dim=0)
        value = z.new_zeros(())
        for weight, margin, place in zip(self.push, self.margin, (prototype, normal_centre), strict=True):
            away = ((z - place).square().sum(dim=1) + 1e-12).sqrt()
            value = value + weight * strange.mean((margin - away).relu().square())
        if self.contrast:
            value = value + self.contrast * _contrast(z, anomalous, batch, self.contrast_temperature)
        return value

    @property
    def aligns(self) -> bool:
        """True where the alignment has any weight."""
        return max(self.lam) > 0

    def weight_in(self, round_index: int) -> float:
        """Return the weight of the alignment in a round (equation 5).

        Args:
            round_index: rounds completed before it.
        """
        first, last = self.lam
        t, warm = round_index + self.first_round, self.warm_rounds
        if t <= warm:
            return first + (last - first) * t / max(1, warm)
        angle = math.pi / 2 * min(1.0, (t - warm) / max(1, self.total_rounds - warm))
        share = {"rising": 1 - math.cos(angle), "literal": math.cos(angle), "constant": 1.0}[self.schedule]
        return last * (0.8 + 0.2 * share)

    def local(self, step: Step) -> Update:
        """Train, send what is shared with the client's prototype, and measure what it detects."""
        rate = self._rate(step)
        metrics = self._train(step, rate)
        tensors = {name: value for name, value in step.floating_state().items() if self.shared(name)}
        if self.prototype_momentum < 1:
            tensors[PROTOTYPE] = self._prototype(step.models["model"])
        performance = self._performance(step)
        if performance is not None:
            step.state[_AUC] = torch.tensor(performance, dtype=torch.float32)
            step.state.setdefault(_BEST, step.state[_AUC].clone())
        known = Ratio(0.0, 0) if performance is None else Ratio(performance, 1)
        return step.update({**metrics, **({"performance": known} if self.steers else {})}, tensors=tensors)

    def _train(self, step: Step, rate: float | None) -> Metrics:
        """Train for all epochs; where the prototype is renewed or the weight rises, one after another."""
        epochs, renews = step.training.local_epochs, self.task == "prototype"
        parts = range(epochs) if renews or (self.ramp and self.aligns) else (None,)
        found: list[Metrics] = []
        for epoch in parts:
            if renews:
                self._renew(step, first=epoch == 0)
            if self.aligns:
                share = (cast(int, epoch) + 1) / epochs if self.ramp else 1.0
                weight = self.weight_in(step.round_index) * share
                step.state[_LAMBDA] = torch.tensor(weight, dtype=torch.float32, device=step.device)
            found.append(fit(step, self.loss, epochs=None if epoch is None else 1, batches=self._plan(step), lr=rate))
        step.state.pop(_LAMBDA, None)
        if renews:  # The objective scores clips by their distance to the prototype.
            network = cast(Any, step.models["model"])
            network.objective.sums.copy_(network.own_prototype)
            network.objective.counts.fill_(1.0)
        steps = sum(cast(Ratio, metrics["steps"]).total for metrics in found)
        return {**pool(found), "steps": Ratio(steps, 1)}

    def _plan(self, step: Step) -> Plan | None:
        """Return what batches are made of; the epoch ends where either pool would."""
        if self.mode == "normal":
            return None
        size = step.training.batch_size
        anomalous = min(size - 1, max(1, round(self.anomalous_share * size)))
        rows = {NORMAL: size - anomalous, ANOMALOUS: anomalous}
        steps = [len(step.data.pools[name]) // count for name, count in rows.items() if len(step.data.pools[name])]
        return Plan(rows, steps=max(1, min(steps, default=1)))

    def _renew(self, step: Step, first: bool) -> None:
        """Make the client's prototype the mean of its normal training clips, but for the first time in part."""
        network = cast(Any, step.models["model"])
        if first:
            network.own_prototype.zero_()  # The clients share one network, and each begins its own prototype anew.
        examples = cast(Any, self.objective).normal_examples(step.data.train)
        if not len(examples):
            return
        outputs = F.normalize(predict(step, "model", examples, step.training.batch_size), dim=1)
        mean = F.normalize(outputs.mean(dim=0), dim=0).to(step.device)
        if not first:
            mean = F.normalize(self.renewal * self._prototype(network) + (1 - self.renewal) * mean, dim=0)
        network.own_prototype.copy_(mean)

    def _prototype(self, network: Any) -> Tensor:
        """Return the client's prototype, of length 1: float32 [size]."""
        own = network.own_prototype if self.task == "prototype" else network.objective.sums[0]
        return F.normalize(own, dim=0)

    @property
    def steers(self) -> bool:
        """True where what clients detect is measured, because something depends on it."""
        return self.steer != "off" and (self.beta > 0 or self.adaptive_lr)

    def _performance(self, step: Step) -> float | None:
        """Return A_k of the model as it is now; ``None``: it cannot be told."""
        examples = step.data.test if self.steer == "test" else step.data.validation
        if not self.steers or not len(examples):
            return None
        found = self.objective.evaluate(step, "model", examples, step.training.batch_size)
        scores = found.get("scores")
        auc = ranking_metrics(scores, only=["auc"])["auc"] if isinstance(scores, Scores) else found.get("auc")
        return auc.value if isinstance(auc, Ratio) and auc.count and math.isfinite(auc.value) else None

    def _rate(self, step: Step) -> float | None:
        """Return this client's learning rate (equation 6), which it keeps; ``None``: the configured one."""
        if not self.adaptive_lr or not self.steers or _AUC not in step.state:
            return None
        settings = step.training.optimiser
        auc, best = float(step.state[_AUC]), float(step.state[_BEST])
        rate = float(
            step.state.get(_RATE, torch.tensor(settings.models.get("model", settings.lr), dtype=torch.float32))
        )
        if auc < self.auc_threshold:
            rate = max(rate, min(self.lr_max, self.eta * rate))
        elif auc > best:
            rate = min(rate, max(self.lr_min, self.shrink * rate))
            step.state[_BEST] = step.state[_AUC].clone()
        step.state[_RATE] = torch.tensor(rate, dtype=torch.float32)
        return rate

    # -- at the server -------------------------------------------------------------------------------------------------

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average by clips and performance (equation 4), and move the common prototype."""
        extra = dict(state.extra)
        arriving = Counted(self._weighted(updates, extra) if self.beta and self.steer != "off" else updates)
        averaged, report = super().aggregate(state, arriving, rng)
        tensors = dict(averaged.tensors["global"])
        if arriving.senders[PROTOTYPE] and self.prototype_momentum < 1:
            old, new = state.tensors["global"][PROTOTYPE], F.normalize(tensors[PROTOTYPE], dim=0)
            tensors[PROTOTYPE] = F.normalize(self.prototype_momentum * old + (1 - self.prototype_momentum) * new, dim=0)
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": tensors}, extra=extra), report

    def _weighted(self, updates: Iterable[Update], extra: dict[str, Any]) -> Iterable[Update]:
        """Yield updates with the weights of equation 4; ``extra`` keeps the clients' last performances."""
        if self.history > 1:
            extra["performance"] = dict(extra.get("performance", {}))  # the former state keeps its own
        spool, clips, performance = Spool(), list[float](), list[float | None]()
        for update in updates:
            spool.add(update)
            clips.append(float(cast(float, update.weight)))
            performance.append(self._mean_performance(update, extra))
        known = [each for each in performance if each is not None]
        if not known:
            yield from spool
            return
        mean = sum(known) / len(known)
        grown = [math.exp((mean if each is None else each) / self.temperature) for each in performance]
        for update, count, share in zip(spool, clips, grown, strict=True):
            weight = self.alpha * count / max(1.0, sum(clips)) + self.beta * share / sum(grown)
            yield dataclasses.replace(update, weight=weight)

    def _mean_performance(self, update: Update, extra: dict[str, Any]) -> float | None:
        """Return a client's mean performance over its last rounds; ``None``: it is not known."""
        now = cast(Ratio, update.metrics.get("performance", Ratio(0.0, 0)))
        if self.history == 1:
            return now.value if now.count else None
        of_clients = extra["performance"]
        kept = [*of_clients.get(update.client_id, ()), *([now.value] if now.count else [])][-self.history :]
        if not kept:
            return None
        of_clients[update.client_id] = kept
        return float(np.mean(kept))


def add_prototype(network: nn.Module, size: int) -> None:
    """Add the prototypes of length ``size``: the buffer ``prototype`` unless the network has it, and the client's own.

    The common prototype begins as 0.1 times normal numbers. The client's own is renewed in each round, so it is not kept.

    Raises:
        ConfigError: it has something else of that name, or one of another size.
    """
    there = getattr(network, "prototype", None)
    if there is None:
        network.register_buffer("prototype", _PROTOTYPE_SPREAD * torch.randn(size))
    elif not isinstance(there, Tensor) or there.shape != (size,):
        raise ConfigError(
            f"models.model: {type(network).__name__} has an attribute 'prototype' that is no tensor [{size}], as many numbers as "
            f"it gives; rename it, or make it one"
        )
    network.register_buffer("own_prototype", torch.zeros(size), persistent=False)


def _follow(prototype: Tensor, z: Tensor, batch: Batch, momentum: float) -> Tensor:
    """Move a client's prototype by 1 - momentum towards the mean of a batch in which a clip counts.

    Args:
        prototype: float32 [size], changed in place.
        z: float32 [batch, size], of length 1.
        batch: the examples of z with their weights.
        momentum: the remaining share of the prototype, 0 to 1.

    Returns:
        The mean of z with gradients, float32 [size].
    """
    weight = torch.ones_like(z[:, 0]) if batch.weight is None else batch.weight
    count = weight.sum()
    mean = (weight @ z) / count.clamp_min(1.0)
    with torch.no_grad():
        prototype.add_((1 - momentum) * (count > 0) * (mean - prototype))
    return mean


def _only(batch: Batch, which: Tensor) -> Batch:
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
