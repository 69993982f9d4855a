"""Stacked models of several clients, and batched losses and forward passes.

``torch.func.vmap`` maps code for a single client over the leading dimension (executor.py lists the rules for such code).
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
from raydfl.training.ownership import set_training_mode
from raydfl.training.randomness import use_step_seed
from raydfl.training.step import Step
from raydfl.training.together.handles import TensorHandle, TensorSource, Unavailable, UnequalClientsError
from raydfl.training.together.lockstep import NotBatchableError


class MissingSourcesError(Exception):
    """A loss read unstacked tensors of its step."""


class _ModelTensors:
    """Parameters and buffers of a client's models, by names common to all clients.

    A tensor in several places (tied weights) has a single name. :meth:`install` resembles ``torch.func.functional_call``, but
    serves several modules for the whole computation of a loss, and finds the places of the tensors only once.
    """

    def __init__(self, models: Mapping[str, nn.Module], fixed: frozenset[str] = frozenset()) -> None:
        self.by_name: dict[str, Tensor] = {}
        """Live tensors by name. The name starts with the model's name."""
        self.fixed: dict[str, Tensor] = {}
        """Tensors of ``by_name`` with equal values for all clients."""
        self.buffers: list[str] = []
        self.trainable: dict[str, list[str]] = {name: [] for name in models}
        """Names of the trainable parameters by model."""
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._attributes: list[dict[str, Any]] = []
        """Live attributes of every layer."""
        names: dict[int, str] = {}
        for model, module in models.items():
            for path, layer in module.named_modules():
                self._attributes.append(vars(layer))
                for holder in (layer._parameters, layer._buffers):
                    for key, tensor in holder.items():
                        if tensor is None:
                            continue
                        name = names.setdefault(id(tensor), f"{model}/{path}.{key}")
                        self._places.append((cast("dict[str, Any]", holder), key, name))
                        if name in self.by_name:
                            continue
                        self.by_name[name] = tensor
                        if (f"{model}/{path}.{key}" if path else f"{model}/{key}") in fixed:
                            self.fixed[name] = tensor
                            continue
                        if holder is layer._buffers:
                            self.buffers.append(name)
                        elif tensor.requires_grad:
                            self.trainable[model].append(name)

    @contextlib.contextmanager
    def install(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with the given tensors inside a ``with`` block.

        Raises:
            NotBatchableError: a model replaced a buffer or set an attribute. The change would be lost.
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
                raise NotBatchableError(f"a model stores a value in its forward(), in its attribute {changed[0]!r}")
        finally:
            for holder, key, name in self._places:
                holder[key] = self.by_name[name]
            for live, before in attributes:
                for name in live.keys() - before.keys():
                    del live[name]
                live.update(before)


class StackedClients:
    """Stacked models of several clients.

    Args:
        steps: steps of the clients, sorted by decreasing number of optimiser steps.
        names: names of the models.
        trained: names of the trained models. If empty, all models are set to evaluation mode.
    """

    def __init__(self, steps: Sequence[Step], names: Sequence[str], trained: tuple[str, ...]) -> None:
        self.steps = steps
        self.names = names
        self.trained = trained
        # Clients with cut networks have different channels of a fixed tensor.
        common = steps[0].fixed.difference(*(step.cuts for step in steps))
        distinct = {id(step): step for step in steps}  # examples of a single client share its step
        tensors = {
            key: _ModelTensors({name: step.models[name] for name in names}, common) for key, step in distinct.items()
        }
        self.tensors = [tensors[id(step)] for step in steps]
        self.sources: tuple[TensorSource, ...] = ()
        """Known sources of the loss, stacked by :meth:`start`."""
        for step in distinct.values():
            if trained:
                set_training_mode([(name, step.models[name]) for name in names], step.fixed)
            else:
                for name in names:
                    step.models[name].eval()

    def start(self) -> None:
        """Stack the current tensors of all clients."""
        self.stacked: dict[str, Tensor] = {}
        """Parameters and buffers [clients, ...] by name."""
        for name in self.tensors[0].by_name:
            if name in self.tensors[0].fixed:
                continue
            self.stacked[name] = torch.stack([tensors.by_name[name].detach() for tensors in self.tensors])
        self.live = dict(self.stacked)
        """Rows of ``stacked`` of the active clients. Trained tensors are leaves."""
        self.active = len(self.steps)
        self.leaves: dict[str, dict[str, Tensor]] = {}
        for model in self.trained:
            trainable = self.tensors[0].trainable[model]
            self.leaves[model] = {name: self.live[name].requires_grad_() for name in trainable}
        self._same: dict[TensorSource, Tensor] = {}
        self._differing: dict[TensorSource, Tensor] = {}
        for source in self.sources:
            try:
                values = source.read(self.steps)
            except UnequalClientsError:  # raised later if the loss of this group reads the tensor too
                continue
            if _is_same_everywhere(source, values):
                # A copy, so that a loss writing into it does not change the client's tensor.
                self._same[source] = values[0].detach().clone()
            else:
                self._differing[source] = torch.stack([value.detach() for value in values])
        self._available: dict[TensorSource, Tensor] = {}
        self._requested: dict[TensorSource, None] = {}
        self._visible_step = self._make_visible_step()

    def _make_visible_step(self) -> Step:
        """Create the step for batched losses, with stand-ins for unavailable fields."""
        first = self.steps[0]
        received = {
            key: TensorHandle(key, [s.received.get(key, {}) for s in self.steps], self._available, self._requested)
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
            state=cast(Any, TensorHandle(None, [s.state for s in self.steps], self._available, self._requested)),
            models={name: first.models[name] for name in self.names},
            execution=Execution(),
        )

    def truncate(self, clients: int) -> None:
        """Drop all but the first clients from the following computations. Leaves become views of the stacked memory."""
        if clients == self.active:
            return
        self.active = clients
        for name, value in self.live.items():
            self.live[name] = value.detach()[:clients].requires_grad_(value.requires_grad)

    def compute(
        self, function: Callable[[Step, Batch], Any], batch: Batch, seeds: Tensor | None, shared_batch: bool = False
    ) -> Any:
        """Compute a function for every active client.

        Args:
            function: function of a step and a batch: a forward pass, or a loss with reports.
            batch: batch with a leading dimension of clients, unless ``shared_batch``.
            seeds: seeds of this step, int64 [clients].
            shared_batch: whether all clients compute the same examples. The batch then has no dimension of clients.

        Returns:
            The function's result with tensors [clients, ...]: a tensor, or several in a tuple or mapping.

        Raises:
            MissingSourcesError: the loss read unstacked tensors, now in ``sources``. Repeat from :meth:`start`.
            NotBatchableError: the reason why the function cannot be batched.
        """
        fields = batch.tensors()
        mapped_fields = {} if shared_batch else fields
        mapped_sources = {source: value[: self.active] for source, value in self._differing.items()}
        # vmap maps over arguments. Values equal for all clients reach the function through its closure.
        arguments = [*self.live.values(), *mapped_sources.values(), *mapped_fields.values()]
        if seeds is not None:
            arguments.append(seeds)

        def run_client(*tensors: Tensor) -> Any:
            remaining = iter(tensors)
            installed = {**self.tensors[0].fixed, **{name: next(remaining) for name in self.live}}
            self._available.clear()
            self._available.update(self._same)
            self._available.update((source, next(remaining)) for source in mapped_sources)
            client_batch = Batch.from_tensors({**fields, **{name: next(remaining) for name in mapped_fields}})
            with use_step_seed(next(remaining, None)), self.tensors[0].install(installed):
                return function(self._visible_step, client_batch)

        inputs = [*self._same.values(), *mapped_sources.values(), *fields.values()]
        versions = [tensor._version for tensor in inputs]
        value = torch.vmap(run_client, randomness="different")(*arguments)
        if versions != [tensor._version for tensor in inputs]:
            raise NotBatchableError("the loss writes into a tensor of its step or batch")
        if self._requested:
            for source in self._requested:
                source.read(self.steps)
            self.sources = (*self.sources, *self._requested)
            raise MissingSourcesError
        return value

    def write_back(self) -> None:
        """Copy the results into the clients' models."""
        changed = [name for leaves in self.leaves.values() for name in leaves]
        with torch.no_grad():
            for name in (*changed, *self.tensors[0].buffers):
                torch._foreach_copy_([tensors.by_name[name] for tensors in self.tensors], self.stacked[name].unbind())


def _is_same_everywhere(source: TensorSource, values: Sequence[Tensor]) -> bool:
    """Return whether a source has the same value for all clients. A single copy then suffices."""
    first = values[0]
    if all(value is first for value in values):
        return True
    # Each client has its own copy of the server's tensors. A comparison on a GPU would synchronise it.
    return source.key is not None and first.device.type == "cpu" and all(first.equal(value) for value in values[1:])
