"""FedKAD: clients exchange the mean top-level features of each class; their networks stay private.

FedKAD (knowledge aggregation and distillation over top-level feature maps) as FedMLAC modified it for its comparison: no public
data, no global logits, only class-wise aggregated feature maps are communicated. Neither that modification's code nor its equations
are published; this is a reconstruction:

    f_k(x)       what the last layer of client k's network sees (for a CRNN, the mean over time of the GRU's output)
    g_k(x)       P f_k(x), of a common size: P is a fixed linear map where the network's own size is another
    client       CE + lam mean_i known(y_i) ||g_k(x_i) - K_{y_i}||^2
    sent         k_{k,c} = mean of g_k(x) over its training examples of class c, and their number n_{k,c}
    server       K_c = sum_k n_{k,c} k_{k,c} / sum_k n_{k,c};  a class that nobody of the cohort holds keeps its K_c

known(c) is 1 once some client has sent a mean of class c, so in the first round clients train with cross-entropy alone. The mean is
taken over all examples of the batch, those of unknown classes counting 0. P projects orthogonally onto a random subspace, or where
the network's size is the smaller one embeds isometrically: its singular values are 1, so it never stretches a gradient. It is a
function of both sizes alone, the same at all clients and in all runs. With lam = 0 every client trains for itself.

``weights: true`` is the variant in which the networks' weights are averaged too, as in FedAvg, so that there is a global model. It
needs one architecture for all clients.

For the classes that it does not hold a client sends back what it received, with no weight: a rule that ignores weights sees no
change there. What is sent is computed in evaluation mode.

Without ``weights`` there is no global model to measure. Each client's own is measured on its hold-out and on the drawn test clips
(``evaluate.client_test_clips``). ``prototypes/accuracy`` is that of taking the class whose K_c is nearest to g_k(x) instead of the
last layer's answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.needs import Needs
from raydfl.core.seeds import generator
from raydfl.core.types import Batch, Client, Metrics, State, Update, same_view
from raydfl.data import Examples
from raydfl.methods._layers import check_features
from raydfl.methods._method import Method
from raydfl.training import Step, fit, predict

MEANS, COUNTS = "prototypes/means", "prototypes/counts"
"""float32 [classes, size] and [classes]. At a client: of its training data. At the server: K, and the mean number of examples of
those who held the class when somebody last did; 0: it is not known yet."""


@dataclass(frozen=True, kw_only=True)
class FedKAD(Method):
    """Private networks that are drawn to common class means of their top features."""

    pure: ClassVar[bool] = True

    lam: Annotated[
        float, Field(ge=0, description="weight of the distance to the class means; 0: every client trains for itself")
    ] = 1.0
    size: Annotated[
        int, Field(ge=1, description="features of a class mean; networks of another size are mapped to it")
    ] = 64
    weights: Annotated[
        bool, Field(description="average the networks' weights too, as in FedAvg; needs one architecture for all")
    ] = False

    def needs(self) -> Needs:
        """Need the objective ``classify``, and the same classes at all clients."""
        # it compares class means, and every part has classes of its own
        return dataclasses.replace(super().needs(), objectives=("classify",), one_class_list=True)

    def shared(self, name: str) -> bool:
        """Share the class means and counts; the network only with ``weights``."""
        return self.weights or not name.startswith("model/")

    def init(
        self, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]], rng: np.random.Generator
    ) -> State:
        """Class means of which none is known; with ``weights`` also FedAvg's state.

        Raises:
            ConfigError: a network has no ``embed``; or ``weights`` and several architectures.
        """
        for built in models:
            check_features(built["model"], "fedkad")
        shapes = {tuple((k, v.shape) for k, v in built["model"].state_dict().items()) for built in models}
        if self.weights and len(shapes) > 1:
            raise ConfigError(
                f"method.weights: true averages the networks' weights, so all clients must have one architecture, but "
                f"models.model gives them {len(shapes)}; name one, or exchange class means only with method.weights=false"
            )
        state = super().init(clients, models, rng)
        classes = next(spec.classes for spec in clients[0].models if spec.name == "model")
        nothing = {MEANS: torch.zeros(classes, self.size), COUNTS: torch.zeros(classes)}
        return dataclasses.replace(state, tensors={"global": {**state.tensors["global"], **nothing}})

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Cross-entropy plus the distance to the class means that are known."""
        network = cast(Any, step.models["model"])
        features = network.embed(*batch.input_of(network))
        value = batch.cross_entropy(network.output(features))
        if self.lam == 0:
            return value
        known = (step.reference(COUNTS) > 0).to(features.dtype)
        away = _projected(features, self.size) - step.reference(MEANS)[batch.y]
        return value + self.lam * batch.mean(known[batch.y] * away.square().sum(dim=1))

    def local(self, step: Step) -> Update:
        """Train; send the class means of the training data, and with ``weights`` the network."""
        metrics = fit(step, self.loss)
        tensors = {name: value for name, value in step.floating_state().items() if self.shared(name)}
        means, counts = step.reference(MEANS).cpu().double(), torch.zeros(len(step.reference(COUNTS)))
        labels = torch.from_numpy(np.asarray(step.data.train.labels, np.int64))
        if len(labels):
            features = self._features(step, step.data.train)
            counts = torch.bincount(labels, minlength=len(counts)).float()
            sums = torch.zeros_like(means).index_add_(0, labels, features.double())
            means = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp_min(1), means)
        return step.update(metrics, tensors={**tensors, MEANS: means.float(), COUNTS: counts})

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Apply the rule; a client's class mean weighs as much as its examples of the class."""
        new, report = super().aggregate(state, map(_weighted_by_class, updates), rng)
        before, after = state.tensors["global"][COUNTS], new.tensors["global"][COUNTS]
        # A rule that ignores weights may find no examples of a class that few hold; what is known stays known.
        counts = torch.where(after > 0, after, before)
        return dataclasses.replace(
            new, tensors={**new.tensors, "global": {**new.tensors["global"], COUNTS: counts}}
        ), report

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure ``prototypes/accuracy`` and ``prototypes/confusion`` too, of the nearest class mean among those known."""
        measured = dict(super().evaluate(step, examples, batch_size))
        known = step.reference(COUNTS).cpu() > 0
        if "model" in step.models and bool(known.any()):
            away = self._features(step, examples, batch_size)[:, None] - step.reference(MEANS).cpu()
            scores = (-away.square().sum(dim=2)).masked_fill(~known, -torch.inf)
            for name, value in self.objective.metrics(scores, examples).items():
                if name != "loss":  # infinite for a clip of a class that is not known
                    measured[f"prototypes/{name}"] = value
        return measured

    def _features(self, step: Step, examples: Examples, batch_size: int = 64) -> Tensor:
        """g(x) of some examples, in evaluation mode: float32 [examples, size], on the CPU."""
        network = step.models["model"]
        up_to_top: dict[str, nn.Module] = {"model": same_view(_TopFeatures(network, self.size), network)}
        return predict(dataclasses.replace(step, models=up_to_top), "model", examples, batch_size)


class _TopFeatures(nn.Module):
    """A network up to its last layer, as a network whose outputs are the features of the common size."""

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self.network = network
        self.size = size

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return _projected(cast(Any, self.network).embed(x, lengths), self.size)


def _projected(features: Tensor, size: int) -> Tensor:
    """Features [batch, width] as [batch, size]: themselves where the sizes are equal."""
    width = features.shape[1]
    return features if width == size else features @ _projection(width, size, features.device)


@functools.cache
def _projection(width: int, size: int, device: torch.device) -> Tensor:
    """P transposed, with orthonormal columns or, where ``width`` is the smaller, rows: float32 [width, size]."""
    rng = generator(0, 0, "", f"fedkad projection {width} to {size}")
    vectors: list[np.ndarray] = []
    for drawn in rng.normal(size=(min(width, size), max(width, size))):
        vector = drawn
        # Gram-Schmidt, twice for precision. A library's QR rounds differently with another number of threads.
        for other in vectors * 2:
            vector = vector - (vector * other).sum() * other
        vectors.append(vector / np.sqrt((vector * vector).sum()))
    smaller_first = torch.from_numpy(np.stack(vectors).astype(np.float32))
    return (smaller_first if width < size else smaller_first.T).contiguous().to(device)


def _weighted_by_class(update: Update) -> Update:
    """Return the update with its class means weighted by its own counts (not negative, whatever it claims)."""
    counts = update.tensors[COUNTS].clamp_min(0)
    by_class = {MEANS: counts[:, None].expand_as(update.tensors[MEANS]), COUNTS: counts.sign()}
    rest = {name: cast(float, update.weight) for name in update.tensors if name not in by_class}
    return dataclasses.replace(update, weight={**rest, **by_class})
