"""Base of methods with an encoder for each view and a fusion classifier.

The models are one network for each view, and ``fusion``. A network consists of an encoder and a head (its last layer, ``output``).
``fusion`` classifies the concatenated features of all encoders, and reads zeros for a missing view.

A client builds, receives and sends the networks of its own views, and ``fusion`` only if it has all views.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.needs import Needs
from raydfl.core.options import OURS
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, ModelSpec, Ratio, State, Tensors, Update, view_of
from raydfl.data import Examples
from raydfl.methods._layers import last_layer
from raydfl.methods._method import Method, UpdateCounter
from raydfl.models import build_model
from raydfl.rules import Rule, UniformMean
from raydfl.training import Loss, Step, autocast, fit

FUSION, GLOBAL = "fusion", "global"

_KINDS = "clients"
"""Key of ``State.extra`` for a string with one letter per client: :data:`ALL` views, or only :data:`SOME`."""
ALL, SOME = "a", "s"


@dataclass(frozen=True, kw_only=True)
class WithViews(Method):
    """Base class of methods with an encoder for each view."""

    # The state knows clients by their positions, so there must be one list of clients.
    needs = Needs(objectives=("classify",), one_class_list=True, columns=("views",))

    on_features: ClassVar[tuple[str, ...]] = (FUSION,)

    default_rule: ClassVar[Rule] = UniformMean()

    models: ClassVar[Mapping[str, str]] = {"audio": "crnn_lite", "video": "cnn_small", FUSION: "fusion"}

    student: Annotated[
        str | None,
        Field(
            description="Model of clients with a single view. Its accuracy is the main metric. null: the first of models."
        ),
        OURS,
    ] = None

    def client_models(self, models: Sequence[ModelSpec], profile: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
        """Return the networks of the client's views, and ``fusion`` if the client has all views."""
        views = (FIRST_VIEW, *profile.get("views", ()))
        readable = [spec for spec in models if spec.name == FUSION or spec.view in views]
        return tuple(readable if len(readable) == len(models) else (spec for spec in readable if spec.name != FUSION))

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build the networks, and the fusion with one input per feature.

        Raises:
            ConfigError: A network has no ``embed``, or no linear ``output``.
        """
        built: dict[str, nn.Module] = {}
        width = 0
        for spec in models:
            if spec.name != FUSION:
                built[spec.name] = build_model(spec)
                width += last_layer(built[spec.name], "a method with several views").in_features
        for spec in models:
            if spec.name == FUSION:
                built[FUSION] = build_model(dataclasses.replace(spec, inputs=width))
        return built

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return the state of all networks, and record the clients with all views."""
        state = super().init(clients, models, rng)
        kinds = (ALL if any(spec.name == FUSION for spec in client.models) else SOME for client in clients)
        return dataclasses.replace(state, extra={**state.extra, _KINDS: "".join(kinds)})

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure the received networks in :meth:`select_models`. The fusion needs all encoders."""
        received = {name.partition("/")[0] for tensors in step.received.values() for name in tensors}
        metrics: dict[str, Any] = {}
        for name in step.options.get("models", self.select_models(step)):
            if name == FUSION and received.issuperset(step.models) and FUSION in step.models:
                measured = self._evaluate_fusion(step, examples, batch_size)
            elif name != FUSION and name in step.models and name in received:
                measured = self.objective.evaluate(step, name, examples, batch_size)
            else:
                continue
            metrics |= {f"{name}/{metric}": value for metric, value in measured.items()}
        return metrics

    def select_models(self, step: Step) -> Sequence[str]:
        """Return the names of the models to measure. The default is the student and the fusion."""
        return [*list(step.models)[:1], FUSION]

    def _evaluate_fusion(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        for network in step.models.values():
            network.eval()
        with torch.no_grad(), autocast(step.training.precision, step.device):
            batches = examples.batches(batch_size, None, step.device)
            logits = torch.cat([compute_fusion(step.models, batch).cpu() for batch in batches])
        return self.objective.metrics(logits, examples)

    def view_loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Return the loss of one network over the examples with its view."""
        return self.objective.loss(step, name, select_present(step.models[name], batch))

    def train_views(self, step: Step) -> Metrics:
        """Train each view's network in turn. From the second network on, metrics have the network's name as a prefix."""
        metrics: dict[str, Any] = {}
        for name in list_encoders(step):
            measured = fit(step, self._make_loss(name), models=(name,))
            metrics |= {f"{name}/{metric}": value for metric, value in measured.items()} if metrics else measured
        return metrics

    def _make_loss(self, name: str) -> Loss:
        def loss(step: Step, batch: Batch) -> Tensor:
            return self.view_loss(step, name, batch)

        return loss

    def fusion_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the cross-entropy of the fusion, end to end."""
        losses = nn.functional.cross_entropy(compute_fusion(step.models, batch), batch.y, reduction="none")
        return batch.mean(losses)


@dataclass(frozen=True, kw_only=True)
class WithFusion(WithViews):
    """Base class of methods whose clients with all views train and send the fusion with the encoders."""

    def local(self, step: Step) -> Update:
        """Train the encoders with the fusion if the client has all views, else each view's network."""
        if FUSION in step.models:
            return step.update(fit(step, self.fusion_loss), tensors=collect_fusion_tensors(step))
        return step.update(self.train_views(step))

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average over the senders, and count the clients with and without the fusion."""
        counter = UpdateCounter(updates)
        new, report = super().aggregate(state, counter, rng)
        return new, {**report, **count_kinds(counter)}


def list_encoders(step: Step) -> list[str]:
    """Return the names of a client's networks without the fusion."""
    return [name for name in step.models if name != FUSION]


def compute_fusion(models: Mapping[str, nn.Module], batch: Batch) -> Tensor:
    """Return the fusion's logits from the features of all encoders, float32 [batch, classes]."""
    return apply_classifier(models[FUSION], torch.cat(list(embed_views(models, batch).values()), dim=1))


def embed_views(models: Mapping[str, nn.Module], batch: Batch) -> dict[str, Tensor]:
    """Return the features of each encoder by name, [batch, width]. They are zero for a missing view."""
    features: dict[str, Tensor] = {}
    for name, network in models.items():
        if name == FUSION:
            continue
        present, (x, lengths) = batch.present.get(view_of(network)), batch.input_of(network)
        # A missing view has length 0. Its features must be finite before they are set to zero.
        embedded = cast(Any, network).embed(x, None if lengths is None else lengths.clamp_min(1))
        features[name] = embedded if present is None else embedded * present.to(embedded.dtype).unsqueeze(1)
    return features


def apply_classifier(layer: nn.Module, features: Tensor) -> Tensor:
    """Return the logits of a fusion or a head, float32 [batch, classes]."""
    logits: Tensor = layer(features)
    return logits.float()


def select_present(network: nn.Module, batch: Batch) -> Batch:
    """Return a batch with weight 0 for examples without the network's view."""
    present = batch.present.get(view_of(network))
    if present is None:
        return batch
    weight = present.float()
    return dataclasses.replace(batch, weight=weight if batch.weight is None else weight * batch.weight)


def compute_logits(method: Method, models: Mapping[str, nn.Module], name: str, batch: Batch) -> Tensor:
    """Compute the logits of a client's model for a batch, [batch, outputs].

    Args:
        method: The method.
        models: All models of the client, by name.
        name: Name of the model. A model in ``method.on_features`` reads the features of all encoders.
        batch: The input.
    """
    if name in method.on_features:
        return compute_fusion(models, batch)
    logits: Tensor = models[name](*batch.input_of(models[name]))
    return logits


@contextlib.contextmanager
def use_teacher(step: Step, tensors: Tensors) -> Iterator[None]:
    """Compute with a teacher's tensors in all networks, in evaluation mode and without gradients, inside a ``with`` block."""
    with contextlib.ExitStack() as stack:
        for name in step.models:
            stack.enter_context(step.teacher(name, tensors))
        yield


def collect_fusion_tensors(step: Step) -> dict[str, Tensor]:
    """Return the tensors of the encoders and the fusion, without heads."""
    heads = tuple(f"{name}/output." for name in step.models if name != FUSION)
    return {name: value for name, value in step.floating_state().items() if not name.startswith(heads)}


def select_clients(state: State, clients: Sequence[Client], kind: str) -> list[Client]:
    """Return the participating clients with all views (:data:`ALL`) or with only some (:data:`SOME`)."""
    kinds = cast(str, state.extra[_KINDS])
    if len(clients) < len(kinds):  # a part of the population, as with train.fleet
        return [client for client in clients if kinds[client.index] == kind and client.chance]
    members = (clients[index] for index, letter in enumerate(kinds) if letter == kind)
    return [client for client in members if client.chance]


def count_kinds(updates: UpdateCounter) -> dict[str, Ratio]:
    """Return the number of clients with the fusion (``clients/fused``) and without it (``clients/apart``)."""
    fused = max((count for name, count in updates.senders.items() if name.startswith(f"{FUSION}/")), default=0)
    return {"clients/fused": Ratio(fused, 1), "clients/apart": Ratio(len(updates.clients) - fused, 1)}
