"""ProFiLA: machines' normal clips are drawn to a prototype of each client, and these to a common one, which conditions the network.

Fed-ProFiLA-AD, a method for anomalous sounds of machines, equations 4 to 6. Client k keeps its adapter, its projection and its
prototype mu_k to itself; the server has all else and the common prototype mu. z is what the network gives for a clip, scaled to
length 1; u(x) is x scaled to length 1. A round t = 1, 2, ... of E local epochs:

    (5)  lambda = l0 + (l1 - l0) t / Tw                     as long as t <= Tw; p = (t - Tw) / (T - Tw)
         lambda = l1 (0.8 + 0.2 (1 - cos(pi p / 2)))        after that
    (6)  lr_k <- eta lr_k, at most lr_max, where A_k < 0.7; else 0.99 lr_k, at least lr_min, and best_k <- A_k where
         A_k > best_k, which begins as the first A_k;       eta = 1.2
         mu_k = u(mean of z over the training clips), before each epoch, then s mu_k + (1 - s) of it; running within an epoch
         m = memory mu_k + (1 - memory) b                   b: the batch's mean of z
         loss = mean of ||z - u(m)||^2 + lambda ||u(b) - u(mu)||^2
    (4)  w_k = alpha n_k / sum n + beta exp(A_k) / sum exp(A)
         theta <- sum w_k theta_k,    mu <- u(r mu + (1 - r) u(sum w_k mu_k))

A_k is the area under the ROC curve on clips that client k holds out for validation. Where it holds out no anomalous ones it has
none: its learning rate stays, and it counts as the mean of the others does; where nobody has any, (4) is FedAvg's weights.

Readings. The paper leaves the first term of the loss open, and the authors' code differs from the paper. docs/profila.md has the
reasons; :mod:`raydfl.methods.profila_as_run` has the other readings as options:

- The first term is the code's. The batch's mean is aligned, with its whole gradient.
- Lambda rises after the warm-up, as in the code; the printed equation 5 falls.
- A_k never comes from test data, as in the code. Weights add up to 1.

Deviations: the adapters are private (in the code all clients share one object); clients are measured after the aggregation;
networks train in training mode in each epoch. The running mean within an epoch has the ``momentum`` of ``compact``, 0.9. With
``train.optimiser.keep`` false, the optimiser begins anew in each epoch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, cast

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
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, ModelSpec, Ratio, Scores, State, Update
from raydfl.data import Examples
from raydfl.methods._method import Method, UpdateCounter
from raydfl.training import Plan, Step, fit, predict

PROTOTYPE = "model/prototype"
"""The common prototype, a buffer of the network; what clients send under this name is theirs."""

LAMBDA = "lambda"
_RATE, _BEST, _AUC = "rate", "best", "auc"
_PERSONAL = ("model/adapter", "model/output", "model/objective")
_PROTOTYPE_SPREAD = 0.1

Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class ProFiLA(Method):
    """Prototypes, private adapters, and weights and learning rates by what clients detect."""

    revision: ClassVar[int] = 2  # In the first, sums that were weighted by full batches kept the client's prototype.

    tensor_options: ClassVar[tuple[str, ...]] = ("personal",)

    models: ClassVar[Mapping[str, str]] = {"model": "film_cnn"}

    # Equations 4 and 6. Without annotations, because they are no options of this method.
    temperature, auc_threshold, eta, shrink = 1.0, 0.7, 1.2, 0.99

    personal: Annotated[
        tuple[str, ...] | None,
        Field(
            description="beginnings of the names of personal tensors; null: model/adapter, model/output (the projection) and "
            "model/objective (the client's centre), as far as there are such; empty: all is shared"
        ),
    ] = None
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
    prototype_momentum: Annotated[
        Share,
        Field(description="share of the common prototype that stays in a round; 1: it never moves; the code: 0.7"),
    ] = 0.7
    alpha: Annotated[Weight, Field(description="weight of a client's share of the clips (equation 4)")] = 0.5
    beta: Annotated[
        Weight, Field(description="weight of a client's share of the performance (equation 4); 0: FedAvg's weights")
    ] = 0.5
    adaptive_lr: Annotated[bool, Field(description="learning rates by performance (equation 6)")] = True
    lr_min: Annotated[float, Field(gt=0, description="the lowest learning rate that it is lowered to")] = 1e-5
    lr_max: Annotated[float, Field(gt=0, description="the highest learning rate that it is raised to")] = 1e-3

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.alpha + self.beta == 0:
            raise ConfigError("method.alpha and method.beta are both 0, so that no client counts; raise one of them")
        if self.lr_min > self.lr_max:
            raise ConfigError(f"method.lr_min {self.lr_min} is above method.lr_max {self.lr_max}; swap them")
        return self

    @property
    def needs(self) -> Needs:
        """The objective ``compact``."""
        return Needs(objectives=("compact",))

    def shared(self, name: str) -> bool:
        """Share all but the personal tensors."""
        return not name.startswith(_PERSONAL if self.personal is None else self.personal)

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build the network; one that knows no prototype gets one as a buffer, and is not conditioned on it."""
        built = super().build(models)
        add_prototype(built["model"], next(spec.width for spec in models if spec.name == "model"))
        return built

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """FedAvg's state without the personal tensors.

        Raises:
            ConfigError: the common prototype is personal, or there are several centres.
        """
        if not self.shared(PROTOTYPE):
            raise ConfigError(f"method.personal: {PROTOTYPE} is the common prototype and must be shared; leave it out")
        if getattr(self.objective, "by", "all") != "all":
            raise ConfigError("profila has one prototype a client, and objective.by is class; set objective.by=all")
        return super().init(clients, models, rng)

    # -- at the client -------------------------------------------------------------------------------------------------

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the distance from the client's prototype, and the alignment."""
        network, objective = cast(Any, step.models["model"]), cast(Any, self.objective)
        z = F.normalize(step.forward("model", batch), dim=1)
        own = self.prototype(network)
        mean = follow(network.own_prototype, z, batch, objective.momentum)
        smoothed = F.normalize(self.memory * own + (1 - self.memory) * mean, dim=0)
        value: Tensor = objective.distance(z, smoothed.expand_as(z), batch)
        if self.aligns:
            near, common = F.normalize(mean, dim=0), F.normalize(network.prototype, dim=0)
            value = value + step.state[LAMBDA] * (near - common).square().sum()
        return value

    @property
    def aligns(self) -> bool:
        """True where the alignment has any weight."""
        return max(self.lam) > 0

    def weight_in(self, round_index: int, done: float = 1.0) -> float:
        """Return the weight of the alignment (equation 5).

        Args:
            round_index: rounds completed before this one.
            done: share of the round's epochs, with the current one. The paper's weight does not depend on it.
        """
        return self.weight_at(round_index + 1, lambda angle: 1 - math.cos(angle))

    def weight_at(self, t: int, curve: Callable[[float], float]) -> float:
        """Return the weight in round ``t``, with a curve after the warm-up from an angle, 0 to pi / 2, to 0..1."""
        first, last = self.lam
        warm = self.warm_rounds
        if t <= warm:
            return first + (last - first) * t / max(1, warm)
        angle = math.pi / 2 * min(1.0, (t - warm) / max(1, self.total_rounds - warm))
        return last * (0.8 + 0.2 * curve(angle))

    def local(self, step: Step) -> Update:
        """Train, send what is shared with the client's prototype, and measure what it detects."""
        metrics = self.train(step, self._rate(step))
        step.state.pop(LAMBDA, None)
        tensors = {name: value for name, value in step.floating_state().items() if self.shared(name)}
        if self.prototype_momentum < 1:
            tensors[PROTOTYPE] = self.prototype(step.models["model"])
        performance = self._performance(step)
        if performance is not None:
            step.state[_AUC] = torch.tensor(performance, dtype=torch.float32)
            step.state.setdefault(_BEST, step.state[_AUC].clone())
        known = Ratio(0.0, 0) if performance is None else Ratio(performance, 1)
        return step.update({**metrics, **({"performance": known} if self.steers else {})}, tensors=tensors)

    def train(self, step: Step, rate: float | None) -> Metrics:
        """Train for all epochs, each after a renewal of the client's prototype."""
        network, found = cast(Any, step.models["model"]), list[Metrics]()
        for epoch in range(step.training.local_epochs):
            self._renew(step, first=epoch == 0)
            found.append(self.train_epoch(step, epoch, rate))
        # The objective scores clips by their distance to the prototype.
        network.objective.sums.copy_(network.own_prototype)
        network.objective.counts.fill_(1.0)
        return pool_epochs(found)

    def train_epoch(self, step: Step, epoch: int | None, rate: float | None) -> Metrics:
        """Train for one epoch; ``None``: for all of them at once."""
        if self.aligns:
            weight = self.weight_in(step.round_index, ((epoch or 0) + 1) / step.training.local_epochs)
            step.state[LAMBDA] = torch.tensor(weight, dtype=torch.float32, device=step.device)
        return fit(step, self.loss, epochs=None if epoch is None else 1, batches=self.plan_batches(step), lr=rate)

    def plan_batches(self, step: Step) -> Plan | None:
        """Return the pools of a batch; ``None``: the training clips."""
        return None

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
            mean = F.normalize(self.renewal * self.prototype(network) + (1 - self.renewal) * mean, dim=0)
        network.own_prototype.copy_(mean)

    def prototype(self, network: Any) -> Tensor:
        """Return the client's prototype, of length 1: float32 [size]."""
        return F.normalize(network.own_prototype, dim=0)

    @property
    def steers(self) -> bool:
        """True where what clients detect is measured, because something depends on it."""
        return self.beta > 0 or self.adaptive_lr

    def steering_clips(self, step: Step) -> Examples:
        """Return the clips that the client's performance is measured on."""
        return step.data.validation

    def _performance(self, step: Step) -> float | None:
        """Return A_k of the model as it is now; ``None``: it cannot be told."""
        if not self.steers or not len(examples := self.steering_clips(step)):
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
        arriving = UpdateCounter(self._weighted(updates, extra) if self.beta and self.steers else updates)
        averaged, report = super().aggregate(state, arriving, rng)
        tensors = dict(averaged.tensors["global"])
        if arriving.senders[PROTOTYPE] and self.prototype_momentum < 1:
            old, new = state.tensors["global"][PROTOTYPE], F.normalize(tensors[PROTOTYPE], dim=0)
            tensors[PROTOTYPE] = F.normalize(self.prototype_momentum * old + (1 - self.prototype_momentum) * new, dim=0)
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": tensors}, extra=extra), report

    def _weighted(self, updates: Iterable[Update], extra: dict[str, Any]) -> Iterable[Update]:
        """Yield updates with the weights of equation 4."""
        spool, clips, performance = Spool(), list[float](), list[float | None]()
        for update in updates:
            spool.add(update)
            clips.append(float(cast(float, update.weight)))
            performance.append(self.performance_of(update, extra))
        known = [each for each in performance if each is not None]
        if not known:
            yield from spool
            return
        mean = sum(known) / len(known)
        grown = [math.exp((mean if each is None else each) / self.temperature) for each in performance]
        for update, count, share in zip(spool, clips, grown, strict=True):
            weight = self.alpha * count / max(1.0, sum(clips)) + self.beta * share / sum(grown)
            yield dataclasses.replace(update, weight=weight)

    def performance_of(self, update: Update, extra: dict[str, Any]) -> float | None:
        """Return a client's performance in this round; ``None``: it is not known. ``extra`` is the next state's."""
        now = cast(Ratio, update.metrics.get("performance", Ratio(0.0, 0)))
        return now.value if now.count else None


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
    if hasattr(network, "own_prototype"):
        raise ConfigError(
            f"models.model: {type(network).__name__} has an attribute 'own_prototype', under which ProFiLA adds a tensor of its "
            f"own; rename it"
        )
    network.register_buffer("own_prototype", torch.zeros(size), persistent=False)


def follow(prototype: Tensor, z: Tensor, batch: Batch, momentum: float) -> Tensor:
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


def pool_epochs(found: Sequence[Metrics]) -> Metrics:
    """Return the metrics of several calls of ``fit`` as those of one."""
    return {**pool(found), "steps": Ratio(sum(cast(Ratio, metrics["steps"]).total for metrics in found), 1)}
