"""Weights of updates, checks that updates fit together, and small arithmetic that all rules share."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydfl.core.errors import RaydflError
from raydfl.core.tensors import Layout
from raydfl.core.types import Tensors, Update

Weight = float | np.ndarray
"""How much the elements of a tensor count: one number, or floats that broadcast to its shape."""

# A weight is a number of examples by default, but a method may give it another meaning. The limit is therefore not a client's own
# number of examples, but one that no client reaches. Sums of weights and of weighted tensors stay far from overflow.
LARGEST_WEIGHT = 1e12


def total_of(weights: Sequence[Any], start: Any = 0.0) -> Any:
    """Add up one after another: Python's own ``sum`` corrects rounding from 3.12 on, but only within one call."""
    return reduce(operator.add, weights, start)


def divided(total: np.ndarray, weight: Weight, current: Tensor | np.ndarray | None) -> np.ndarray:
    """Return ``total / weight`` as float32 of the total's shape; where the weight is 0, the server's value, or 0 if it has none.

    Args:
        total: float64 of any shape.
        weight: a number, or what broadcasts to that shape.
        current: as many elements, in any shape.
    """
    counts, result = np.asarray(weight), np.empty(total.shape, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        np.divide(total, counts, out=result, dtype=np.float64, casting="same_kind")
    if not counts.all():
        known = current.detach().cpu().numpy() if isinstance(current, Tensor) else current
        np.copyto(result, 0 if known is None else known.reshape(total.shape), "same_kind", where=counts == 0)
    return result


def number_or_elements(
    update: Update, weight: float | Mapping[str, float | Tensor], name: str, shape: tuple[int, ...]
) -> Weight:
    """Return the weight of one tensor of an update, checked: a number, or float64 that broadcasts to the tensor's ``shape``."""
    found = weight_of(update, weight, name, shape)
    return found if isinstance(found, float) else found.astype(np.float64, copy=False)


def weight_of(
    update: Update, weight: float | Mapping[str, float | Tensor], name: str, shape: tuple[int, ...]
) -> Weight:
    """Return the weight of one tensor of an update, checked: a number, or an array that broadcasts to the tensor's ``shape``.

    The array is float32 or float64, and has 1 in place of a size over which the given one was only stretched.
    """
    what = f"client {update.client_id!r}: the weight of its update"
    value: float | Tensor
    if isinstance(weight, Mapping):
        what = f"client {update.client_id!r}: the weight of {name!r}"
        if name not in weight:
            raise RaydflError(f"{what} is missing; a mapping of weights needs one for each tensor sent")
        value = weight[name]
    else:
        value = weight
    if isinstance(value, Tensor) and value.ndim > 0:
        given = tuple(value.shape)
        if len(given) != len(shape) or any(own not in (1, size) for own, size in zip(given, shape, strict=True)):
            raise RaydflError(
                f"{what} has shape {given}, the tensor has {shape}; one number does for all too, and 1 in place of a size"
            )
        value = value.detach().cpu()
        value = value if value.dtype in (torch.float32, torch.float64) else value.double()
        elements: np.ndarray = value[tuple(slice(1 if step == 0 else None) for step in value.stride())].numpy()
        if elements.size and not (
            elements.min() >= 0 and elements.max() <= LARGEST_WEIGHT
        ):  # also where something is not a number
            raise RaydflError(f"{what} has elements that are not from 0 to {LARGEST_WEIGHT:g}; 0 leaves an element out")
        return elements
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise RaydflError(f"{what} is {value!r:.80}; it has to be a number") from None
    if not 0 <= number <= LARGEST_WEIGHT:
        raise RaydflError(f"{what} is {number}; it must be from 0 to {LARGEST_WEIGHT:g}, and 0 leaves the client out")
    return number


def absent(update: Update, layout: Layout) -> np.ndarray | None:
    """Return which elements of an update have no weight: bool [layout.size], or ``None`` where all have some.

    Args:
        layout: of the tensors wanted, all of which the update has.
    """
    if not isinstance(update.weight, Mapping):
        return None if weight_of(update, update.weight, "", ()) > 0 else np.ones(layout.size, bool)
    mask = np.empty(layout.size, bool)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        mask[layout.columns(name)].reshape(shape)[...] = np.equal(weight_of(update, update.weight, name, shape), 0)
    return mask if mask.any() else None


def flat(tensors: Tensors, layout: Layout) -> np.ndarray:
    """Return some of the server's tensors in a new vector: float32 [layout.size]; 0 where it has none."""
    vector = np.zeros(layout.size, np.float32)
    for name in layout.names:
        if name in tensors:
            vector[layout.columns(name)] = tensors[name].detach().cpu().flatten().numpy()
    return vector


def check_shapes(update: Update, sent: Layout, known: dict[str, tuple[int, ...]]) -> None:
    """Compare an update's shapes with those known, and learn the new ones."""
    for name, shape in zip(sent.names, sent.shapes, strict=True):
        if known.setdefault(name, shape) != shape:
            raise RaydflError(
                f"client {update.client_id!r} sent {name!r} with shape {shape}, elsewhere under key {update.key!r} it has "
                f"{known[name]}; give networks of different shapes different keys, or do not share this tensor"
            )
