r"""ProFiLA: clients train normal clips towards their own prototype, aligned with a common prototype that conditions the network.

Fed-ProFiLA-AD, a method for anomalous machine sounds, equations 4 to 6. Client k keeps its adapter, its projection and its
prototype mu_k. The server has all other tensors and the common prototype mu. z is the network's output for a clip, scaled to
length 1. u(x) is x scaled to length 1. A round t = 1, 2, ... of E local epochs:

    (5)  lambda = l0 + (l1 - l0) t / Tw                     if t <= Tw
         lambda = l1 (0.8 + 0.2 (1 - cos(pi p / 2)))        otherwise, with p = (t - Tw) / (T - Tw)
    (6)  lr_k <- eta lr_k, at most lr_max, if A_k < 0.7;    eta = 1.2
         lr_k <- 0.99 lr_k, at least lr_min, and best_k <- A_k, if A_k >= 0.7 and A_k > best_k. best_k starts as the first A_k.
         mu_k = u(mean of z over the training clips) before the first epoch, updated by 1 - s before each later epoch, and
                a running mean within an epoch
         m = memory mu_k + (1 - memory) b                   b: the batch's mean of z
         loss = mean of ||z - u(m)||^2 + lambda ||u(b) - u(mu)||^2
    (4)  w_k = alpha n_k / sum n + beta exp(A_k) / sum exp(A)
         theta <- sum w_k theta_k,    mu <- u(r mu + (1 - r) u(sum w_k mu_k))

Options: ``lam`` is l0 and l1, ``warm_rounds`` Tw, ``total_rounds`` T, ``renewal`` s, ``prototype_momentum`` r.

A_k is the area under the ROC curve on client k's validation clips. It is undefined without anomalous clips. Then the client keeps
its learning rate, and (4) uses the mean of the defined A_k. If no client has an A_k, (4) uses FedAvg's weights.

Readings. The paper leaves the first term of the loss open, and the authors' code differs from the paper. docs/profila.md has
baselines and jobs. ``profila_as_run`` has the alternatives as options:

- The first term is the code's. The batch's mean is aligned, with its whole gradient.
- Lambda rises after the warm-up, as in the code. In the printed equation 5 it falls.
- A_k never uses test data, unlike in the code. Weights add up to 1.

Deviations: the adapters are private (in the code all clients share a single adapter). Clients are measured after the aggregation.
Networks train in training mode in each epoch. The running mean within an epoch has the ``momentum`` of ``compact``, 0.9. With
``train.optimiser.keep`` false, the optimiser restarts in each epoch.

The objective must be ``compact``, with one centre (``by: all``). The common prototype is a buffer of the network,
``model/prototype``. ``film_cnn`` is conditioned on it. Other networks gain a buffer without effect on their outputs. Each round
records ``performance``, the mean of the defined A_k.

    raydfl run jobs/tiny.yaml run.name=profila train.rounds=1 method=profila \
      models.model=film_cnn_tiny objective='{name: compact, size: 8}'
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
from raydfl.core.options import OURS, PAPER, RELEASE
from raydfl.core.spool import Spool
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, ModelSpec, Ratio, Scores, State, Update
from raydfl.data import Examples
from raydfl.methods._method import Method, UpdateCounter
from raydfl.training import Plan, Step, fit, predict

PROTOTYPE = "model/prototype"
"""The common prototype, a buffer of the network. Clients send their own prototypes under this name."""

LAMBDA = "lambda"
_RATE, _BEST, _AUC = "rate", "best", "auc"
_PERSONAL = ("model/adapter", "model/output", "model/objective")
_PROTOTYPE_SPREAD = 0.1

Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class ProFiLA(Method):
    """Prototypes and private adapters. Detection performance sets weights and learning rates."""

    reads_metrics: ClassVar[bool] = True
    revision: ClassVar[int] = 2  # Revision 1 accumulated the client's prototype in sums weighted by full batches.

    tensor_options: ClassVar[tuple[str, ...]] = ("personal",)

    models: ClassVar[Mapping[str, str]] = {"model": "film_cnn"}

    # Equations 4 and 6. An annotation would make them options of this method.
    temperature, auc_threshold, eta, shrink = 1.0, 0.7, 1.2, 0.99

    personal: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Name prefixes of personal tensors. null: model/adapter, model/output (the projection) and "
            "model/objective (the client's centre), if the model has them. Empty: all tensors are shared."
        ),
        OURS,
    ] = None
    memory: Annotated[
        Share,
        Field(
            description="Fraction of the client's prototype in the target of normal clips. The rest is the batch's mean."
        ),
        RELEASE,
    ] = 0.95
    renewal: Annotated[
        Share,
        Field(description="Fraction of the client's former prototype kept at each update between epochs."),
        RELEASE,
    ] = 0.8
    lam: Annotated[
        tuple[Weight, Weight],
        Field(description="Weight of the alignment before and after the warm-up. [0, 0] disables it."),
        PAPER,
    ] = (0.001, 0.01)
    warm_rounds: Annotated[int, Field(ge=0, description="Number of warm-up rounds."), PAPER] = 5
    total_rounds: Annotated[
        int, Field(ge=1, description="Rounds until the weight of the alignment reaches its last value."), PAPER
    ] = 100
    prototype_momentum: Annotated[
        Share,
        Field(description="Fraction of the common prototype kept in each round. 1: it never changes. The code: 0.7."),
        RELEASE,
    ] = 0.7
    alpha: Annotated[
        Weight, Field(description="Aggregation weight of a client's fraction of the clips (equation 4)."), PAPER
    ] = 0.5
    beta: Annotated[
        Weight,
        Field(description="Aggregation weight of a client's detection performance (equation 4). 0: FedAvg's weights."),
        RELEASE,
    ] = 0.5
    adaptive_lr: Annotated[
        bool, Field(description="Adapt learning rates to detection performance (equation 6)."), PAPER
    ] = True
    lr_min: Annotated[float, Field(gt=0, description="Lower limit of adapted learning rates."), RELEASE] = 1e-5
    lr_max: Annotated[float, Field(gt=0, description="Upper limit of adapted learning rates."), RELEASE] = 1e-3

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.alpha + self.beta == 0:
            raise ConfigError(
                "method.alpha and method.beta are both 0, so all clients have weight 0. Raise either of them."
            )
        if self.lr_min > self.lr_max:
            raise ConfigError(f"method.lr_min {self.lr_min} is above method.lr_max {self.lr_max}. Swap them.")
        return self

    @property
    def needs(self) -> Needs:
        """Requirements: the objective ``compact``."""
        return Needs(objectives=("compact",))

    def shared(self, name: str) -> bool:
        """Share all but the personal tensors."""
        return not name.startswith(_PERSONAL if self.personal is None else self.personal)

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build the network with prototypes. A network without a common prototype gets a buffer, but no conditioning."""
        built = super().build(models)
        add_prototype(built["model"], next(spec.width for spec in models if spec.name == "model"))
        return built

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state without the personal tensors.

        Raises:
            ConfigError: The common prototype is personal, or the objective has several centres.
        """
        if not self.shared(PROTOTYPE):
            raise ConfigError(f"method.personal: {PROTOTYPE} is the common prototype and must be shared. Remove it.")
        if getattr(self.objective, "by", "all") != "all":
            raise ConfigError("profila has one prototype per client, but objective.by is class. Set objective.by=all.")
        return super().init(clients, models, rng)

    # -- at the client -------------------------------------------------------------------------------------------------

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the distance to the client's prototype plus the alignment."""
        network, objective = cast(Any, step.models["model"]), cast(Any, self.objective)
        z = F.normalize(step.forward("model", batch), dim=1)
        prototype = self.get_prototype(network)
        mean = update_prototype(network.own_prototype, z, batch, objective.momentum)
        smoothed = F.normalize(self.memory * prototype + (1 - self.memory) * mean, dim=0)
        value: Tensor = objective.distance(z, smoothed.expand_as(z), batch)
        if self.aligns:
            near, common = F.normalize(mean, dim=0), F.normalize(network.prototype, dim=0)
            value = value + step.state[LAMBDA] * (near - common).square().sum()
        return value

    @property
    def aligns(self) -> bool:
        """True if the alignment has a weight."""
        return max(self.lam) > 0

    def compute_weight(self, round_index: int, progress: float = 1.0) -> float:
        """Return the weight of the alignment (equation 5).

        Args:
            round_index: Number of completed rounds.
            progress: Fraction of the round's epochs, with the current epoch. The paper's weight does not depend on it.
        """
        return self.follow_curve(round_index + 1, lambda angle: 1 - math.cos(angle))

    def follow_curve(self, t: int, curve: Callable[[float], float]) -> float:
        """Return the weight in round ``t``. After the warm-up the curve maps angles, 0 to pi / 2, to 0..1."""
        first, last = self.lam
        warm = self.warm_rounds
        if t <= warm:
            return first + (last - first) * t / max(1, warm)
        angle = math.pi / 2 * min(1.0, (t - warm) / max(1, self.total_rounds - warm))
        return last * (0.8 + 0.2 * curve(angle))

    def local(self, step: Step) -> Update:
        """Train, measure the detection performance, and send the shared tensors with the client's prototype."""
        metrics = self.train(step, self._adapt_rate(step))
        step.state.pop(LAMBDA, None)
        tensors = {name: value for name, value in step.floating_state().items() if self.shared(name)}
        if self.prototype_momentum < 1:
            tensors[PROTOTYPE] = self.get_prototype(step.models["model"])
        performance = self._measure_performance(step)
        if performance is not None:
            step.state[_AUC] = torch.tensor(performance, dtype=torch.float32)
            step.state.setdefault(_BEST, step.state[_AUC].clone())
        known = Ratio(0.0, 0) if performance is None else Ratio(performance, 1)
        return step.update({**metrics, **({"performance": known} if self.steers else {})}, tensors=tensors)

    def train(self, step: Step, rate: float | None) -> Metrics:
        """Train for all epochs, with an update of the client's prototype before each epoch."""
        network, metrics = cast(Any, step.models["model"]), list[Metrics]()
        for epoch in range(step.training.local_epochs):
            self._update_prototype(step, first=epoch == 0)
            metrics.append(self.train_epoch(step, epoch, rate))
        # The objective scores clips by their distance to its centre, here the prototype.
        network.objective.sums.copy_(network.own_prototype)
        network.objective.counts.fill_(1.0)
        return pool_epochs(metrics)

    def train_epoch(self, step: Step, epoch: int | None, rate: float | None) -> Metrics:
        """Train for an epoch. ``None``: for all epochs at once."""
        if self.aligns:
            weight = self.compute_weight(step.round_index, ((epoch or 0) + 1) / step.training.local_epochs)
            step.state[LAMBDA] = torch.tensor(weight, dtype=torch.float32, device=step.device)
        return fit(step, self.loss, epochs=None if epoch is None else 1, batches=self.plan_batches(step), lr=rate)

    def plan_batches(self, step: Step) -> Plan | None:
        """Return the pools of a batch, or None for the training clips."""
        return None

    def _update_prototype(self, step: Step, first: bool) -> None:
        """Set the client's prototype to the mean of its normal training clips, or move it there by 1 - ``renewal``."""
        network = cast(Any, step.models["model"])
        if first:
            network.own_prototype.zero_()  # Clients share the network object, so another client's prototype may be left.
        examples = cast(Any, self.objective).normal_examples(step.data.train)
        if not len(examples):
            return
        outputs = F.normalize(predict(step, "model", examples, step.training.batch_size), dim=1)
        mean = F.normalize(outputs.mean(dim=0), dim=0).to(step.device)
        if not first:
            mean = F.normalize(self.renewal * self.get_prototype(network) + (1 - self.renewal) * mean, dim=0)
        network.own_prototype.copy_(mean)

    def get_prototype(self, network: Any) -> Tensor:
        """Return the client's prototype scaled to length 1, float32 [size]."""
        return F.normalize(network.own_prototype, dim=0)

    @property
    def steers(self) -> bool:
        """True if detection performance affects the training and must be measured."""
        return self.beta > 0 or self.adaptive_lr

    def select_clips(self, step: Step) -> Examples:
        """Return the clips of the client's performance measure."""
        return step.data.validation

    def _measure_performance(self, step: Step) -> float | None:
        """Return A_k of the current model, or None if it is undefined."""
        if not self.steers or not len(examples := self.select_clips(step)):
            return None
        metrics = self.objective.evaluate(step, "model", examples, step.training.batch_size)
        scores = metrics.get("scores")
        auc = ranking_metrics(scores, only=["auc"])["auc"] if isinstance(scores, Scores) else metrics.get("auc")
        return auc.value if isinstance(auc, Ratio) and auc.count and math.isfinite(auc.value) else None

    def _adapt_rate(self, step: Step) -> float | None:
        """Adapt and retain the client's learning rate (equation 6). None: the configured rate."""
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
        """Average with weights from clips and performance (equation 4), and move the common prototype."""
        extra = dict(state.extra)
        counter = UpdateCounter(self._weight_updates(updates, extra) if self.beta and self.steers else updates)
        averaged, report = super().aggregate(state, counter, rng)
        tensors = dict(averaged.tensors["global"])
        if counter.senders[PROTOTYPE] and self.prototype_momentum < 1:
            old, new = state.tensors["global"][PROTOTYPE], F.normalize(tensors[PROTOTYPE], dim=0)
            tensors[PROTOTYPE] = F.normalize(self.prototype_momentum * old + (1 - self.prototype_momentum) * new, dim=0)
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": tensors}, extra=extra), report

    def _weight_updates(self, updates: Iterable[Update], extra: dict[str, Any]) -> Iterable[Update]:
        """Yield updates with the weights of equation 4."""
        # The weights depend on all updates, so the updates are read twice.
        spool, clips, performance = Spool(), list[float](), list[float | None]()
        for update in updates:
            spool.add(update)
            clips.append(float(cast(float, update.weight)))
            performance.append(self.read_performance(update, extra))
        known = [value for value in performance if value is not None]
        if not known:
            yield from spool
            return
        mean = sum(known) / len(known)
        powers = [math.exp((mean if value is None else value) / self.temperature) for value in performance]
        for update, count, power in zip(spool, clips, powers, strict=True):
            weight = self.alpha * count / max(1.0, sum(clips)) + self.beta * power / sum(powers)
            yield dataclasses.replace(update, weight=weight)

    def read_performance(self, update: Update, extra: dict[str, Any]) -> float | None:
        """Return a client's performance in this round, or None if undefined. ``extra`` is the next state's."""
        now = cast(Ratio, update.metrics.get("performance", Ratio(0.0, 0)))
        return now.value if now.count else None


def add_prototype(network: nn.Module, size: int) -> None:
    """Add the buffers ``prototype``, if missing, and ``own_prototype`` to a network, both float32 [size].

    The common prototype starts as 0.1 times standard normal values. The client's own is recomputed in each round, so the state
    dict does not contain it.

    Raises:
        ConfigError: The network has different attributes with these names, or a prototype of another size.
    """
    existing = getattr(network, "prototype", None)
    if existing is None:
        network.register_buffer("prototype", _PROTOTYPE_SPREAD * torch.randn(size))
    elif not isinstance(existing, Tensor) or existing.shape != (size,):
        raise ConfigError(
            f"models.model: {type(network).__name__} has an attribute 'prototype', but not a tensor of its {size} outputs. "
            f"Rename it, or make it a tensor with the shape [{size}]."
        )
    if hasattr(network, "own_prototype"):
        raise ConfigError(
            f"models.model: {type(network).__name__} has an attribute 'own_prototype', the name of a tensor that ProFiLA adds. "
            f"Rename it."
        )
    network.register_buffer("own_prototype", torch.zeros(size), persistent=False)


def update_prototype(prototype: Tensor, z: Tensor, batch: Batch, momentum: float) -> Tensor:
    """Move a client's prototype by 1 - momentum towards the batch's mean, unless all weights are 0.

    Args:
        prototype: float32 [size], changed in place.
        z: Outputs of length 1, float32 [batch, size].
        batch: The examples of z with their weights.
        momentum: The remaining fraction of the prototype, 0 to 1.

    Returns:
        The mean of z with gradients, float32 [size].
    """
    weight = torch.ones_like(z[:, 0]) if batch.weight is None else batch.weight
    count = weight.sum()
    mean = (weight @ z) / count.clamp_min(1.0)
    with torch.no_grad():  # A factor instead of a branch on the count, which batched training cannot have.
        prototype.add_((1 - momentum) * (count > 0) * (mean - prototype))
    return mean


def pool_epochs(epochs: Sequence[Metrics]) -> Metrics:
    """Pool the metrics of several calls of ``fit``, and add up their steps."""
    return {**pool(epochs), "steps": Ratio(sum(cast(Ratio, metrics["steps"]).total for metrics in epochs), 1)}
