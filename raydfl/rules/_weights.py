"""Weights of updates, checks of their shapes, and arithmetic shared by all rules."""

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
"""Weight of a tensor: a number, or floats that broadcast to its shape."""

# Weights are numbers of examples by default, but a method may define them differently. The limit is therefore a constant above
# every realistic weight. It keeps sums of weights and of weighted tensors far from overflow.
LARGEST_WEIGHT = 1e12


def add_in_order(weights: Sequence[Any], start: Any = 0.0) -> Any:
    """Add weights in sequence, so that splitting the list does not change the sum."""
    # Python's sum() compensates rounding errors since 3.12, but only within one call.
    return reduce(operator.add, weights, start)


def divide(total: np.ndarray, weight: Weight, current: Tensor | np.ndarray | None) -> np.ndarray:
    """Divide a weighted sum by its weight. Elements of weight 0 keep the server's value.

    Args:
        total: float64 of any shape.
        weight: a number, or an array that broadcasts to ``total``.
        current: the server's values in any shape. ``None``: 0.

    Returns:
        float32 in the shape of ``total``.
    """
    weights, result = np.asarray(weight), np.empty(total.shape, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        np.divide(total, weights, out=result, dtype=np.float64, casting="same_kind")
    if not weights.all():
        values = current.detach().cpu().numpy() if isinstance(current, Tensor) else current
        np.copyto(result, 0 if values is None else values.reshape(total.shape), "same_kind", where=weights == 0)
    return result


def read_float64_weight(
    update: Update, weight: float | Mapping[str, float | Tensor], name: str, shape: tuple[int, ...]
) -> Weight:
    """Apply :func:`read_weight` and convert arrays to float64."""
    value = read_weight(update, weight, name, shape)
    return value if isinstance(value, float) else value.astype(np.float64, copy=False)


def read_weight(
    update: Update, weight: float | Mapping[str, float | Tensor], name: str, shape: tuple[int, ...]
) -> Weight:
    """Read and check the weight of a tensor of an update.

    Args:
        update: the update, for error messages.
        weight: one weight for the whole update, or weights by tensor.
        name: the tensor.
        shape: shape of the tensor.

    Returns:
        A number, or a float32 or float64 array that broadcasts to ``shape``. Expanded dimensions have size 1.

    Raises:
        RaydflError: the weight is missing, out of range, not a number or has the wrong shape.
    """
    subject = f"client {update.client_id!r}: the weight of its update"
    value: float | Tensor
    if isinstance(weight, Mapping):
        subject = f"client {update.client_id!r}: the weight of {name!r}"
        if name not in weight:
            raise RaydflError(
                f"{subject} is missing. A mapping of weights needs a weight for each tensor of the update."
            )
        value = weight[name]
    else:
        value = weight
    if isinstance(value, Tensor) and value.ndim > 0:
        sizes = tuple(value.shape)
        if len(sizes) != len(shape) or any(extent not in (1, size) for extent, size in zip(sizes, shape, strict=True)):
            raise RaydflError(
                f"{subject} has shape {sizes}, but the tensor has {shape}. Use a number, or a weight with as many dimensions that "
                f"broadcasts to the tensor."
            )
        value = value.detach().cpu()
        value = value if value.dtype in (torch.float32, torch.float64) else value.double()
        # A stride of 0 marks an expanded dimension, whose first element is enough.
        elements: np.ndarray = value[tuple(slice(1 if step == 0 else None) for step in value.stride())].numpy()
        if elements.size and not (elements.min() >= 0 and elements.max() <= LARGEST_WEIGHT):  # true for NaN, too
            raise RaydflError(
                f"{subject} has elements outside 0 to {LARGEST_WEIGHT:g}. Use finite weights in this range; 0 excludes an element."
            )
        return elements
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise RaydflError(f"{subject} is {value!r:.80}. It must be a number.") from None
    if not 0 <= number <= LARGEST_WEIGHT:
        raise RaydflError(f"{subject} is {number}. It must be from 0 to {LARGEST_WEIGHT:g}; 0 excludes the client.")
    return number


def scale_weight(weight: float | Mapping[str, float | Tensor], factor: float) -> Any:
    """Multiply a weight, or each weight of a mapping, by a factor."""
    if isinstance(weight, Mapping):
        return {name: value * factor for name, value in weight.items()}
    return weight * factor


def find_unweighted(update: Update, layout: Layout) -> np.ndarray | None:
    """Compute the mask of an update's elements of weight 0.

    Args:
        update: the update.
        layout: layout of some or all of its tensors.

    Returns:
        bool [layout.size], or ``None`` if all weights are positive.
    """
    if not isinstance(update.weight, Mapping):
        return None if read_weight(update, update.weight, "", ()) > 0 else np.ones(layout.size, bool)
    mask = np.empty(layout.size, bool)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        mask[layout.columns(name)].reshape(shape)[...] = np.equal(read_weight(update, update.weight, name, shape), 0)
    return mask if mask.any() else None


def flatten_current(tensors: Tensors, layout: Layout) -> np.ndarray:
    """Copy the server's tensors into a new vector: float32 [layout.size]. Missing tensors are 0."""
    vector = np.zeros(layout.size, np.float32)
    for name in layout.names:
        if name in tensors:
            vector[layout.columns(name)] = tensors[name].detach().cpu().flatten().numpy()
    return vector


def check_shapes(update: Update, sent: Layout, known: dict[str, tuple[int, ...]]) -> None:
    """Compare an update's shapes with the known shapes, and add new names to ``known``.

    Raises:
        RaydflError: a tensor has another shape than before.
    """
    for name, shape in zip(sent.names, sent.shapes, strict=True):
        if known.setdefault(name, shape) != shape:
            raise RaydflError(
                f"client {update.client_id!r} sent {name!r} with shape {shape}, but under the key {update.key!r} it has "
                f"{known[name]}. Use different keys for networks of different shapes, or do not share this tensor."
            )
