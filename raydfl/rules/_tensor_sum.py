"""Weighted sum of one tensor over clients, with support for cuts and for weights by row or element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from raydfl.core.cuts import Cut
from raydfl.core.ops import ClientVectors, Slice, add_elements, add_slices
from raydfl.rules._weights import Weight, add_in_order

_STRIP = 32_768  # elements of a block: as float64 they fit into the second-level cache


@dataclass(frozen=True)
class Contribution:
    """A client's values of a tensor, with their weight."""

    values: np.ndarray
    """float32, contiguous, in the shape that the client sent."""
    weight: Weight
    """A number, or an array that broadcasts to ``values`` and has the same number of dimensions."""
    cut: Cut | None
    """The cut of the tensor, or ``None`` for a whole tensor."""

    @property
    def kind(self) -> Literal["number", "slice", "elements", "other"]:
        """The fastest suitable algorithm for the sum."""
        if isinstance(self.weight, float):
            return "slice" if self.cut else "number"
        if math.prod(self.weight.shape[1:]) == 1:
            return "slice"
        return "elements" if not self.cut and self.weight.shape == self.values.shape else "other"


class TensorSum:
    """Weighted sum of a tensor and sum of its weights, both added in client order.

    Args:
        shape: shape of the whole tensor.
        total: float64 [elements], contiguous zeros. The sum is stored in this array.
    """

    def __init__(self, shape: tuple[int, ...], total: np.ndarray) -> None:
        self.shape = shape
        self.total = total
        self.weight: Weight = 0.0
        """Sum of the weights: a number, or a float64 array that broadcasts to the tensor, with the same number of dimensions."""

    def add(self, contributions: Sequence[Contribution]) -> None:
        """Add the contributions of clients in order."""
        # Runs of the same kind share one call of an operator.
        for kind, run in itertools.groupby(contributions, lambda contribution: contribution.kind):
            members = list(run)
            if kind == "number":
                weights = [cast(float, member.weight) for member in members]
                ClientVectors([member.values.reshape(-1) for member in members]).add_to(self.total, weights)
                self.weight = add_in_order(weights, self.weight)
            elif kind == "slice":
                self._add_slices(members)
            elif kind == "elements":
                self._add_elements(members)
            else:
                for member in members:
                    self._add_other(member)

    def _add_slices(self, members: Sequence[Contribution]) -> None:
        """Add contributions whose weights depend on the first dimension only."""
        members = [member for member in members if member.values.size]
        if not members:
            return
        plans = [_SlicePlan(member, self.shape) for member in members]
        for plan in plans:
            weight = self._grow_weight(plan.sizes)
        values = [member.values.reshape(-1) for member in members]
        add_slices(self.total, self.shape[0], [p.make_slice(self.shape, v) for p, v in zip(plans, values, strict=True)])
        add_slices(weight.reshape(-1), len(weight), [plan.make_slice(weight.shape) for plan in plans])

    def _add_elements(self, members: Sequence[Contribution]) -> None:
        """Add whole tensors with a weight for each element."""
        arrays = [cast(np.ndarray, member.weight) for member in members]
        dtype = np.float32 if all(array.dtype == np.float32 for array in arrays) else np.float64
        weights = [array.astype(dtype, copy=False).reshape(-1) for array in arrays]
        weight = self._grow_weight(self.shape).reshape(-1)
        add_elements(self.total, weight, [member.values.reshape(-1) for member in members], weights)

    def _add_other(self, member: Contribution) -> None:
        """Add a contribution with any cut and any weight, without a special operator."""
        cut = member.cut or Cut([None] * len(self.shape))
        weight = np.asarray(member.weight, np.float64)
        total = self.total.reshape(self.shape)
        if member.cut:
            total[cut.place(self.shape)] += member.values.astype(np.float64) * weight
        else:
            _add_broadcast(total, member.values, weight)
        weight_sum = self._grow_weight(weight_shape(cut, weight, self.shape))
        weight_sum[cut.place(weight_sum.shape)] += weight

    def add_weight(self, weight: Weight) -> None:
        """Add a sum of weights: a number, or an array that broadcasts to the tensor."""
        if isinstance(weight, np.ndarray):
            sums = self._grow_weight(np.broadcast_shapes(np.shape(self.weight), weight.shape))
            sums += weight
        else:
            self.weight = self.weight + weight

    def _grow_weight(self, sizes: tuple[int, ...]) -> np.ndarray:
        """Broadcast the sum of the weights to at least these sizes, and return it as a writable array."""
        weight = np.asarray(self.weight)
        if weight.shape == sizes:
            return weight
        joint = np.broadcast_shapes(weight.shape, sizes)
        if weight.shape != joint:
            self.weight = weight = np.array(np.broadcast_to(weight, joint), order="C")
        return weight


def weight_shape(cut: Cut, weight: Weight, shape: Sequence[int]) -> tuple[int, ...]:
    """Compute the shape of the whole tensor's weights. Sizes are 1 where the weights do not vary."""
    weight_sizes = np.shape(weight) or (1,) * len(shape)
    sizes = zip(shape, cut.indices, weight_sizes, strict=True)
    return tuple(size if kept is not None or weight_size > 1 else 1 for size, kept, weight_size in sizes)


class _SlicePlan:
    """Position of a contribution in the whole tensor, if its weight varies along the first dimension only."""

    def __init__(self, member: Contribution, shape: tuple[int, ...]) -> None:
        kept = member.cut.indices if member.cut else (None,) * len(shape)
        self._weights = np.asarray(member.weight, np.float64).reshape(-1)
        self._rows = None if kept[0] is None else np.asarray(kept[0], np.int64)
        self._last = max((d for d, indices in enumerate(kept) if indices is not None), default=0)
        self._columns = _compute_flat_indices(kept[1 : self._last + 1], shape[1 : self._last + 1])
        by_row = kept[0] is not None or self._weights.size > 1
        self.sizes = (shape[0] if by_row else 1, *shape[1 : self._last + 1], *[1] * len(shape[self._last + 1 :]))
        """Shape of the weights in the whole tensor, with 1 where they do not vary."""

    def make_slice(self, sizes: Sequence[int], values: np.ndarray | None = None) -> Slice:
        """Make the slice of an array with these sizes: of the tensor, or of the sum of the weights."""
        return Slice(self._weights, values, self._rows, self._columns, math.prod(sizes[self._last + 1 :]))


def _compute_flat_indices(kept: Sequence[Sequence[int] | np.ndarray | None], shape: Sequence[int]) -> np.ndarray | None:
    """Compute the flat indices of the elements in a cut of several dimensions: int64, or ``None`` for no dimension."""
    if not kept:
        return None
    if len(kept) == 1 and kept[0] is not None:
        return np.asarray(kept[0], np.int64)
    index = np.zeros(1, np.int64)
    for indices, size in zip(kept, shape, strict=True):
        offsets = np.arange(size) if indices is None else np.asarray(indices, np.int64)
        index = (index[:, None] * size + offsets).reshape(-1)
    return index


def _add_broadcast(total: np.ndarray, values: np.ndarray, weight: np.ndarray) -> None:
    """Add ``weight * values`` to ``total`` in float64, block by block.

    Args:
        total: float64.
        values: float32 of the same shape.
        weight: float64 that broadcasts to this shape.
    """
    rows = max(1, _STRIP * len(total) // max(1, total.size))
    for begin in range(0, len(total), rows):
        block = slice(begin, begin + rows)
        products = values[block].astype(np.float64)  # several times faster than products of mixed dtypes
        products *= weight if len(weight) == 1 else weight[block]
        total[block] += products
