"""Built networks that serve one client after another: put back and loaded in a few operations, however many tensors they have."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.tensors import FlatTensors, Layout

_Source = tuple[str | None, int]
"""Where a stretch of values comes from: the key of what was received, or ``None`` for the initial values; its first element."""


class Built:
    """One client's networks by name.

    Where it is possible, all floating tensors are views of one vector: what a client receives is then copied by as many
    operations as there are stretches of it, instead of several for each tensor, and what it sends by one (``flatten``).
    """

    def __init__(self, models: dict[str, nn.Module]) -> None:
        """Take over freshly built networks, which lie on their device."""
        self.models = models
        self._vector = _Vector.of(models)
        self._initial = {} if self._vector else {name: value.clone() for name, value in _state(models).items()}
        self._trainable = {f"{n}/{k}": p.requires_grad for n, m in models.items() for k, p in m.named_parameters()}

    @property
    def whole(self) -> bool:
        """False when somebody's code has replaced layers or tensors, so that these networks are to be built anew."""
        return self._vector is None or self._vector.whole

    @torch.no_grad()
    def start(
        self, received: Mapping[str, FlatTensors], kept: Mapping[str, Tensor], shared: Callable[[str], bool]
    ) -> None:
        """Make them what the next client begins with; nothing of the last client's is left.

        Args:
            received: the server's tensors by key: a shared tensor is taken from the first that has it.
            kept: tensors that the client itself has kept, by flat name, for those that are not shared.
            shared: the method's.
        """
        if self._vector is not None:
            self._vector.load(received, kept, shared)
        else:
            self._load(received, kept, shared)
        for model in self.models.values():
            if not all(module.training for module in model.modules()):
                model.train()

    def _load(
        self, received: Mapping[str, FlatTensors], kept: Mapping[str, Tensor], shared: Callable[[str], bool]
    ) -> None:
        state = _state(self.models)
        devices = {value.device for value in state.values()}
        sent: list[Mapping[str, Tensor]] = list(received.values())
        if len(devices) == 1:  # on a GPU one transfer of all, then copies there
            sent = [tensors.layout.views(tensors.on(*devices)) for tensors in received.values()]
        for name, value in state.items():
            origin: Mapping[str, Tensor] = self._initial
            if value.is_floating_point():
                origin = next((tensors for tensors in (sent if shared(name) else [kept]) if name in tensors), origin)
            value.copy_(origin[name])
        for model_name, model in self.models.items():
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(self._trainable[f"{model_name}/{key}"])
                parameter.grad = None


def _state(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{name}/{key}": value for name, model in models.items() for key, value in model.state_dict().items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer has one of its tensors."""

    holder: dict[str, Any]
    key: str
    tensor: Tensor
    address: int
    trainable: bool


class _Vector:
    """All floating tensors of some models as views of one vector."""

    def __init__(self, models: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
        floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._layout = Layout.of(floating)
        device = next(iter(floating.values())).device
        self._values = torch.empty(self._layout.size, device=device)
        for name, view in self._layout.views(self._values).items():
            view.copy_(floating[name].detach())
            floating[name].data = view
        self._initial = self._values.clone()
        self._counters = [(tensor, tensor.clone()) for tensor in tensors.values() if not tensor.is_floating_point()]
        self._models = list(models.values())
        self._layers = [layer for model in self._models for layer in _layers(model)]
        self._places = [
            _Place(holder, key, tensor, tensor.data_ptr(), tensor.requires_grad)
            for layer in self._layers
            for holder in (layer._parameters, layer._buffers)
            for key, tensor in holder.items()
            if tensor is not None
        ]
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
        return cls(models, {name: tensors[name] for name in state})

    @property
    def whole(self) -> bool:
        """Whether every layer and tensor is still where it was."""
        layers = [layer for model in self._models for layer in _layers(model)]
        if len(layers) != len(self._layers) or any(map(operator.is_not, layers, self._layers)):
            return False
        live = sum(
            tensor is not None for layer in layers for tensor in (*layer._parameters.values(), *layer._buffers.values())
        )
        return live == len(self._places) and all(
            place.holder.get(place.key) is place.tensor and place.tensor.data_ptr() == place.address
            for place in self._places
        )

    def load(
        self, received: Mapping[str, FlatTensors], kept: Mapping[str, Tensor], shared: Callable[[str], bool]
    ) -> None:
        """See Built.start."""
        for stretch, (key, start) in self._plan(received, shared):
            source = self._initial if key is None else received[key].on(self._values.device)
            self._values[stretch].copy_(source[start : start + stretch.stop - stretch.start])
        for name, value in kept.items():
            if name in self._layout.positions and not shared(name):
                self._values[self._layout.columns(name)].copy_(value.flatten())
        for tensor, initial in self._counters:
            tensor.copy_(initial)
        for place in self._places:
            if place.tensor.requires_grad is not place.trainable:
                place.tensor.requires_grad_(place.trainable)
            if place.tensor.grad is not None:
                place.tensor.grad = None

    def _plan(self, received: Mapping[str, FlatTensors], shared: Callable[[str], bool]) -> list[tuple[slice, _Source]]:
        """Where each stretch of the vector comes from, private tensors from the initial values; neighbours are joined."""
        layouts = [(key, tensors.layout) for key, tensors in received.items()]
        known = tuple((key, id(layout)) for key, layout in layouts)
        if known not in self._plans:
            plan: list[tuple[slice, _Source]] = []
            for name in self._layout.names:
                part = self._layout.columns(name)
                senders = ((k, layout) for k, layout in layouts if name in layout.positions) if shared(name) else ()
                key, start = next(((k, layout.columns(name).start) for k, layout in senders), (None, part.start))
                if plan:
                    before, (last_key, first) = plan[-1]
                    if last_key == key and first + before.stop - before.start == start:
                        plan[-1] = (slice(before.start, part.stop), (last_key, first))
                        continue
                plan.append((part, (key, start)))
            self._plans[known] = (layouts, plan)  # with the layouts: what has an id has to stay
        return self._plans[known][1]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all below it; ``modules()`` takes several times as long."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _layers(child)
