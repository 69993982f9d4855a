"""FedGen: the server trains a feature generator on the clients' last layers, and clients train with its features.

Z. Zhu, J. Hong, J. Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, algorithm 1, equations
4 and 5, and its code. G(y, e) generates features of class y from noise e, uniform in [0, 1). head is the last layer of a network f.
n_k(y) is the number of client k's examples of class y, n(y) their sum over the cohort, and t the round, from 0:

    client   CE + (generated / B) alpha_t CE(head(G(y', e)), y') + beta_t KL( softmax(head(G(y, e))) || softmax(f(x)) )
             y are the labels of the batch, y' is uniform over the classes with examples, B is the batch size,
             alpha_t = max(1e-4, alpha decay^t), and beta_t likewise. No gradient reaches the first argument of KL.
    sent     the network and n_k
    server   G by server_steps steps of Adam on   mean of sum_k n_k(y) / n(y) CE(head_k(G(y, e)), y)  + diversity D,
             D = exp(-mean over pairs of ||e_i - e_j||^2 / n * ||G_i - G_j||_1 / d), with n noise values and d features,
             y uniform over the cohort's classes with examples. Then w as in FedAvg.

The first round uses no generated features, nor does a later round after its first ``generated_epochs`` epochs. From the second
round clients receive the generator. Adam's moments are never sent. Each round records ``generator/loss``, without the diversity
D.

The objective must be ``classify``. Each of several data sets (docs/data.md#parts) has its own generator. A network of your own
needs ``embed(x, lengths=None)``, float32 [batch, width], and a linear last layer ``output``.

An aggregation rule receives only the networks. The generator learns from all received last layers, weighted by the clients'
claimed counts, so a robust rule does not protect it.

Readings and deviations:

- G is never averaged, so its batch normalisation is safe. The server trains with each batch's statistics. Clients receive and
  use the running statistics.
- G has one output per input of the network's last layer. The paper's networks have 32.
- Each example has its own weight n_k(y) / n(y). The paper's code multiplies every example's loss by every example's weight. It
  counts the examples sampled in the round, plus one, and samples labels from classes with at least two examples.
- The learning rate of Adam also decays by ``decay`` in each round, as in the code. An alpha or beta of 0 stays 0, not 1e-4. With
  both at 0 the method is FedAvg to the bit.
- The defaults are the code's for MNIST.

    raydfl run jobs/tiny.yaml run.name=fedgen method='{name: fedgen, alpha: 1, beta: 1}'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.needs import Needs
from raydfl.core.ops import uniform
from raydfl.core.options import RELEASE
from raydfl.core.part_names import mark_like
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, Ratio, State, Task, Update
from raydfl.methods._distillation import compute_divergences
from raydfl.methods._generator import MODULE, STEPS, VECTOR, Generator, ServerGenerator, similarity
from raydfl.methods._layers import last_layer
from raydfl.methods._method import Method
from raydfl.training import Step, fit

COUNTS = "labels/counts"
"""Example counts, float32 [classes]: a client's, or at the server those of the last cohort with examples of the class."""
_HEAD, _HEAD_BIAS = "model/output.weight", "model/output.bias"
_WEIGHTS = "fedgen/weights"
_LEAST = 1e-4


@dataclass(frozen=True, kw_only=True)
class FedGen(Method):
    """FedAvg with additional training on features from a generator at the server."""

    needs = Needs(objectives=("classify",))

    alpha: Annotated[
        float,
        Field(ge=0, description="Weight of the cross-entropy of generated features in the first round. 0 disables it."),
        RELEASE,
    ] = 10.0
    beta: Annotated[
        float,
        Field(ge=0, description="Weight of the divergence from the prediction for generated features. 0 disables it."),
        RELEASE,
    ] = 10.0
    decay: Annotated[
        float, Field(gt=0, le=1, description="Factor of alpha, beta and server_lr in each round. 1: no decay."), RELEASE
    ] = 0.98
    generated: Annotated[int, Field(ge=1, description="Number of generated examples per batch."), RELEASE] = 32
    generated_epochs: Annotated[
        int, Field(ge=1, description="Number of first epochs in a round that use generated features."), RELEASE
    ] = 20
    noise: Annotated[int, Field(ge=1, description="Number of noise values at the generator's input."), RELEASE] = 32
    hidden: Annotated[int, Field(ge=1, description="Number of the generator's hidden units."), RELEASE] = 256
    server_steps: Annotated[int, Field(ge=1, description="Training steps of the generator per round."), RELEASE] = 50
    server_batch: Annotated[int, Field(ge=2, description="Batch size of the generator's training."), RELEASE] = 128
    server_lr: Annotated[
        float, Field(gt=0, description="Learning rate of the generator's Adam optimiser."), RELEASE
    ] = 3e-4
    weight_decay: Annotated[float, Field(ge=0, description="Weight decay of the generator."), RELEASE] = 0.01
    diversity: Annotated[
        float, Field(ge=0, description="Weight of the diversity of generated features. 0 disables it."), RELEASE
    ] = 1.0

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state with a new generator and zero label counts.

        Raises:
            ConfigError: The network has no ``embed``, or no linear ``output``.
        """
        state = super().init(clients, models, rng)
        head = last_layer(models[0]["model"], "fedgen")
        generator = self._generator(head.in_features, head.out_features)
        entry = {**state.tensors["global"], COUNTS: torch.zeros(head.out_features)}
        tensors = {"global": entry, **generator.entries(rng)}
        return dataclasses.replace(state, tensors=tensors, extra={STEPS: 0})

    def _generator(self, width: int, classes: int) -> Generator:
        return Generator(self.noise, self.hidden, width, classes)

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Plan FedAvg's tasks. Clients also receive the generator once it is trained."""
        tasks = super().plan(state, clients, rng, cohort)
        trained = all(state.extra[mark_like(STEPS, name)] for name in state.tensors[MODULE])
        if not trained:
            return tasks
        return [dataclasses.replace(task, receive=(*task.receive, MODULE)) for task in tasks]

    def loss_with_generator(self, step: Step, batch: Batch) -> Tensor:
        """Return cross-entropy plus the terms of generated features."""
        network = cast(Any, step.models["model"])
        logits = network.output(network.embed(*batch.input_of(network)))
        value = batch.cross_entropy(logits)
        alpha, beta = step.state[_WEIGHTS].unbind()
        if self.alpha:
            labels = _draw_classes(step.reference(COUNTS) > 0, self.generated)
            value = value + alpha * F.cross_entropy(network.output(self._features(step, labels)), labels)
        if self.beta:
            with torch.no_grad():
                target = network.output(self._features(step, batch.y))
            value = value + beta * batch.mean(compute_divergences(target, logits))
        return value

    def _features(self, step: Step, labels: Tensor) -> Tensor:
        """Generate features from labels and new noise with the received generator, float32 [labels, width]."""
        head = cast(nn.Linear, cast(Any, step.models["model"]).output)
        noise = uniform(len(labels) * self.noise, labels.device).view(len(labels), self.noise)
        generator = self._generator(head.in_features, head.out_features)
        return generator.features(step.received[MODULE][VECTOR], labels, noise)[0]

    def local(self, step: Step) -> Update:
        """Train, with generated features if received, and send the network and the client's label counts."""
        epochs = step.training.local_epochs
        with_generator = min(epochs, self.generated_epochs) if MODULE in step.received else 0
        metrics: dict[str, Any] = {}
        if with_generator:
            # A loss may only read numbers of the round from the state, or it could not be batched and replayed.
            step.state[_WEIGHTS] = self._weights(step).to(step.device)
            metrics = dict(fit(step, self.loss_with_generator, epochs=with_generator))
            del step.state[_WEIGHTS]
        if with_generator < epochs:
            plain = fit(step, self.loss, epochs=epochs - with_generator)
            metrics = {name: value + metrics[name] if name in metrics else value for name, value in plain.items()}
        classes = len(step.reference(COUNTS))
        labels = torch.from_numpy(np.asarray(step.data.train.labels, np.int64))
        tensors = {name: value for name, value in step.floating_state().items() if self.shared(name)}
        counts = torch.bincount(labels, minlength=classes).float()
        return step.update(metrics, tensors={**tensors, COUNTS: counts})

    def _weights(self, step: Step) -> Tensor:
        """Return the weights of both terms in this round, float32 [2]."""
        decay = self.decay**step.round_index
        alpha, beta = (max(_LEAST, weight * decay) for weight in (self.alpha, self.beta))
        return torch.tensor([self.generated / step.training.batch_size * alpha, beta])

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Aggregate the networks by the rule, and train the generator with the clients' last layers and label counts."""
        collector = _HeadCollector(updates)
        new, report = super().aggregate(state, collector, rng)
        tensors = {key: dict(entry) for key, entry in new.tensors.items()}
        extra, losses = dict(new.extra), list[float]()
        for name in state.tensors[MODULE]:  # One generator, or one per part.
            counts = mark_like(COUNTS, name)
            tensors["global"][counts] = before = state.tensors["global"][counts]
            heads = collector.stack(name)
            if heads is None:
                continue
            total = heads.counts.sum(dim=0)
            tensors["global"][counts] = torch.where(total > 0, total, before)
            if not (self.alpha or self.beta):
                continue  # Clients learn nothing from generated features.
            module = ServerGenerator(state, name)
            losses += [self._train(module, heads, rng, state.round_index) for _ in range(self.server_steps)]
            module.store(tensors, extra)
        if losses:
            report = {**report, "generator/loss": Ratio(sum(losses), len(losses))}
        return dataclasses.replace(new, tensors=tensors, extra=extra), report

    def _train(self, module: ServerGenerator, heads: _Heads, rng: np.random.Generator, round_index: int) -> float:
        """Train the generator for one step, and return its loss without the diversity term."""
        generator = self._generator(heads.weight.shape[2], heads.weight.shape[1])
        classes = np.flatnonzero(heads.counts.sum(dim=0).numpy() > 0)
        labels = torch.from_numpy(rng.choice(classes, self.server_batch))
        noise = torch.from_numpy(rng.random((self.server_batch, self.noise), np.float32))
        values: list[Tensor] = []

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            features, running = generator.features(vector, labels, noise, training=True)
            values.append(heads.loss(features, labels))
            return values[0] + self.diversity * similarity(noise, features) if self.diversity else values[0], running

        module.train(loss, self.server_lr * self.decay**round_index, self.weight_decay)
        return float(values[0].detach())


@dataclasses.dataclass(slots=True)
class _Heads:
    """Last layers and example counts of some clients."""

    weight: Tensor
    """float32 [clients, classes, width]."""
    bias: Tensor
    """float32 [clients, classes]."""
    counts: Tensor
    """float32 [clients, classes]."""

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of examples, with each client weighted by its share of the class."""
        logits = torch.einsum("nd,kcd->nkc", features, self.weight) + self.bias
        losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(len(self.counts)), reduction="none")
        shares = self.counts / self.counts.sum(dim=0).clamp_min(1.0)
        return (losses.view(len(labels), -1) * shares.T[labels]).sum(dim=1).mean()


class _HeadCollector(Iterable[Update]):
    """Iterate over updates once, without their label counts, and collect their last layers and counts."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self._updates = updates
        self._heads: list[dict[str, Tensor]] = []

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            head = {n: v for n, v in update.tensors.items() if n.startswith((_HEAD, _HEAD_BIAS, COUNTS))}
            network = {n: v for n, v in update.tensors.items() if not n.startswith(COUNTS)}
            self._heads.append({name: value.clone() for name, value in head.items()})
            yield dataclasses.replace(update, tensors=network)

    def stack(self, generator: str) -> _Heads | None:
        """Return the last layers of a generator's part, by its name. None if no client of the part has examples."""
        names = [mark_like(name, generator) for name in (_HEAD, _HEAD_BIAS, COUNTS)]
        heads = [head for head in self._heads if names[2] in head and bool((head[names[2]] > 0).any())]
        if not heads:
            return None
        weight, bias, counts = (torch.stack([head[name] for head in heads]) for name in names)
        return _Heads(weight, bias, counts.clamp_min(0))  # An attacker may send negative counts.


def _draw_classes(mask: Tensor, count: int) -> Tensor:
    """Draw class numbers uniformly from the classes in a mask, int64 [count].

    Args:
        mask: bool [classes].
        count: Number of draws.
    """
    # Inverse transform sampling, because torch.multinomial would draw other numbers in a batch of clients.
    cumulative = mask.float().cumsum(dim=0) / mask.float().sum().clamp_min(1.0)
    draws = uniform(count, mask.device)
    return (draws.unsqueeze(1) >= cumulative).sum(dim=1).clamp_max(len(mask) - 1)
