"""Methods with an encoder for each view: what their networks are, which clients have which, and how they are measured.

The models are one network for each view, named as the configuration names them, and ``fusion``. A network is an encoder (all up to
its last layer) and a head (its last layer, ``output``). ``fusion`` is a classifier of what all encoders make of an example, end to
end; of a view that a clip lacks it sees zeros.

A client has the networks of the views that it has, and ``fusion`` if it has all of them. It builds, receives and sends no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.needs import Needs
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, ModelSpec, Ratio, State, Tensors, view_of
from raydfl.data import Examples
from raydfl.methods._layers import last_layer
from raydfl.methods._method import Counted, Method
from raydfl.models import build_model
from raydfl.rules import Rule, UniformMean
from raydfl.training import Loss, Step, computing_in, fit

FUSION, GLOBAL = "fusion", "global"

_KINDS = "clients"
"""The key of the state's ``extra`` under which it stands which client has all views: a letter for each, :data:`ALL` or
:data:`SOME`."""
ALL, SOME = "a", "s"


@dataclass(frozen=True, kw_only=True)
class WithViews(Method):
    """Base of methods with an encoder for each view."""

    # Clients that have a view are known by their positions, so there is one list of clients.
    needs = Needs(objectives=("classify",), one_class_list=True, columns=("views",))

    on_features: ClassVar[tuple[str, ...]] = (FUSION,)

    default_rule: ClassVar[Rule] = UniformMean()

    models: ClassVar[Mapping[str, str]] = {"audio": "crnn_lite", "video": "cnn_small", FUSION: "fusion"}

    student: Annotated[
        str | None,
        Field(
            description="the model whose accuracy counts, trained where there is no other view; null: the first of models"
        ),
    ] = None

    def client_models(self, models: Sequence[ModelSpec], profile: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
        """Return the networks of the views that a client has, and ``fusion`` where these are all."""
        has = (FIRST_VIEW, *profile.get("views", ()))
        own = [spec for spec in models if spec.name == FUSION or spec.view in has]
        return tuple(own if len(own) == len(models) else (spec for spec in own if spec.name != FUSION))

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build the networks, and the fusion for the features that they give.

        Raises:
            ConfigError: a network has no ``embed``, or no linear ``output``.
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
        """Return the state of all networks, and which clients have all views."""
        state = super().init(clients, models, rng)
        kinds = (ALL if any(spec.name == FUSION for spec in client.models) else SOME for client in clients)
        return dataclasses.replace(state, extra={**state.extra, _KINDS: "".join(kinds)})

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure the networks that :meth:`measured` names, of those received; ``fusion`` with all encoders."""
        there = {name.partition("/")[0] for tensors in step.received.values() for name in tensors}
        found: dict[str, Any] = {}
        for name in step.options.get("models", self.measured(step)):
            if name == FUSION and there.issuperset(step.models) and FUSION in step.models:
                measured = self._of_fusion(step, examples, batch_size)
            elif name != FUSION and name in step.models and name in there:
                measured = self.objective.evaluate(step, name, examples, batch_size)
            else:
                continue
            found |= {f"{name}/{metric}": value for metric, value in measured.items()}
        return found

    def measured(self, step: Step) -> Sequence[str]:
        """Return the models of which something is known to be measured: by default the student, and the fusion."""
        return [*list(step.models)[:1], FUSION]

    def _of_fusion(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        for network in step.models.values():
            network.eval()
        with torch.no_grad(), computing_in(step.training.precision, step.device):
            batches = examples.batches(batch_size, None, step.device)
            logits = torch.cat([fused(step.models, batch).cpu() for batch in batches])
        return self.objective.metrics(logits, examples)

    def alone(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Return the loss of one network, over the examples that have its view."""
        present = batch.present.get(view_of(step.models[name]))
        if present is not None:
            weight = present.float()
            batch = dataclasses.replace(batch, weight=weight if batch.weight is None else weight * batch.weight)
        return self.objective.loss(step, name, batch)

    def apart(self, step: Step) -> Metrics:
        """Train each network by itself, one after another; metrics of those after the first have its name before them."""
        found: dict[str, Any] = {}
        for name in encoders_of(step):
            measured = fit(step, self._loss_of(name), models=(name,))
            found |= {f"{name}/{metric}": value for metric, value in measured.items()} if found else measured
        return found

    def _loss_of(self, name: str) -> Loss:
        def loss(step: Step, batch: Batch) -> Tensor:
            return self.alone(step, name, batch)

        return loss

    def together(self, step: Step, batch: Batch) -> Tensor:
        """Return the cross-entropy of the fusion of all encoders."""
        each = nn.functional.cross_entropy(fused(step.models, batch), batch.y, reduction="none")
        return batch.mean(each)


def encoders_of(step: Step) -> list[str]:
    """Return the names of a client's networks but the fusion's."""
    return [name for name in step.models if name != FUSION]


def fused(models: Mapping[str, nn.Module], batch: Batch) -> Tensor:
    """Return what the fusion makes of the features of all other models, in their order: logits float32 [batch, classes]."""
    features: list[Tensor] = []
    for name, network in models.items():
        if name == FUSION:
            continue
        present, (x, lengths) = batch.present.get(view_of(network)), batch.input_of(network)
        own = cast(Any, network).embed(x, None if lengths is None else lengths.clamp_min(1))
        features.append(own if present is None else own * present.to(own.dtype).unsqueeze(1))
    logits: Tensor = models[FUSION](torch.cat(features, dim=1))
    return logits.float()


def compute_logits(method: Method, models: Mapping[str, nn.Module], name: str, batch: Batch) -> Tensor:
    """Return the outputs of a model of a method, float32 [batch, outputs]; of one on features for those of the other models."""
    logits: Tensor = fused(models, batch) if name in method.on_features else models[name](*batch.input_of(models[name]))
    return logits


@contextlib.contextmanager
def teaching(step: Step, tensors: Tensors) -> Iterator[None]:
    """Have all networks compute with other tensors, in evaluation mode and without gradients, inside a ``with`` block."""
    with contextlib.ExitStack() as stack:
        for name in step.models:
            stack.enter_context(step.teacher(name, tensors))
        yield


def encoders_and_fusion(step: Step) -> dict[str, Tensor]:
    """Return the shared tensors of all networks but their heads."""
    heads = tuple(f"{name}/output." for name in step.models if name != FUSION)
    return {name: value for name, value in step.floating_state().items() if not name.startswith(heads)}


def of_kind(state: State, clients: Sequence[Client], kind: str) -> list[Client]:
    """Return the clients that have all views (:data:`ALL`), or those that do not (:data:`SOME`), of those that take part."""
    kinds = cast(str, state.extra[_KINDS])
    members = (clients[place] for place, own in enumerate(kinds) if own == kind)
    return [client for client in members if client.chance]


def kinds_counted(updates: Counted) -> dict[str, Ratio]:
    """Return how many clients trained the fusion, and how many did not; what a kind trains is kept where it has none."""
    fused = max((count for name, count in updates.senders.items() if name.startswith(f"{FUSION}/")), default=0)
    return {"clients/fused": Ratio(fused, 1), "clients/apart": Ratio(len(updates.clients) - fused, 1)}
