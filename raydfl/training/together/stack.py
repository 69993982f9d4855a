"""The models of several clients stacked along a leading dimension, and a loss or a forward pass computed for all of them.

``torch.func.vmap`` runs code that was written for one client over it (executor.py has the rules for such code).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from raydfl.core.types import Batch
from raydfl.training.execution import Execution
from raydfl.training.fates import begin_training
from raydfl.training.randomness import step_randomness
from raydfl.training.step import Step
from raydfl.training.together.handles import Source, TensorHandle, Unavailable, UnlikeError
from raydfl.training.together.lockstep import NotBatchableError


class MoreSourcesError(Exception):
    """A loss read something that was not stacked."""


class _Tensors:
    """All parameters and buffers of some models of one client, by names that are the same at every client.

    A tensor that stands in several places (tied weights) has one name. What ``torch.func.functional_call`` does to one module
    for one call is done here to several for as long as a loss is computed, and without looking for the places every time.
    """

    def __init__(self, models: Mapping[str, nn.Module], fixed: frozenset[str] = frozenset()) -> None:
        self.own: dict[str, Tensor] = {}
        """Live tensors by name; a parameter's begins with its model's."""
        self.fixed: dict[str, Tensor] = {}
        """Those of them that are the same at all clients."""
        self.buffers: list[str] = []
        self.trainable: dict[str, list[str]] = {name: [] for name in models}
        """Names of the parameters that require gradients, by model."""
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._attributes: list[dict[str, Any]] = []
        """The attributes of every layer, live."""
        known: dict[int, str] = {}
        for model, module in models.items():
            for path, layer in module.named_modules():
                self._attributes.append(vars(layer))
                for holder in (layer._parameters, layer._buffers):
                    for key, tensor in holder.items():
                        if tensor is None:
                            continue
                        name = known.setdefault(id(tensor), f"{model}/{path}.{key}")
                        self._places.append((cast("dict[str, Any]", holder), key, name))
                        if name in self.own:
                            continue
                        self.own[name] = tensor
                        if (f"{model}/{path}.{key}" if path else f"{model}/{key}") in fixed:
                            self.fixed[name] = tensor
                            continue
                        if holder is layer._buffers:
                            self.buffers.append(name)
                        elif tensor.requires_grad:
                            self.trainable[model].append(name)

    @contextlib.contextmanager
    def replaced(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the models compute with these tensors.

        Raises:
            NotBatchableError: a model put a new tensor in a buffer's place, or set an attribute: it would be lost.
        """
        attributes = [(live, dict(live)) for live in self._attributes]
        try:
            for holder, key, name in self._places:
                holder[key] = tensors[name]
            yield
            if self.buffers and any(holder[key] is not tensors[name] for holder, key, name in self._places):
                raise NotBatchableError("a model replaces a buffer in its forward(); change it in place instead")
            changed = [name for live, before in attributes for name in live if live[name] is not before.get(name)]
            if changed:
                raise NotBatchableError(f"a model stores something in its forward(), in its attribute {changed[0]!r}")
        finally:
            for holder, key, name in self._places:
                holder[key] = self.own[name]
            for live, before in attributes:
                for name in live.keys() - before.keys():
                    del live[name]
                live.update(before)


class StackedClients:
    """Several clients' models stacked.

    Args:
        steps: of the clients, the one with the most steps to do first.
        names: the models that are computed.
        trained: those of them that are trained; without any, all are set to evaluation.
    """

    def __init__(self, steps: Sequence[Step], names: Sequence[str], trained: tuple[str, ...]) -> None:
        self.steps = steps
        self.names = names
        self.trained = trained
        # Of a network that is cut, each client has other channels of a fixed tensor.
        alike = steps[0].fixed.difference(*(step.cuts for step in steps))
        self.tensors = [_Tensors({name: step.models[name] for name in names}, alike) for step in steps]
        self.sources: tuple[Source, ...] = ()
        """The tensors of its step that the loss reads, as far as they are known; :meth:`start` stacks them."""
        for step in steps:
            if trained:
                begin_training([(name, step.models[name]) for name in names], step.fixed)
            else:
                for name in names:
                    step.models[name].eval()

    def start(self) -> None:
        """Stack everything as the clients have it now."""
        self.stacked: dict[str, Tensor] = {}
        """[clients, ...] by name, of parameters and buffers."""
        for name in self.tensors[0].own:
            if name in self.tensors[0].fixed:
                continue
            self.stacked[name] = torch.stack([tensors.own[name].detach() for tensors in self.tensors])
        self.live = dict(self.stacked)
        """The part of ``stacked`` that is computed: of the clients that still have steps to do; trained ones are leaves."""
        self.active = len(self.steps)
        self.leaves: dict[str, dict[str, Tensor]] = {}
        for model in self.trained:
            trainable = self.tensors[0].trainable[model]
            self.leaves[model] = {name: self.live[name].requires_grad_() for name in trainable}
        self._same: dict[Source, Tensor] = {}
        self._differing: dict[Source, Tensor] = {}
        for source in self.sources:
            try:
                values = source.of(self.steps)
            except UnlikeError:  # only if the loss reads it here too are these clients unlike
                continue
            if _all_the_same(source, values):
                # A copy: a loss that writes into it shall not reach the client's.
                self._same[source] = values[0].detach().clone()
            else:
                self._differing[source] = torch.stack([value.detach() for value in values])
        self._given: dict[Source, Tensor] = {}
        self._wanted: dict[Source, None] = {}
        self._shown = self._show()

    def _show(self) -> Step:
        """Return what a loss sees as its step."""
        first = self.steps[0]
        received = {
            key: TensorHandle(key, [s.received.get(key, {}) for s in self.steps], self._given, self._wanted)
            for key in first.received
        }
        return dataclasses.replace(
            first,
            client=cast(Any, Unavailable("client")),
            data=cast(Any, Unavailable("data")),
            rng=cast(Any, Unavailable("rng")),
            moments=cast(Any, Unavailable("moments")),
            cuts=cast(Any, Unavailable("cuts")),
            received=cast(Any, received),
            state=cast(Any, TensorHandle(None, [s.state for s in self.steps], self._given, self._wanted)),
            models={name: first.models[name] for name in self.names},
            execution=Execution(),
        )

    def keep(self, clients: int) -> None:
        """From now on compute the first clients only (a leaf becomes a view of a leaf: memory stays the same)."""
        if clients == self.active:
            return
        self.active = clients
        for name, value in self.live.items():
            self.live[name] = value.detach()[:clients].requires_grad_(value.requires_grad)

    def compute(
        self, function: Callable[[Step, Batch], Any], batch: Batch, seeds: Tensor | None, shared_batch: bool = False
    ) -> Any:
        """Return what a function gives for every active client: tensors [clients, ...], one or several in a tuple or mapping.

        Args:
            function: of a step and a batch: a forward pass, or a loss with its reports.
            batch: every tensor with a leading dimension of clients, unless ``shared_batch``.
            seeds: int64 [clients], of this step.
            shared_batch: it has none: all clients compute the same examples.

        Raises:
            MoreSourcesError: ``sources`` now has what was missing; to be begun again with :meth:`start`.
            NotBatchableError: it cannot be computed so, and why.
        """
        fields = batch.tensors()
        own_fields = {} if shared_batch else fields
        own_sources = {source: value[: self.active] for source, value in self._differing.items()}
        # What is mapped comes in as an argument; what is the same for all is simply there.
        arguments = [*self.live.values(), *own_sources.values(), *own_fields.values()]
        if seeds is not None:
            arguments.append(seeds)

        def one(*tensors: Tensor) -> Any:
            given = iter(tensors)
            installed = {**self.tensors[0].fixed, **{name: next(given) for name in self.live}}
            self._given.clear()
            self._given.update(self._same)
            self._given.update((source, next(given)) for source in own_sources)
            own = Batch.from_tensors({**fields, **{name: next(given) for name in own_fields}})
            with step_randomness(next(given, None)), self.tensors[0].replaced(installed):
                return function(self._shown, own)

        given = [*self._same.values(), *own_sources.values(), *fields.values()]
        versions = [tensor._version for tensor in given]
        value = torch.vmap(one, randomness="different")(*arguments)
        if versions != [tensor._version for tensor in given]:
            raise NotBatchableError("the loss writes into a tensor of its step or batch")
        if self._wanted:
            for source in self._wanted:
                source.of(self.steps)
            self.sources = (*self.sources, *self._wanted)
            raise MoreSourcesError
        return value

    def write_back(self) -> None:
        """Give every client what was computed for it."""
        changed = [name for leaves in self.leaves.values() for name in leaves]
        with torch.no_grad():
            for name in (*changed, *self.tensors[0].buffers):
                torch._foreach_copy_([tensors.own[name] for tensors in self.tensors], self.stacked[name].unbind())


def _all_the_same(source: Source, values: Sequence[Tensor]) -> bool:
    """Return whether all clients hold the same there, so that one tensor does for all."""
    first = values[0]
    if all(value is first for value in values):
        return True
    # What the server sent is the same at all clients, each in memory of its own; on a GPU asking would wait for it.
    return source.key is not None and first.device.type == "cpu" and all(first.equal(value) for value in values[1:])
