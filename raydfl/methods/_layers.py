"""Access to a network's layers by name prefix, to its features, and to its last layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import BuiltModels


def has_prefix(name: str, prefix: str) -> bool:
    """Return whether a tensor's flat name starts with a prefix."""
    return name.startswith(prefix)


def has_prefix_within(name: str, prefix: str) -> bool:
    """Return whether a tensor's flat name, or a part of it after a dot, starts with a prefix.

    The prefix ``lora`` finds ``model/encoder.layers.2.attention.q_proj.lora_A.default.weight``.
    """
    return name.startswith(prefix) or f".{prefix}" in name


def check_prefixes(
    models: BuiltModels, prefixes: Sequence[str], option: str, matches: Callable[[str, str], bool] = has_prefix
) -> None:
    """Reject name prefixes without a tensor, because they would silently change the method.

    Args:
        models: Models by name, one set for each combination of architectures.
        prefixes: Name prefixes of tensors.
        option: Name of the option, for the message.
        matches: Function of a tensor's name and a prefix.

    Raises:
        ConfigError: A prefix matches no tensor.
    """
    names = [f"{n}/{k}" for built in models for n, m in built.items() for k in m.state_dict()]
    for prefix in prefixes:
        if not any(matches(name, prefix) for name in names):
            layers = sorted({name.rpartition(".")[0] for name in names})
            raise ConfigError(
                f"{option}: no tensor's name begins with {prefix!r}. Choose among these layers: {', '.join(layers)}."
            )


def check_features(network: nn.Module, method: str) -> None:
    """Reject a network without access to the features before its last layer.

    Args:
        network: The network of the model ``model``.
        method: The method's name, for the message.

    Raises:
        ConfigError: The network has no ``embed``, or no ``output``.
    """
    for part in ("embed", "output"):
        if not callable(getattr(network, part, None)):
            raise ConfigError(
                f"models.model: {method} needs the features before the last layer, but {type(network).__name__} has no {part!r}. "
                f"Add a method embed(x, lengths=None) -> [batch, width] and a last layer self.output."
            )


def last_layer(network: nn.Module, method: str) -> nn.Linear:
    """Return the linear last layer of a network.

    Raises:
        ConfigError: The network has no ``embed`` or ``output``, or the layer is not linear.
    """
    check_features(network, method)
    layer = network.output
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"models.model: {method} needs a linear last layer, but {type(network).__name__}.output is a "
            f"{type(layer).__name__}. Make self.output a torch.nn.Linear."
        )
    return layer
