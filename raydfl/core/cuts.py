"""Cuts: which part of a tensor travels.

A client that trains a part of a network receives a part of each tensor and sends that part back, and the server puts it where it
came from. A :class:`Cut` says which part: the indices that are kept in each dimension.
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
    """The indices of a tensor that are kept, for each of its dimensions; ``None``: all of this dimension.

    Their order is the order of the slice, and none comes twice.

    >>> Cut(([2, 0], None)).take(np.arange(6).reshape(3, 2))
    array([[4, 5],
           [0, 1]])
    """

    indices: Sequence[Sequence[int] | np.ndarray | None]

    def __post_init__(self) -> None:
        """Check that they are whole numbers.

        Raises:
            ValueError: they are something else.
        """
        found = []
        for kept in self.indices:
            array = None if kept is None else np.asarray(kept)
            if array is not None and (array.ndim != 1 or (array.size and array.dtype.kind not in "iu")):
                raise ValueError(f"a cut has a list of whole numbers for each dimension, or None, not {kept!r:.80}")
            found.append(None if array is None else array.astype(np.int64, copy=False))
        object.__setattr__(self, "indices", tuple(found))

    @property
    def _arrays(self) -> tuple[np.ndarray | None, ...]:
        return cast("tuple[np.ndarray | None, ...]", self.indices)

    def misfit(self, shape: Sequence[int]) -> str:
        """Return why no tensor of that shape can be cut so, or nothing."""
        if len(self._arrays) != len(shape):
            return f"the cut has {len(self._arrays)} dimensions, the tensor has the shape {tuple(shape)}"
        for dimension, (kept, size) in enumerate(zip(self._arrays, shape, strict=True)):
            if kept is None:
                continue
            if kept.size and kept[0] >= 0 and kept[-1] < size and (kept[1:] > kept[:-1]).all():
                continue  # ascending, as almost always: told in a few microseconds
            outside = kept[(kept < 0) | (kept >= size)]
            if outside.size:
                return f"the cut asks for index {outside[0]} of dimension {dimension}, which has {size}"
            if np.bincount(kept, minlength=size).max(initial=0) > 1:
                return f"the cut asks for an index of dimension {dimension} twice"
        return ""

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice of a tensor of that shape."""
        return tuple(size if kept is None else len(kept) for kept, size in zip(self._arrays, shape, strict=True))

    def place(self, shape: Sequence[int]) -> tuple[slice | np.ndarray, ...]:
        """Return what to index an array of that shape with to read or write the slice; the cut must fit it."""
        kept = [_stretch(array) for array in self._arrays]
        last = max((d for d, each in enumerate(kept) if isinstance(each, np.ndarray)), default=-1)
        if sum(isinstance(each, np.ndarray) for each in kept) < 2:
            return tuple(kept)
        # Several lists side by side would be taken pairwise. What comes after the last of them may stay a slice.
        grid = np.ix_(*(np.arange(size)[each] for each, size in zip(kept[: last + 1], shape, strict=False)))
        return (*grid, *kept[last + 1 :])

    def take(self, array: np.ndarray) -> np.ndarray:
        """Return the slice of an array that the cut fits, in memory of its own."""
        return np.array(array[self.place(array.shape)])


Cuts = Mapping[str, Cut]
"""Cuts by the names of the tensors that they cut."""


def _stretch(kept: np.ndarray | None) -> slice | np.ndarray:
    """Return indices that follow one another as a slice, which is several times as fast."""
    if kept is None:
        return slice(None)
    if len(kept) and np.array_equal(kept, np.arange(kept[0], kept[0] + len(kept))):
        return slice(int(kept[0]), int(kept[-1]) + 1)
    return kept


def cut_size(layout: Layout, cuts: Cuts) -> int:
    """Return how many elements are left of tensors; cuts of others are not looked at."""
    of_those = ((layout.shapes[layout.positions[name]], cut) for name, cut in cuts.items() if name in layout.positions)
    return layout.size - sum(math.prod(shape) - math.prod(cut.shape(shape)) for shape, cut in of_those)


def cut_tensors(tensors: FlatTensors, cuts: Cuts, whose: str) -> FlatTensors:
    """Return tensors of which some are cut, in memory of their own.

    Args:
        tensors: whole.
        cuts: by name; those of tensors that are not here are not looked at.
        whose: for a message: who gets them.

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
    layout = Layout.of_shapes(shapes)
    vector = np.empty(layout.size, np.float32)
    for name, shape in shapes.items():
        whole = tensors.vector[tensors.layout.columns(name)].reshape(
            tensors.layout.shapes[tensors.layout.positions[name]]
        )
        part = whole[cuts[name].place(whole.shape)] if name in cuts else whole
        vector[layout.columns(name)].reshape(shape)[...] = part
    return FlatTensors(layout, vector)
