"""FedGen: the server learns a generator of features from the clients' last layers, and sends it along.

Z. Zhu, J. Hong, J. Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, algorithm 1, equations
4 and 5, and its code. G(y, e) makes features of class y out of noise e, uniform in [0, 1); head is a network's last layer and f all
of it; n_k(y) is the number of client k's examples of class y, n(y) their sum over the cohort; t is the round, from 0:

    client   CE + (generated / B) alpha_t CE(head(G(y', e)), y') + beta_t KL( softmax(head(G(y, e))) || softmax(f(x)) )
             y the labels of the batch, y' uniform over the classes that somebody holds, B the batch size;
             alpha_t = max(1e-4, alpha decay^t), beta_t alike; no gradient reaches the first argument of KL
    sent     the network, and n_k
    server   G by ``server_steps`` steps of Adam on   mean of sum_k n_k(y) / n(y) CE(head_k(G(y, e)), y)  + diversity D,
             D = exp(-mean over pairs of ||e_i - e_j||^2 / n * ||G_i - G_j||_1 / d), n noise, d features, y uniform over the
             classes that somebody of the cohort holds; then w as in FedAvg

In the first round nothing is generated, and after ``generated_epochs`` passes of a round nothing any more. The generator lies under
a key of its own of the server's state, ``generator``, and Adam's moments under ``generator/moments``, which nobody receives.

Readings and deviations:

- G is never averaged, so its batch normalisation is safe: the server trains with each batch's statistics, and clients use the
  running ones, which come with it.
- G's output has the size of what the network's last layer sees; the paper's networks have 32 features there.
- The weights n_k(y) / n(y) are those of the example. The paper's code multiplies every example's loss with every other's weight,
  counts the examples drawn in the round, plus one, and draws labels from classes of two examples or more.
- The learning rate of Adam decays by ``decay`` in each round, too, as in the code. An alpha or beta of 0 is 0, and not 1e-4.
- The defaults are those for MNIST.
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
from raydfl.core.part_names import mark_like
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, Ratio, State, Task, Update
from raydfl.methods._distillation import compute_divergences
from raydfl.methods._generator import MODULE, STEPS, VECTOR, Generator, ServerGenerator, similarity
from raydfl.methods._layers import last_layer
from raydfl.methods._method import Method
from raydfl.training import Step, fit

COUNTS = "labels/counts"
"""float32 [classes]. Of a client: examples of each class. At the server: of the cohort that last held any of the class."""
_HEAD, _HEAD_BIAS = "model/output.weight", "model/output.bias"
_WEIGHTS = "fedgen/weights"
_LEAST = 1e-4


@dataclass(frozen=True, kw_only=True)
class FedGen(Method):
    """FedAvg whose clients also learn from features that a generator at the server makes."""

    needs = Needs(objectives=("classify",))

    alpha: Annotated[
        float, Field(ge=0, description="weight of the cross-entropy of generated features, in the first round; 0: none")
    ] = 10.0
    beta: Annotated[
        float, Field(ge=0, description="weight of the divergence from what the generator says of a label; 0: none")
    ] = 10.0
    decay: Annotated[
        float, Field(gt=0, le=1, description="what alpha, beta and server_lr are multiplied by in each round")
    ] = 0.98
    generated: Annotated[int, Field(ge=1, description="features that are generated for a batch")] = 32
    generated_epochs: Annotated[
        int, Field(ge=1, description="passes of a round in which features are generated; later ones do without")
    ] = 20
    noise: Annotated[int, Field(ge=1, description="numbers of noise that go into the generator")] = 32
    hidden: Annotated[int, Field(ge=1, description="hidden units of the generator")] = 256
    server_steps: Annotated[int, Field(ge=1, description="steps that train the generator in a round")] = 50
    server_batch: Annotated[int, Field(ge=2, description="features in a step that trains the generator")] = 128
    server_lr: Annotated[float, Field(gt=0, description="learning rate of the generator, by Adam")] = 3e-4
    weight_decay: Annotated[float, Field(ge=0, description="weight decay of the generator")] = 0.01
    diversity: Annotated[
        float, Field(ge=0, description="weight of the term that keeps generated features apart; 0: none")
    ] = 1.0

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """FedAvg's state, a new generator, and no labels counted.

        Raises:
            ConfigError: the network has no ``embed`` or ``output``; or the latter is not linear.
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
        """Plan FedAvg's tasks; the generator goes along once it has been trained."""
        tasks = super().plan(state, clients, rng, cohort)
        trained = all(state.extra[mark_like(STEPS, name)] for name in state.tensors[MODULE])
        if not trained:
            return tasks
        return [dataclasses.replace(task, receive=(*task.receive, MODULE)) for task in tasks]

    def loss_with_generator(self, step: Step, batch: Batch) -> Tensor:
        """Return cross-entropy plus what is learnt from generated features."""
        network = cast(Any, step.models["model"])
        logits = network.output(network.embed(*batch.input_of(network)))
        value = batch.cross_entropy(logits)
        alpha, beta = step.state[_WEIGHTS].unbind()
        if self.alpha:
            labels = _drawn(step.reference(COUNTS) > 0, self.generated)
            value = value + alpha * F.cross_entropy(network.output(self._features(step, labels)), labels)
        if self.beta:
            with torch.no_grad():
                target = network.output(self._features(step, batch.y))
            value = value + beta * batch.mean(compute_divergences(target, logits))
        return value

    def _features(self, step: Step, labels: Tensor) -> Tensor:
        """Return features that the received generator makes of labels, with fresh noise: float32 [labels, width]."""
        head = cast(nn.Linear, cast(Any, step.models["model"]).output)
        noise = uniform(len(labels) * self.noise, labels.device).view(len(labels), self.noise)
        generator = self._generator(head.in_features, head.out_features)
        return generator.features(step.received[MODULE][VECTOR], labels, noise)[0]

    def local(self, step: Step) -> Update:
        """Train, with generated features where there is a generator; send the network and the client's label counts."""
        epochs = step.training.local_epochs
        with_generator = min(epochs, self.generated_epochs) if MODULE in step.received else 0
        metrics: dict[str, Any] = {}
        if with_generator:
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
        """Return the weights of both terms in this round: float32 [2]."""
        fade = self.decay**step.round_index
        alpha, beta = (max(_LEAST, weight * fade) for weight in (self.alpha, self.beta))
        return torch.tensor([self.generated / step.training.batch_size * alpha, beta])

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Aggregate the networks by the rule; train the generator with the clients' last layers and label counts."""
        seen = _Seen(updates)
        new, report = super().aggregate(state, seen, rng)
        tensors = {key: dict(of_key) for key, of_key in new.tensors.items()}
        extra, losses = dict(new.extra), list[float]()
        for name in state.tensors[MODULE]:  # one, or one for each part
            counts = mark_like(COUNTS, name)
            tensors["global"][counts] = before = state.tensors["global"][counts]
            heads = seen.heads(name)
            if heads is None:
                continue
            held = heads.counts.sum(dim=0)
            tensors["global"][counts] = torch.where(held > 0, held, before)
            if not (self.alpha or self.beta):
                continue  # Clients learn nothing from generated features.
            module = ServerGenerator(state, name)
            losses += [self._train(module, heads, rng, state.round_index) for _ in range(self.server_steps)]
            module.store(tensors, extra)
        if losses:
            report = {**report, "generator/loss": Ratio(sum(losses), len(losses))}
        return dataclasses.replace(new, tensors=tensors, extra=extra), report

    def _train(self, module: ServerGenerator, heads: _Heads, rng: np.random.Generator, round_index: int) -> float:
        """Take one step of the generator; return its loss without the diversity's term."""
        generator = self._generator(heads.weight.shape[2], heads.weight.shape[1])
        held = np.flatnonzero(heads.counts.sum(dim=0).numpy() > 0)
        labels = torch.from_numpy(rng.choice(held, self.server_batch))
        noise = torch.from_numpy(rng.random((self.server_batch, self.noise), np.float32))
        found: list[Tensor] = []

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            features, running = generator.features(vector, labels, noise, training=True)
            found.append(heads.loss(features, labels))
            return found[0] + self.diversity * similarity(noise, features) if self.diversity else found[0], running

        module.train(loss, self.server_lr * self.decay**round_index, self.weight_decay)
        return float(found[0].detach())


@dataclasses.dataclass(slots=True)
class _Heads:
    """The last layers of some clients, and how many examples of each class each of them has."""

    weight: Tensor
    """float32 [clients, classes, width]."""
    bias: Tensor
    """float32 [clients, classes]."""
    counts: Tensor
    """float32 [clients, classes]."""

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over examples of the clients' cross-entropies, weighted by their shares of the class."""
        logits = torch.einsum("nd,kcd->nkc", features, self.weight) + self.bias
        each = F.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(len(self.counts)), reduction="none")
        shares = self.counts / self.counts.sum(dim=0).clamp_min(1.0)
        return (each.view(len(labels), -1) * shares.T[labels]).sum(dim=1).mean()


class _Seen(Iterable[Update]):
    """Updates to be read once, passed on without their label counts; last layers and counts are kept."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self._updates = updates
        self._kept: list[dict[str, Tensor]] = []

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            looked_at = {n: v for n, v in update.tensors.items() if n.startswith((_HEAD, _HEAD_BIAS, COUNTS))}
            of_network = {n: v for n, v in update.tensors.items() if not n.startswith(COUNTS)}
            self._kept.append({name: value.clone() for name, value in looked_at.items()})
            yield dataclasses.replace(update, tensors=of_network)

    def heads(self, of: str) -> _Heads | None:
        """Return those that belong to a generator, by its name; ``None``: nobody with examples of such classes sent any."""
        names = [mark_like(name, of) for name in (_HEAD, _HEAD_BIAS, COUNTS)]
        found = [kept for kept in self._kept if names[2] in kept and bool((kept[names[2]] > 0).any())]
        if not found:
            return None
        weight, bias, counts = (torch.stack([kept[name] for kept in found]) for name in names)
        return _Heads(weight, bias, counts.clamp_min(0))  # whatever a client claims


def _drawn(which: Tensor, count: int) -> Tensor:
    """Draw class numbers uniformly among some classes: int64 [count].

    Args:
        which: bool [classes].
        count: of numbers.
    """
    up_to = which.float().cumsum(dim=0) / which.float().sum().clamp_min(1.0)
    drawn = uniform(count, which.device)
    return (drawn.unsqueeze(1) >= up_to).sum(dim=1).clamp_max(len(which) - 1)
