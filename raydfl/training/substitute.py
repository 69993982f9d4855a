"""Temporary substitution of a network's tensors: by a teacher's, the previous model's, the received ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.training.replica import check_shape


@contextlib.contextmanager
def substitute_tensors(model: str, network: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute with substitute tensors inside a ``with`` block. A substitute replaces a tied tensor in all its places.

    Args:
        model: name of the network.
        network: network to change for the time of the block.
        tensors: substitutes by flat name. Tensors without a substitute stay. Names of different models are ignored.

    Raises:
        ConfigError: no tensor belongs to this network, or a shape differs from the network's.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    substitutes: dict[int, Tensor] = {}
    for path, layer in network.named_modules():
        for holder in (layer._parameters, layer._buffers):
            for key, original in holder.items():
                if original is None:
                    continue
                places.append((cast("dict[str, Any]", holder), key, original))
                name = f"{model}/{path}.{key}" if path else f"{model}/{key}"
                if name in tensors:
                    check_shape(name, tensors[name].shape, original.shape, f"step.forward({model!r}, tensors=...)")
                    substitutes[id(original)] = tensors[name]
    if not substitutes:
        raise ConfigError(
            f"step.forward({model!r}, tensors=...): no tensor belongs to this model. Its names start with {model + '/'!r}."
        )
    recurrent = [(layer, [*layer._flat_weights]) for layer in network.modules() if isinstance(layer, nn.RNNBase)]
    try:
        for holder, key, original in places:
            holder[key] = substitutes.get(id(original), original)
        for layer, _ in recurrent:
            _refresh_flat_weights(layer)
        yield
    finally:
        for holder, key, original in places:
            holder[key] = original
        for layer, before in recurrent:  # not the attributes: in a stack of clients (together/stack.py) they differ
            layer._flat_weights[:] = before


@contextlib.contextmanager
def use_eval_mode(network: nn.Module) -> Iterator[None]:
    """Set a network to evaluation mode inside a ``with`` block, then restore each layer's mode."""
    layers = [layer for layer in network.modules() if layer.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def _refresh_flat_weights(layer: nn.RNNBase) -> None:
    """Rebuild a recurrent layer's private list of weights from its current attributes."""
    for number, name in enumerate(layer._flat_weights_names):
        layer._flat_weights[number] = getattr(layer, name)
