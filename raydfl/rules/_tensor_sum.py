"""The weighted sum of one tensor over clients that may have parts of it: cut, or with weights for its rows or elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from raydfl.core.cuts import Cut
from raydfl.core.ops import ClientVectors, Slice, add_elements, add_slices
from raydfl.rules._weights import Weight, total_of

_STRIP = 32_768  # elements of a product that are worked on at a time: as float64 they stay in the second-level cache


@dataclass(frozen=True)
class Part:
    """A client's values of a tensor, as they were sent."""

    values: np.ndarray
    """float32, contiguous, of the shape that was sent."""
    weight: Weight
    """A number, or floats of as many dimensions, with 1 in place of a size that the weight does not depend on."""
    cut: Cut | None
    """Which part of the tensor it is; ``None``: all of it."""

    @property
    def kind(self) -> Literal["number", "slice", "elements", "other"]:
        """The way in which it is added."""
        if isinstance(self.weight, float):
            return "slice" if self.cut else "number"
        if math.prod(self.weight.shape[1:]) == 1:
            return "slice"
        return "elements" if not self.cut and self.weight.shape == self.values.shape else "other"


class TensorSum:
    """The weighted sum of a tensor over clients, and what its elements were counted: both in the order of the clients."""

    def __init__(self, shape: tuple[int, ...], total: np.ndarray) -> None:
        """Begin with nothing.

        Args:
            shape: of the tensor.
            total: float64 [elements], contiguous, in which the sum is kept; 0 now.
        """
        self.shape = shape
        self.total = total
        self.counted: Weight = 0.0
        """A number, or float64 of as many dimensions as the tensor, with 1 in place of a size that it does not depend on."""

    def add(self, parts: Sequence[Part]) -> None:
        """Add some clients' parts, one after another."""
        for kind, those in itertools.groupby(parts, lambda part: part.kind):
            alike = list(those)
            if kind == "number":
                weights = [cast(float, part.weight) for part in alike]
                ClientVectors([part.values.reshape(-1) for part in alike]).add_to(self.total, weights)
                self.counted = total_of(weights, self.counted)
            elif kind == "slice":
                self._add_slices(alike)
            elif kind == "elements":
                self._add_elements(alike)
            else:
                for part in alike:
                    self._add_other(part)

    def _add_slices(self, parts: Sequence[Part]) -> None:
        """Add parts whose weights depend on no dimension but the first."""
        parts = [part for part in parts if part.values.size]
        if not parts:
            return
        places = [_Place(part, self.shape) for part in parts]
        for place in places:
            counted = self._counted(place.sizes)
        values = [part.values.reshape(-1) for part in parts]
        add_slices(self.total, self.shape[0], [p.slice_of(self.shape, v) for p, v in zip(places, values, strict=True)])
        add_slices(counted.reshape(-1), len(counted), [place.slice_of(counted.shape) for place in places])

    def _add_elements(self, parts: Sequence[Part]) -> None:
        """Add whole tensors with a weight for each element."""
        given = [cast(np.ndarray, part.weight) for part in parts]
        kind = np.float32 if all(weight.dtype == np.float32 for weight in given) else np.float64
        weights = [weight.astype(kind, copy=False).reshape(-1) for weight in given]
        counted = self._counted(self.shape).reshape(-1)
        add_elements(self.total, counted, [part.values.reshape(-1) for part in parts], weights)

    def _add_other(self, part: Part) -> None:
        """Add a part of which nothing special is known."""
        cut = part.cut or Cut([None] * len(self.shape))
        weight = np.asarray(part.weight, np.float64)
        total = self.total.reshape(self.shape)
        if part.cut:
            total[cut.place(self.shape)] += part.values.astype(np.float64) * weight
        else:
            _add_broadcast(total, part.values, weight)
        counted = self._counted(spread(cut, weight, self.shape))
        counted[cut.place(counted.shape)] += weight

    def _counted(self, sizes: tuple[int, ...]) -> np.ndarray:
        """Return what was counted, as an array to add to that has at least these sizes; each is 1 or the tensor's."""
        now = np.asarray(self.counted)
        if now.shape == sizes:
            return now
        joint = np.broadcast_shapes(now.shape, sizes)
        if now.shape != joint:
            self.counted = now = np.array(np.broadcast_to(now, joint), order="C")
        return now


def spread(cut: Cut, weight: Weight, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the whole tensor's weights: 1 in place of those on which they do not depend."""
    own = np.shape(weight) or (1,) * len(shape)
    sizes = zip(shape, cut.indices, own, strict=True)
    return tuple(size if kept is not None or given > 1 else 1 for size, kept, given in sizes)


class _Place:
    """A place in the whole tensor, that of a part whose weight depends on no dimension but the first."""

    def __init__(self, part: Part, shape: tuple[int, ...]) -> None:
        """See :class:`Part`; ``shape`` is the whole tensor's."""
        kept = part.cut.indices if part.cut else (None,) * len(shape)
        self._weights = np.asarray(part.weight, np.float64).reshape(-1)
        self._rows = None if kept[0] is None else np.asarray(kept[0], np.int64)
        self._last = max((d for d, each in enumerate(kept) if each is not None), default=0)
        self._columns = _columns(kept[1 : self._last + 1], shape[1 : self._last + 1])
        by_row = kept[0] is not None or self._weights.size > 1
        self.sizes = (shape[0] if by_row else 1, *shape[1 : self._last + 1], *[1] * len(shape[self._last + 1 :]))
        """The tensor's, with 1 for those on which the weight does not depend."""

    def slice_of(self, sizes: Sequence[int], values: np.ndarray | None = None) -> Slice:
        """Return the slice, of the tensor or of what is counted, which has 1 in place of some of its sizes."""
        return Slice(self._weights, values, self._rows, self._columns, math.prod(sizes[self._last + 1 :]))


def _columns(kept: Sequence[Sequence[int] | np.ndarray | None], shape: Sequence[int]) -> np.ndarray | None:
    """Return what a cut leaves of some dimensions, taken as one: int64; ``None``: there are none."""
    if not kept:
        return None
    if len(kept) == 1 and kept[0] is not None:
        return np.asarray(kept[0], np.int64)
    index = np.zeros(1, np.int64)
    for own, size in zip(kept, shape, strict=True):
        index = (index[:, None] * size + (np.arange(size) if own is None else np.asarray(own, np.int64))).reshape(-1)
    return index


def _add_broadcast(total: np.ndarray, values: np.ndarray, weight: np.ndarray) -> None:
    """Add ``weight * values`` to ``total`` in float64, some rows at a time.

    Args:
        total: float64.
        values: float32 of its shape.
        weight: float64 that broadcasts to it.
    """
    rows = max(1, _STRIP * len(total) // max(1, total.size))
    for begin in range(0, len(total), rows):
        part = slice(begin, begin + rows)
        products = values[part].astype(np.float64)  # several times as fast as products of different types
        products *= weight if len(weight) == 1 else weight[part]
        total[part] += products
