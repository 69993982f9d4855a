"""Networks: what one client's networks are made of, found out once and asked for in the training of every client that they serve.

A walk through a small network's layers costs a noticeable share of a step: the objects are many, and between two clients the
numbers have pushed them out of the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from raydfl.core.users_code import is_users


@dataclass(frozen=True, eq=False, slots=True)
class Networks:
    """The parts of networks with which only raydfl's code works: it changes values and modes, and leaves each part in its place."""

    models: Mapping[str, nn.Module]
    """By name."""
    layers: Sequence[nn.Module]
    tensors: Sequence[Tensor]
    """Parameters and buffers, layer by layer."""
    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    """By the model's name and by flat name; a tied one once."""
    floating: Mapping[str, Mapping[str, Tensor]]
    """By the model's name and by flat name: what has a floating type of a ``state_dict``, live, but what is fixed."""

    @classmethod
    def of(cls, models: Mapping[str, nn.Module], fixed: frozenset[str]) -> Networks | None:
        """Look at networks as they were built; ``None`` where a layer is a user's, who may have kept hold of it.

        Args:
            models: by name.
            fixed: flat names of fixed tensors.
        """
        layers, tensors = layers_and_tensors(models)
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


def layers_and_tensors(models: Mapping[str, nn.Module]) -> tuple[list[nn.Module], list[Tensor]]:
    """Return all layers of some models, and layer by layer their parameters and buffers."""
    layers = [layer for model in models.values() for layer in model.modules()]
    tensors = [t for layer in layers for t in (*layer._parameters.values(), *layer._buffers.values())]
    return layers, [tensor for tensor in tensors if tensor is not None]
