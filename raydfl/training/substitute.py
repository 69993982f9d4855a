"""A network computing with other tensors than its own: a teacher's, the previous model's, the received ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.training.replica import check_shape


@contextlib.contextmanager
def substitute_tensors(model: str, network: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, a network computes with other tensors, where there is one of its name; a tied tensor has all its places.

    Args:
        model: the network's name.
        network: whose layers hold the other tensors meanwhile.
        tensors: by flat name; those of other models are not looked at.

    Raises:
        ConfigError: there is none of this network's, or one of another shape.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    others: dict[int, Tensor] = {}
    for path, layer in network.named_modules():
        for holder in (layer._parameters, layer._buffers):
            for key, own in holder.items():
                if own is None:
                    continue
                places.append((cast("dict[str, Any]", holder), key, own))
                name = f"{model}/{path}.{key}" if path else f"{model}/{key}"
                if name in tensors:
                    others[id(own)] = tensors[name]
                    check_shape(name, others[id(own)].shape, own.shape, f"step.forward({model!r}, tensors=...)")
    if not others:
        raise ConfigError(
            f"step.forward({model!r}, tensors=...): none of the tensors is of this model; their names begin with {model + '/'!r}"
        )
    recurrent = [(layer, [*layer._flat_weights]) for layer in network.modules() if isinstance(layer, nn.RNNBase)]
    try:
        for holder, key, own in places:
            holder[key] = others.get(id(own), own)
        for layer, _ in recurrent:
            _flatten(layer)
        yield
    finally:
        for holder, key, own in places:
            holder[key] = own
        for layer, before in recurrent:  # not those of now: in a stack of clients (together/stack.py) these are others
            layer._flat_weights[:] = before


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Inside, a network is in evaluation mode; afterwards each of its layers is in the mode that it was in."""
    layers = [layer for layer in network.modules() if layer.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def _flatten(layer: nn.RNNBase) -> None:
    """Let one of PyTorch's recurrent layers, which hold their parameters in a list besides, compute with those that it has now."""
    for number, name in enumerate(layer._flat_weights_names):
        layer._flat_weights[number] = getattr(layer, name)
