"""Layers of a network, as methods ask for them: named ones, the features that the last one sees, and the last one itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import BuiltModels


def check_prefixes(models: BuiltModels, prefixes: Sequence[str], option: str) -> None:
    """Refuse prefixes that name no tensor, with which a method would silently be another.

    Args:
        models: of every combination of architectures, by name.
        prefixes: beginnings of tensors' names.
        option: that has them, for the message.

    Raises:
        ConfigError: no tensor's name begins with one of them.
    """
    names = [f"{n}/{k}" for built in models for n, m in built.items() for k in m.state_dict()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            layers = sorted({name.rpartition(".")[0] for name in names})
            raise ConfigError(f"{option}: no tensor's name begins with {prefix!r}; layers: {', '.join(layers)}")


def check_features(network: nn.Module, method: str) -> None:
    """Refuse a network of which the features that its last layer sees cannot be had.

    Args:
        network: of the model ``model``.
        method: its name, for the message.

    Raises:
        ConfigError: it has no ``embed``, or no ``output``.
    """
    for part in ("embed", "output"):
        if not callable(getattr(network, part, None)):
            raise ConfigError(
                f"models.model: {method} needs the features that a network's last layer sees, but {type(network).__name__} has no "
                f"{part!r}; give it embed(x, lengths=None) -> [batch, width] and a last layer self.output"
            )


def last_layer(network: nn.Module, method: str) -> nn.Linear:
    """Return the last layer of a network with features.

    Raises:
        ConfigError: the network has no features, or the layer is not linear.
    """
    check_features(network, method)
    layer = network.output
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"models.model: {method} needs a linear last layer, but that of {type(network).__name__} is a {type(layer).__name__}; "
            f"let self.output be a torch.nn.Linear"
        )
    return layer
