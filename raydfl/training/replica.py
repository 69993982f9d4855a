"""Built networks that serve one client after another: put back and loaded in a few operations, however many tensors they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.training.networks import Networks

_Fates = Callable[[str], bool | None]
"""True where a tensor of that flat name is shared, False where it is private; ``None``: it is fixed."""

_Source = tuple[str | None, int]
"""The origin of a stretch of values: the key of what was received, or ``None`` for the initial values; its first element."""


class Replica:
    """One client's networks by name.

    Where it is possible, all floating tensors are views of one vector: what a client receives is then copied by as many
    operations as there are stretches of it, instead of several for each tensor, and what it sends by one (``flatten``).
    """

    def __init__(
        self, models: dict[str, nn.Module], fixed: frozenset[str] = frozenset(), users_code: bool = True
    ) -> None:
        """Take over freshly built networks, which lie on their device.

        Args:
            models: by name.
            fixed: flat names of tensors that stay as they are built.
            users_code: whether a user's code works with them, and may put other parts in the place of theirs.
        """
        self.models = models
        self.fixed = fixed
        for name, model in models.items():
            for key, parameter in model.named_parameters():
                if f"{name}/{key}" in fixed:
                    parameter.requires_grad_(False)
        self._vector = _Vector.of(models)
        self._parts = _Parts(models)
        tensors = self._parts.tensors
        self._leaves = [(tensor, tensor.requires_grad) for tensor in tensors if tensor.is_leaf]
        self._initial = {name: value.clone() for name, value in _state(models).items()} if self._vector is None else {}
        loaded = {id(tensor) for tensor in self._vector.tensors} if self._vector else _loaded(models)
        others = [tensor for tensor in tensors if id(tensor) not in loaded and 0 not in tensor.stride()]
        self._others = [(tensor, tensor.detach().clone()) for tensor in others]
        """Tensors that are neither received nor kept (counters, tables), and their initial values."""
        self.networks = None if users_code else Networks.of(models, fixed)
        """Their parts, if no user's code can change these; else ``None``."""

    @property
    def whole(self) -> bool:
        """False when somebody's code has left in these networks what :meth:`start` does not put back: they are to be built anew."""
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
        """Make them what the next client begins with; nothing of the last client's is left.

        Args:
            received: the server's tensors by key: a shared tensor is taken from the first that has it.
            kept: tensors that the client itself has kept, by flat name, for those that are not shared.
            shared: the method's.
            whose: for a message: whose networks they become.
            fixed: the client's part of fixed tensors, by flat name, if its networks are parts of whole ones.

        Raises:
            ConfigError: one of these tensors has another shape than the network's.
        """
        if self._vector is not None:
            self._vector.load(received, kept, self._fates(shared), whose)
        else:
            self._load(received, kept, self._fates(shared), whose)
        if fixed:
            state = _state(self.models)
            for name, value in fixed.items():
                state[name].copy_(value)
        for tensor, initial in self._others:
            tensor.copy_(initial)
        for leaf, trainable in self._leaves:
            if leaf.requires_grad is not trainable:
                leaf.requires_grad_(trainable)
            if leaf.grad is not None:
                leaf.grad = None
        if not all(layer.training for layer in self._parts.layers):
            for model in self.models.values():
                model.train()

    def _fates(self, shared: Callable[[str], bool]) -> _Fates:
        return lambda name: None if name in self.fixed else shared(name)

    def _load(
        self, received: Mapping[str, FlatTensors], kept: Mapping[str, Tensor], shared: _Fates, whose: str
    ) -> None:
        state = _state(self.models)
        devices = {value.device for value in state.values()}
        sent: list[Mapping[str, Tensor]] = list(received.values())
        if len(devices) == 1:  # on a GPU one transfer of all, then copies there
            sent = [tensors.layout.views(tensors.to(*devices)) for tensors in received.values()]
        for name, value in state.items():
            origin: Mapping[str, Tensor] = self._initial
            fate = shared(name)
            if value.is_floating_point() and fate is not None:
                origin = next((tensors for tensors in (sent if fate else [kept]) if name in tensors), origin)
            check_shape(name, origin[name].shape, value.shape, whose)
            value.copy_(origin[name])


def check_shape(name: str, given: Sequence[int], own: Sequence[int], whose: str) -> None:
    """Refuse a tensor that has not the shape of the network's.

    Args:
        name: flat, ``"model/layer.weight"``.
        given: its shape.
        own: the network's.
        whose: network.

    Raises:
        ConfigError: it has not.
    """
    if tuple(given) != tuple(own):
        model, _, tensor = name.partition("/")
        raise ConfigError(
            f"{whose or 'loading'}: {tensor!r} of model {model!r} comes as {list(given)}, but the network has it as {list(own)}, "
            f"and no tensor is cut or repeated to fit: give one architecture to all clients that share it, or let the method's "
            f"plan() send them entries of the server's state of their own"
        )


def _state(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{name}/{key}": value for name, model in models.items() for key, value in model.state_dict().items()}


def _loaded(models: Mapping[str, nn.Module]) -> set[int]:
    return {id(tensor) for model in models.values() for tensor in model.state_dict(keep_vars=True).values()}


class _Parts:
    """The parts of networks, as they once were: all that a client's code could put something else in the place of.

    That is: models, layers and their attributes (parameters, buffers, hooks, methods), what lists and dicts of these hold, the
    tensors' hooks and attributes, and their places in memory.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        """All of the networks', those that are plain attributes too."""
        self.layers = [layer for model in models.values() for layer in _layers(model)]
        self._holders: list[Any] = []
        """Dicts, lists and sets in which the parts are."""
        self._known: dict[int, object] = {}
        """Everything that was found by its id, which no other object can get as long as this one is kept."""
        self._look_into(models)
        for layer in self.layers:
            self._look_into(vars(layer))
        self._filled = [holder for holder in self._holders if holder]
        self._strided = [tensor for tensor in self.tensors if tensor.layout is torch.strided]
        self._once = self._now()

    def _look_into(self, value: Any) -> None:
        if id(value) in self._known:
            return
        self._known[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors.append(value)
            for held in (vars(value), value._backward_hooks, value._post_accumulate_grad_hooks):
                self._look_into(held)
        elif isinstance(value, (dict, list, tuple, set)):
            if not isinstance(value, tuple):
                self._holders.append(value)
            for item in value.values() if isinstance(value, dict) else value:
                self._look_into(item)

    def _now(self) -> object:
        return (
            [*map(type, self.layers)],
            [*map(len, self._holders)],
            [_content(holder) for holder in self._filled],
            [*map(Tensor.data_ptr, self._strided)],
            [(tensor.shape, tensor.stride()) for tensor in self._strided],
            [(id(tensor._backward_hooks), id(tensor._post_accumulate_grad_hooks)) for tensor in self.tensors],
        )

    @property
    def unchanged(self) -> bool:
        """Return whether each part is still where it was. That takes some 50 microseconds for a small network."""
        return self._now() == self._once


def _content(holder: Any) -> object:
    """Return what a dict, list or set holds, by identity; but not whether a layer is training."""
    if not isinstance(holder, dict):
        return [*map(id, holder)] if isinstance(holder, list) else sorted(map(id, holder))
    values = [*map(id, holder.values())]
    if "training" in holder:
        values[[*holder].index("training")] = 0
    return [*holder], values


class _Vector:
    """All floating tensors of some models as views of one vector."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self.tensors = list(floating.values())
        self._layout = Layout.from_tensors(floating)
        device = next(iter(floating.values())).device
        self._values = torch.empty(self._layout.size, device=device)
        for name, view in self._layout.views(self._values).items():
            view.copy_(floating[name].detach())
            floating[name].data = view
        self._initial = self._values.clone()
        self._plans: dict[Any, tuple[Any, list[tuple[slice, _Source]]]] = {}

    @classmethod
    def of(cls, models: Mapping[str, nn.Module]) -> _Vector | None:
        """Lay them out, or ``None`` where that cannot be.

        That is: other types than float32, tied tensors, tensors that only a ``state_dict`` knows, and layers that keep their
        weights in memory of their own (cuDNN's).
        """
        tensors: dict[str, Tensor] = {}
        for model_name, model in models.items():
            for path, layer in model.named_modules(remove_duplicate=False):
                for holder in (layer._parameters, layer._buffers):
                    for key, tensor in holder.items():
                        if tensor is not None and key not in layer._non_persistent_buffers_set:
                            tensors[f"{model_name}/{path}.{key}" if path else f"{model_name}/{key}"] = tensor
        state = _state(models)
        floating = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
        if (
            state.keys() != tensors.keys()
            or not floating
            or len({id(tensor) for tensor in tensors.values()}) < len(tensors)
            or any(tensor.dtype != torch.float32 or tensor.layout != torch.strided for tensor in floating)
            or len({tensor.device for tensor in floating}) > 1
            or (
                any(tensor.is_cuda for tensor in floating)
                and any(isinstance(layer, nn.RNNBase) for model in models.values() for layer in model.modules())
            )
        ):
            return None
        return cls({name: tensors[name] for name in state})

    def load(self, received: Mapping[str, FlatTensors], kept: Mapping[str, Tensor], shared: _Fates, whose: str) -> None:
        """See Built.start."""
        for stretch, (key, start) in self._plan(received, shared, whose):
            source = self._initial if key is None else received[key].to(self._values.device)
            self._values[stretch].copy_(source[start : start + stretch.stop - stretch.start])
        for name, value in kept.items():
            if name in self._layout.positions and shared(name) is False:
                check_shape(name, value.shape, self._layout.shapes[self._layout.positions[name]], whose)
                self._values[self._layout.columns(name)].copy_(value.flatten())

    def _plan(self, received: Mapping[str, FlatTensors], shared: _Fates, whose: str) -> list[tuple[slice, _Source]]:
        """Plan where each stretch of the vector comes from, private tensors from the initial values; neighbours are joined."""
        layouts = [(key, tensors.layout) for key, tensors in received.items()]
        known = tuple((key, id(layout)) for key, layout in layouts)
        if known not in self._plans:
            plan: list[tuple[slice, _Source]] = []
            for name in self._layout.names:
                part, own = self._layout.columns(name), self._layout.shapes[self._layout.positions[name]]
                key: str | None = None
                start = part.start
                for sender, layout in layouts if shared(name) else ():
                    if name in layout.positions:
                        check_shape(name, layout.shapes[layout.positions[name]], own, whose)
                        key, start = sender, layout.columns(name).start
                        break
                if plan:
                    before, (last_key, first) = plan[-1]
                    if last_key == key and first + before.stop - before.start == start:
                        plan[-1] = (slice(before.start, part.stop), (last_key, first))
                        continue
                plan.append((part, (key, start)))
            self._plans[known] = (layouts, plan)  # with the layouts: what has an id has to stay
        return self._plans[known][1]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and all below it; ``modules()`` takes several times as long."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _layers(child)
