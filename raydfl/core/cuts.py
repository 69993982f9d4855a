"""Cuts: selections of rows, columns and so on of a tensor, for clients that train a part of a network.

The client receives a slice of each tensor and returns an updated slice. The server writes it back to the same indices. A
:class:`Cut` holds the selected indices of each dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from raydfl.core.errors import ConfigError
from raydfl.core.tensors import FlatTensors, Layout


@dataclass(frozen=True, eq=False)
class Cut:
    """Selected indices in each dimension of a tensor. ``None`` selects the whole dimension.

    The slice follows the order of the indices. Indices are unique.

    >>> Cut(([2, 0], None)).take(np.arange(6).reshape(3, 2))
    array([[4, 5],
           [0, 1]])
    """

    indices: Sequence[Sequence[int] | np.ndarray | None]

    def __post_init__(self) -> None:
        """Convert the indices to int64 arrays.

        Raises:
            ValueError: a dimension has something else than a list of integers or ``None``.
        """
        arrays = []
        for indices in self.indices:
            array = None if indices is None else np.asarray(indices)
            if array is not None and (array.ndim != 1 or (array.size and array.dtype.kind not in "iu")):
                raise ValueError(f"Cut: give a list of integers for each dimension, or None, not {indices!r:.80}.")
            arrays.append(None if array is None else array.astype(np.int64, copy=False))
        object.__setattr__(self, "indices", tuple(arrays))

    @property
    def _arrays(self) -> tuple[np.ndarray | None, ...]:
        return cast("tuple[np.ndarray | None, ...]", self.indices)

    def misfit(self, shape: Sequence[int]) -> str:
        """Return the reason why the cut does not fit a tensor's shape, or an empty string."""
        if len(self._arrays) != len(shape):
            return f"the cut has {len(self._arrays)} dimensions, the tensor has the shape {tuple(shape)}"
        for dimension, (indices, size) in enumerate(zip(self._arrays, shape, strict=True)):
            if indices is None:
                continue
            if indices.size and indices[0] >= 0 and indices[-1] < size and (indices[1:] > indices[:-1]).all():
                continue  # ascending, the usual case: this check takes a few microseconds
            outside = indices[(indices < 0) | (indices >= size)]
            if outside.size:
                return f"the cut selects index {outside[0]} of dimension {dimension}, but its size is {size}"
            if np.bincount(indices, minlength=size).max(initial=0) > 1:
                return f"the cut selects an index of dimension {dimension} twice"
        return ""

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice for a tensor's shape."""
        pairs = zip(self._arrays, shape, strict=True)
        return tuple(size if indices is None else len(indices) for indices, size in pairs)

    def place(self, shape: Sequence[int]) -> tuple[slice | np.ndarray, ...]:
        """Return an index to read or write the slice of an array. The cut must fit the array's shape."""
        selections = [_to_slice(array) for array in self._arrays]
        last = max((d for d, selection in enumerate(selections) if isinstance(selection, np.ndarray)), default=-1)
        if sum(isinstance(selection, np.ndarray) for selection in selections) < 2:
            return tuple(selections)
        # NumPy would pair the elements of several index arrays. Dimensions after the last array may keep their slices.
        dimensions = zip(selections[: last + 1], shape, strict=False)
        grid = np.ix_(*(np.arange(size)[selection] for selection, size in dimensions))
        return (*grid, *selections[last + 1 :])

    def take(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of the slice. The cut must fit the array's shape."""
        return np.array(array[self.place(array.shape)])


Cuts = Mapping[str, Cut]
"""Cuts by tensor name."""


def _to_slice(indices: np.ndarray | None) -> slice | np.ndarray:
    """Convert consecutive indices to a slice, because NumPy copies it several times as fast."""
    if indices is None:
        return slice(None)
    if len(indices) and np.array_equal(indices, np.arange(indices[0], indices[0] + len(indices))):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices


def cut_size(layout: Layout, cuts: Cuts) -> int:
    """Return the number of elements after cutting tensors. Cuts of unknown tensors are ignored."""
    affected = ((layout.shapes[layout.positions[name]], cut) for name, cut in cuts.items() if name in layout.positions)
    return layout.size - sum(math.prod(shape) - math.prod(cut.shape(shape)) for shape, cut in affected)


def cut_tensors(tensors: FlatTensors, cuts: Cuts, whose: str) -> FlatTensors:
    """Return a copy of tensors with cuts applied.

    Args:
        tensors: whole tensors.
        cuts: cuts by tensor name. Cuts of unknown tensors are ignored.
        whose: the recipient, for the message.

    Raises:
        ConfigError: a cut does not fit its tensor.
    """
    shapes = dict(zip(tensors.layout.names, tensors.layout.shapes, strict=True))
    for name, shape in shapes.items():
        if name in cuts:
            misfit = cuts[name].misfit(shape)
            if misfit:
                raise ConfigError(f"{whose}: {name!r} cannot be cut as the method planned: {misfit}")
            shapes[name] = cuts[name].shape(shape)
    layout = Layout.from_shapes(shapes)
    vector = np.empty(layout.size, np.float32)
    for name, shape in shapes.items():
        whole = tensors.vector[tensors.layout.columns(name)].reshape(
            tensors.layout.shapes[tensors.layout.positions[name]]
        )
        part = whole[cuts[name].place(whole.shape)] if name in cuts else whole
        vector[layout.columns(name)].reshape(shape)[...] = part
    return FlatTensors(layout, vector)
