"""Index of the parts of a client's networks, built once and reused for every client.

Walking the layers of a small network takes a noticeable share of a step: the many objects have left the CPU's caches since
the last client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from raydfl.core.users_code import is_users


@dataclass(frozen=True, eq=False, slots=True)
class Networks:
    """Layers and tensors of built-in networks. Training changes their values and modes, but never replaces them."""

    models: Mapping[str, nn.Module]
    """Networks by name."""
    layers: Sequence[nn.Module]
    tensors: Sequence[Tensor]
    """Parameters and buffers, layer by layer."""
    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    """Parameters by model and flat name. Tied parameters appear once."""
    floating: Mapping[str, Mapping[str, Tensor]]
    """Live floating-point tensors of the ``state_dict`` by model and flat name. Fixed tensors are omitted."""

    @classmethod
    def from_models(cls, models: Mapping[str, nn.Module], fixed: frozenset[str]) -> Networks | None:
        """Index freshly built networks.

        Args:
            models: networks by name.
            fixed: flat names of fixed tensors.

        Returns:
            The index, or ``None`` if a user's code may hold a reference to a part: a user's layer, or a ``state_dict`` with
            tensors from elsewhere.
        """
        layers, tensors = list_layers_and_tensors(models)
        states = {name: model.state_dict(keep_vars=True) for name, model in models.items()}
        live = {id(tensor) for tensor in tensors}
        if any(is_users(type(layer).__module__) for layer in layers) or any(
            id(value) not in live for state in states.values() for value in state.values()
        ):
            return None
        return cls(
            dict(models),
            layers,
            tensors,
            {
                name: {f"{name}/{key}": parameter for key, parameter in model.named_parameters()}
                for name, model in models.items()
            },
            {
                name: {
                    f"{name}/{key}": value
                    for key, value in state.items()
                    if value.is_floating_point() and f"{name}/{key}" not in fixed
                }
                for name, state in states.items()
            },
        )


def list_layers_and_tensors(models: Mapping[str, nn.Module]) -> tuple[list[nn.Module], list[Tensor]]:
    """List all layers of the models, and layer by layer their parameters and buffers."""
    layers = [layer for model in models.values() for layer in model.modules()]
    tensors = [t for layer in layers for t in (*layer._parameters.values(), *layer._buffers.values())]
    return layers, [tensor for tensor in tensors if tensor is not None]
