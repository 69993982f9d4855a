"""Methods that exchange class means of features (prototypes)."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.needs import Needs
from raydfl.core.options import OURS
from raydfl.core.seeds import generator
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, State, Update, same_view
from raydfl.data import Examples
from raydfl.methods._layers import check_features, last_layer
from raydfl.methods._method import Method
from raydfl.training import Step, fit, predict

MEANS, COUNTS = "prototypes/means", "prototypes/counts"
"""Names of class means, float32 [classes, size], and example counts, float32 [classes]. A client computes them on its training
data. The server's counts are means over the class's last senders. A count of 0 means that the class mean is unknown."""


@dataclass(frozen=True, kw_only=True)
class PrototypeMethod(Method, ABC):
    """Training with a distance to common class means. Subclasses may share more tensors, and set the means' size."""

    needs = Needs(objectives=("classify",), one_class_list=True)

    lam: Annotated[
        float, Field(ge=0, description="Weight of the distance to the class means. 0: every client trains alone."), OURS
    ] = 1.0

    @property
    def projected_size(self) -> int | None:
        """Number of features of a class mean. None: the networks' own number."""
        return None

    def shared(self, name: str) -> bool:
        """Share only the class means and counts."""
        return not name.startswith("model/")

    def distances(self, differences: Tensor) -> Tensor:
        """Return the distances from the class means, float32 [batch], for differences float32 [batch, size]."""
        return differences.square().sum(dim=1)

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state of the shared tensors, with unknown class means.

        Raises:
            ConfigError: A network has no ``embed``, or networks differ in their number of features.
        """
        name = type(self).__name__.lower()
        for built in models:
            check_features(built["model"], name)
        size = self.projected_size or _find_common_width([built["model"] for built in models], name)
        state = super().init(clients, models, rng)
        classes = next(spec.classes for spec in clients[0].models if spec.name == "model")
        nothing = {MEANS: torch.zeros(classes, size), COUNTS: torch.zeros(classes)}
        return dataclasses.replace(state, tensors={"global": {**state.tensors["global"], **nothing}})

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return cross-entropy plus the distance to the known class means."""
        network = cast(Any, step.models["model"])
        features = network.embed(*batch.input_of(network))
        value = batch.cross_entropy(network.output(features))
        if self.lam == 0:
            return value
        known = (step.reference(COUNTS) > 0).to(features.dtype)
        differences = _project(features, self.projected_size) - step.reference(MEANS)[batch.y]
        return value + self.lam * batch.mean(known[batch.y] * self.distances(differences))

    def local(self, step: Step) -> Update:
        """Train, then send the class means of the training data and the shared tensors."""
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
        """Aggregate, with each class mean weighted by the client's examples of the class."""
        new, report = super().aggregate(state, map(_weight_by_class, updates), rng)
        before, after = state.tensors["global"][COUNTS], new.tensors["global"][COUNTS]
        # A rule without weights, such as a median, may count 0 for a rare class. Known means stay known.
        counts = torch.where(after > 0, after, before)
        return dataclasses.replace(
            new, tensors={**new.tensors, "global": {**new.tensors["global"], COUNTS: counts}}
        ), report

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Also measure ``prototypes/accuracy`` and ``prototypes/confusion`` of predicting the nearest known class mean."""
        measured = dict(super().evaluate(step, examples, batch_size))
        known = step.reference(COUNTS).cpu() > 0
        if "model" in step.models and bool(known.any()):
            differences = self._features(step, examples, batch_size)[:, None] - step.reference(MEANS).cpu()
            scores = (-differences.square().sum(dim=2)).masked_fill(~known, -torch.inf)
            for name, value in self.objective.metrics(scores, examples).items():
                if name != "loss":  # The loss is infinite for a clip of an unknown class.
                    measured[f"prototypes/{name}"] = value
        return measured

    def _features(self, step: Step, examples: Examples, batch_size: int = 64) -> Tensor:
        """Return g(x) in evaluation mode, float32 [examples, size], on the CPU."""
        network = step.models["model"]
        up_to_top: dict[str, nn.Module] = {"model": same_view(_TopFeatures(network, self.projected_size), network)}
        return predict(dataclasses.replace(step, models=up_to_top), "model", examples, batch_size)


class _TopFeatures(nn.Module):
    """A network without its last layer. Its outputs are the features, projected to a common size."""

    def __init__(self, network: nn.Module, size: int | None) -> None:
        super().__init__()
        self.network = network
        self.size = size

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return _project(cast(Any, self.network).embed(x, lengths), self.size)


def _find_common_width(networks: Sequence[nn.Module], method: str) -> int:
    """Return the common number of features of some networks.

    Raises:
        ConfigError: The networks have different numbers of features.
    """
    widths = sorted({last_layer(network, method).in_features for network in networks})
    if len(widths) > 1:
        raise ConfigError(
            f"models.model: {method} compares features, so all networks need the same number of them, but they have "
            f"{', '.join(map(str, widths))}. Choose networks with the same width, or the method fedkad."
        )
    return widths[0]


def _project(features: Tensor, size: int | None) -> Tensor:
    """Project features [batch, width] to [batch, size]. Equal sizes leave them unchanged."""
    width = features.shape[1]
    return features if size in (None, width) else features @ _projection(width, size, features.device)


@functools.cache
def _projection(width: int, size: int, device: torch.device) -> Tensor:
    """Return P transposed, float32 [width, size], with orthonormal columns (rows if ``width < size``)."""
    rng = generator(0, 0, "", f"fedkad projection {width} to {size}")
    vectors: list[np.ndarray] = []
    for row in rng.normal(size=(min(width, size), max(width, size))):
        vector = row
        # Gram-Schmidt, twice for precision. A library's QR rounds differently with a different number of threads.
        for other in vectors * 2:
            vector = vector - (vector * other).sum() * other
        vectors.append(vector / np.sqrt((vector * vector).sum()))
    smaller_first = torch.from_numpy(np.stack(vectors).astype(np.float32))
    return (smaller_first if width < size else smaller_first.T).contiguous().to(device)


def _weight_by_class(update: Update) -> Update:
    """Return the update with its class means weighted by its example counts."""
    counts = update.tensors[COUNTS].clamp_min(0)  # An attacker may send negative counts.
    by_class = {MEANS: counts[:, None].expand_as(update.tensors[MEANS]), COUNTS: counts.sign()}
    rest = {name: cast(float, update.weight) for name in update.tensors if name not in by_class}
    return dataclasses.replace(update, weight={**rest, **by_class})
