"""The common part of the operations' rules for ``torch.func.vmap``: all tensors get the dimension of clients in front."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def grouped(clients: int, dims: tuple[Any, ...], values: tuple[Any, ...]) -> list[Any]:
    """Return the arguments of an operation for all clients at once: every tensor as [clients, ...].

    Args:
        clients: size of the mapped dimension.
        dims: for each value, the mapped dimension, or ``None`` where all clients share the value.
        values: tensors, and others that stay as they are.
    """
    stacked = []
    for value, dim in zip(values, dims, strict=True):
        if isinstance(value, Tensor):
            stacked.append(value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0))
        else:
            stacked.append(value)
    return stacked


def once(name: str) -> RuntimeError:
    """Return the error of an operation that is differentiated twice."""
    return RuntimeError(
        f"{name} of raydfl.ops cannot be differentiated twice; use {name} of torch.nn in a network whose loss contains gradients"
    )


def check_group(name: str, x: Tensor) -> None:
    """Refuse a mapping over what already has a dimension of clients."""
    if x.dim() != 4:
        raise RuntimeError(
            f"{name} of raydfl.ops can be mapped by torch.func.vmap once, over clients, not in two nested ways"
        )
