"""Replica: built networks, reused for many clients. Resetting and loading them takes only a few operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.training.networks import Networks

_Ownership = Callable[[str], bool | None]
"""Ownership of a tensor by flat name. True: shared, False: private, ``None``: fixed."""

_Origin = tuple[str | None, int]
"""Origin of a block of values: the key of the received entry (``None``: the initial values), and the block's first element."""


class Replica:
    """Reusable networks for a single client at a time.

    If possible, all floating-point tensors are views of one vector. Loading the received tensors then takes one copy for each
    contiguous block, instead of several operations for each tensor. Reading the update takes one copy (``flatten``). On a GPU
    the tensors stay where PyTorch has put them: cuDNN's batch norm fails at the addresses inside a vector, and one operation
    copies many tensors.
    """

    def __init__(
        self, models: dict[str, nn.Module], fixed: frozenset[str] = frozenset(), users_code: bool = True
    ) -> None:
        """Take over freshly built networks, already on their device.

        Args:
            models: networks by name.
            fixed: flat names of the fixed tensors.
            users_code: whether a user's code works with the networks, and may replace their parts.
        """
        self.models = models
        self.fixed = fixed
        for name, model in models.items():
            for key, parameter in model.named_parameters():
                if f"{name}/{key}" in fixed:
                    parameter.requires_grad_(False)
        self._vector = _Vector.from_models(models)
        self._parts = _Parts(models)
        tensors = self._parts.tensors
        self._leaves = [(tensor, tensor.requires_grad) for tensor in tensors if tensor.is_leaf]
        self._initial = (
            {name: value.clone() for name, value in _list_state(models).items()} if self._vector is None else {}
        )
        loaded = {id(tensor) for tensor in self._vector.tensors} if self._vector else _list_state_ids(models)
        # An expanded tensor (stride 0) cannot be written to.
        internal = [tensor for tensor in tensors if id(tensor) not in loaded and 0 not in tensor.stride()]
        self._internal = [(tensor, tensor.detach().clone()) for tensor in internal]
        """Tensors that are neither received nor kept (counters, tables), and their initial values."""
        self.networks = None if users_code else Networks.from_models(models, fixed)
        """Index of the parts, or ``None`` if a user's code may replace them."""

    @property
    def intact(self) -> bool:
        """True if :meth:`start` can reset the networks. False: a user's code has replaced parts; build new networks."""
        return self.networks is not None or self._parts.unchanged

    @torch.no_grad()
    def start(
        self,
        received: Mapping[str, FlatTensors],
        kept: Mapping[str, Tensor],
        shared: Callable[[str], bool],
        whose: str = "",
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Reset the networks and load the tensors of the next client. No trace of the last client remains.

        Args:
            received: the server's tensors by key. A shared tensor comes from the first entry with its name.
            kept: the client's private tensors by flat name.
            shared: ``Method.shared``.
            whose: owner of the networks, for error messages.
            fixed: the client's slices of fixed tensors by flat name, if its networks are cut from full ones.

        Raises:
            ConfigError: a shape differs from the network's.
        """
        if self._vector is not None:
            self._vector.load(received, kept, self._make_ownership(shared), whose)
        else:
            self._load(received, kept, self._make_ownership(shared), whose)
        if fixed:
            state = _list_state(self.models)
            for name, value in fixed.items():
                state[name].copy_(value)
        for tensor, initial in self._internal:
            tensor.copy_(initial)
        for leaf, trainable in self._leaves:
            if leaf.requires_grad is not trainable:
                leaf.requires_grad_(trainable)
            if leaf.grad is not None:
                leaf.grad = None
        if not all(layer.training for layer in self._parts.layers):
            for model in self.models.values():
                model.train()

    def _make_ownership(self, shared: Callable[[str], bool]) -> _Ownership:
        return lambda name: None if name in self.fixed else shared(name)

    def _load(
        self, received: Mapping[str, FlatTensors], kept: Mapping[str, Tensor], shared: _Ownership, whose: str
    ) -> None:
        state = _list_state(self.models)
        devices = {value.device for value in state.values()}
        sent: list[Mapping[str, Tensor]] = list(received.values())
        if len(devices) == 1:  # one transfer to a GPU, then copies on it
            sent = [tensors.layout.views(tensors.to(*devices)) for tensors in received.values()]
        floating: list[Tensor] = []
        values: list[Tensor] = []
        for name, value in state.items():
            origin: Mapping[str, Tensor] = self._initial
            is_shared = shared(name)
            if value.is_floating_point() and is_shared is not None:
                origin = next((tensors for tensors in (sent if is_shared else [kept]) if name in tensors), origin)
            check_shape(name, origin[name].shape, value.shape, whose)
            if value.is_floating_point():
                floating.append(value)
                values.append(origin[name])
            else:
                value.copy_(origin[name])
        if floating:
            torch._foreach_copy_(floating, values)


def check_shape(name: str, given: Sequence[int], expected: Sequence[int], whose: str) -> None:
    """Check the shape of a tensor against the network's tensor.

    Args:
        name: flat name, ``"model/layer.weight"``.
        given: shape of the tensor.
        expected: shape of the network's tensor.
        whose: owner of the network, for the message.

    Raises:
        ConfigError: the shapes differ.
    """
    if tuple(given) != tuple(expected):
        model, _, tensor = name.partition("/")
        raise ConfigError(
            f"{whose or 'loading'}: {tensor!r} of model {model!r} has shape {list(given)}, but the network expects "
            f"{list(expected)}. Use the same architecture for all clients of this model, or let the method's plan() send each "
            f"architecture its own entry of the server's state."
        )


def _list_state(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{name}/{key}": value for name, model in models.items() for key, value in model.state_dict().items()}


def _list_state_ids(models: Mapping[str, nn.Module]) -> set[int]:
    return {id(tensor) for model in models.values() for tensor in model.state_dict(keep_vars=True).values()}


class _Parts:
    """Snapshot of the replaceable parts of networks.

    It covers models, layers and their attributes (parameters, buffers, hooks, methods), nested lists and dicts, and the hooks,
    attributes and memory addresses of tensors.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        """All tensors of the networks, including plain attributes."""
        self.layers = [layer for model in models.values() for layer in model.modules()]
        self._holders: list[Any] = []
        """Dicts, lists and sets with parts."""
        self._known: dict[int, object] = {}
        """Visited objects by id. Keeping the objects alive keeps their ids unique."""
        self._visit(models)
        for layer in self.layers:
            self._visit(vars(layer))
        self._filled = [holder for holder in self._holders if holder]
        self._strided = [tensor for tensor in self.tensors if tensor.layout is torch.strided]
        self._original = self._take_snapshot()

    def _visit(self, value: Any) -> None:
        if id(value) in self._known:
            return
        self._known[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors.append(value)
            for attached in (vars(value), value._backward_hooks, value._post_accumulate_grad_hooks):
                self._visit(attached)
        elif isinstance(value, (dict, list, tuple, set)):
            if not isinstance(value, tuple):
                self._holders.append(value)
            for item in value.values() if isinstance(value, dict) else value:
                self._visit(item)

    def _take_snapshot(self) -> object:
        return (
            [*map(type, self.layers)],
            [*map(len, self._holders)],
            [_list_ids(holder) for holder in self._filled],
            [*map(Tensor.data_ptr, self._strided)],
            [(tensor.shape, tensor.stride()) for tensor in self._strided],
            [(id(tensor._backward_hooks), id(tensor._post_accumulate_grad_hooks)) for tensor in self.tensors],
        )

    @property
    def unchanged(self) -> bool:
        """True if no part was replaced or moved. The check takes about 50 microseconds for a small network."""
        return self._take_snapshot() == self._original


def _list_ids(holder: Any) -> object:
    """Return the ids of the items of a dict, list or set, ignoring a layer's ``training`` flag."""
    if not isinstance(holder, dict):
        return [*map(id, holder)] if isinstance(holder, list) else sorted(map(id, holder))
    values = [*map(id, holder.values())]
    if "training" in holder:  # Replica.start resets the mode of every layer
        values[[*holder].index("training")] = 0
    return [*holder], values


class _Vector:
    """Vector of all floating-point tensors of the models, as views."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self.tensors = list(floating.values())
        self._layout = Layout.from_tensors(floating)
        self._values = torch.empty(self._layout.size)
        for name, view in self._layout.views(self._values).items():
            view.copy_(floating[name].detach())
            floating[name].data = view
        self._initial = self._values.clone()
        self._plans: dict[Any, tuple[Any, list[tuple[slice, _Origin]]]] = {}

    @classmethod
    def from_models(cls, models: Mapping[str, nn.Module]) -> _Vector | None:
        """Move the models' tensors into a vector, or return ``None`` if this is impossible.

        Unsupported are GPUs, types except float32, tied tensors, and tensors that appear in the ``state_dict`` only.
        """
        tensors: dict[str, Tensor] = {}
        for model_name, model in models.items():
            for path, layer in model.named_modules(remove_duplicate=False):
                for holder in (layer._parameters, layer._buffers):
                    for key, tensor in holder.items():
                        if tensor is not None and key not in layer._non_persistent_buffers_set:
                            tensors[f"{model_name}/{path}.{key}" if path else f"{model_name}/{key}"] = tensor
        state = _list_state(models)
        floating = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
        if (
            state.keys() != tensors.keys()
            or not floating
            or len({id(tensor) for tensor in tensors.values()}) < len(tensors)
            or any(tensor.dtype != torch.float32 or tensor.layout != torch.strided for tensor in floating)
            or any(tensor.device.type != "cpu" for tensor in floating)
        ):
            return None
        return cls({name: tensors[name] for name in state})

    def load(
        self, received: Mapping[str, FlatTensors], kept: Mapping[str, Tensor], shared: _Ownership, whose: str
    ) -> None:
        """Load the tensors of a client. Takes the arguments of :meth:`Replica.start`."""
        for block, (key, start) in self._plan(received, shared, whose):
            source = self._initial if key is None else received[key].whole
            self._values[block].copy_(source[start : start + block.stop - block.start])
        for name, value in kept.items():
            if name in self._layout.positions and shared(name) is False:
                check_shape(name, value.shape, self._layout.shapes[self._layout.positions[name]], whose)
                self._values[self._layout.columns(name)].copy_(value.flatten())

    def _plan(self, received: Mapping[str, FlatTensors], shared: _Ownership, whose: str) -> list[tuple[slice, _Origin]]:
        """Plan the origin of each block of the vector, joining adjacent blocks. Private tensors get their initial values."""
        layouts = [(key, tensors.layout) for key, tensors in received.items()]
        layout_ids = tuple((key, id(layout)) for key, layout in layouts)
        if layout_ids not in self._plans:
            plan: list[tuple[slice, _Origin]] = []
            for name in self._layout.names:
                block, shape = self._layout.columns(name), self._layout.shapes[self._layout.positions[name]]
                key: str | None = None
                start = block.start
                for entry, layout in layouts if shared(name) else ():
                    if name in layout.positions:
                        check_shape(name, layout.shapes[layout.positions[name]], shape, whose)
                        key, start = entry, layout.columns(name).start
                        break
                if plan:
                    last, (last_key, first) = plan[-1]
                    if last_key == key and first + last.stop - last.start == start:
                        plan[-1] = (slice(last.start, block.stop), (last_key, first))
                        continue
                plan.append((block, (key, start)))
            self._plans[layout_ids] = (layouts, plan)  # keeps the layouts alive, so that their ids stay unique
        return self._plans[layout_ids][1]
