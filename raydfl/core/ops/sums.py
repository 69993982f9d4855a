"""Sums over many clients' vectors, without copying a cohort.

The compiled operators (:mod:`raydfl.ops`) read the vectors at about the speed of memory. Without them NumPy works on strips that
fit the cache, and rounds some intermediate results to float32; the methods document it.

Sums run in client order in a single thread, so a result's bits depend on the vectors and weights alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from raydfl.core.ops._backend import select_operators

Ranges = Sequence[tuple[int, int]]
"""Ranges of a vector's elements: start (inclusive) and stop (exclusive)."""

STRIP = 32_768  # elements of a vector in a strip: as float64 (256 KiB) they fit the second-level cache
_SORTED = 2**18  # float32 elements of all vectors sorted at a time (1 MiB): they fit the second-level cache
_SAMPLE = 2**17  # upper limit of the differences computed to choose a centre
_BLOCK = 2**22  # float32 elements of all vectors copied at a time (16 MiB): they fit the third-level cache


_FLOATS = torch.empty(0)
"""Argument for :func:`sums_are_compiled`. Creating a tensor there would release the interpreter lock to other threads."""


def sums_are_compiled() -> bool:
    """Return whether sums use compiled operators: they are available, and :func:`raydfl.ops.use` does not disable them."""
    return select_operators(_FLOATS) is not None and _has_sums()


@cache
def _has_sums() -> bool:
    """Return whether the loaded library has sums. A library built from older sources lacks them."""
    return hasattr(torch.ops.raydfl, "add_slices")


def as_tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Wrap the arrays' memory in tensors, for operators that only read."""
    if all(array.flags.writeable for array in arrays):
        return [torch.from_numpy(array) for array in arrays]
    with warnings.catch_warnings():
        # torch warns about read-only arrays, but the operators do not write into them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return [torch.from_numpy(array) for array in arrays]


class ClientVectors:
    """Read-only vectors of clients, in client order: float32 [elements] each, contiguous."""

    def __init__(self, vectors: Sequence[np.ndarray]) -> None:
        """Wrap the vectors without copying them. They may be shared memory."""
        self.vectors = vectors
        self._tensors: list[torch.Tensor] = []
        self._memory = np.empty(0, np.float32)
        if sums_are_compiled():
            self._tensors = as_tensors(vectors)

    def add_to(
        self, total: np.ndarray, weights: Sequence[float], chosen: Sequence[int] | None = None, start: int = 0
    ) -> None:
        """Add ``weights[0] * vectors[0] + ...`` to ``total`` in float64, in place.

        Products are rounded before they are added. So the bits do not depend on compiled operators, fused multiply-adds, or the
        number of vectors per call.

        Args:
            total: float64 [elements], contiguous.
            weights: weight of each chosen vector.
            chosen: indices of the vectors, in order of addition. ``None``: all.
            start: first element of the vectors to add to ``total[0]``.
        """
        chosen = range(len(self.vectors)) if chosen is None else chosen
        if self._tensors:
            rows = [self._tensors[row] for row in chosen]
            torch.ops.raydfl.add_weighted(torch.from_numpy(total), rows, weights, start)
            return
        scratch = np.empty(min(STRIP, len(total)))
        for begin in range(0, len(total), STRIP):
            strip = slice(begin, min(begin + STRIP, len(total)))
            part, sums = scratch[: strip.stop - begin], total[strip]
            for row, weight in zip(chosen, weights, strict=True):
                part[:] = self.vectors[row][start + begin : start + strip.stop]
                part *= weight
                np.add(sums, part, out=sums)

    def compute_squared_deviations(self, ranges: Ranges) -> np.ndarray:
        """Return each vector's squared Euclidean distance to the mean of all vectors: float64 [vectors].

        Differences are squared, not values, so similar vectors far from 0 keep their order. Compiled operators use float64. NumPy
        uses float32 for means and differences: distances with a relative difference below about 1e-6 may change order. It repeats
        the computation in float64 if squares exceed the range of float32.

        Args:
            ranges: bounds of the elements to compare.
        """
        if self._tensors:
            starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
            squares: np.ndarray = torch.ops.raydfl.squared_deviations(self._tensors, starts, stops).numpy()
            return squares
        squares = self._compute_deviations(ranges, np.float32)
        if not np.all((squares > 1e-30) & (squares < np.inf)):  # outside the range of float32, so the order is lost
            squares = self._compute_deviations(ranges, np.float64)
        return squares

    def _compute_deviations(self, ranges: Ranges, dtype: type[np.floating]) -> np.ndarray:
        """Compute :meth:`compute_squared_deviations` in NumPy, with differences in ``dtype``."""
        count = len(self.vectors)
        squares = np.zeros(count)
        with np.errstate(over="ignore", invalid="ignore"):
            for _, _, block in self._blocks(ranges, range(count), dtype):
                mean = np.dot(np.ones(count, dtype), block)
                mean /= count
                differences = np.subtract(block, mean, out=block)
                squares += [np.dot(row, row) for row in differences]
        return squares

    def compute_squared_distances(self, point: np.ndarray) -> np.ndarray:
        """Return each vector's squared Euclidean distance to a point: float64 [vectors].

        Differences, squares and sums of up to 32,768 squares are float32. If squares exceed its range, the computation is repeated
        in float64.

        Args:
            point: float32 [elements].
        """
        squares = self._compute_distances(point, np.float32)
        if not _is_in_range(squares):
            squares = self._compute_distances(point, np.float64)
        return squares

    def _compute_distances(self, point: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
        """Compute :meth:`compute_squared_distances` with differences in ``dtype``."""
        squares = np.zeros(len(self.vectors))
        memory = np.empty(min(STRIP, len(point)), dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(point), STRIP):
                strip = point[begin : begin + STRIP].astype(dtype, copy=False)
                differences = memory[: len(strip)]
                for row, vector in enumerate(self.vectors):
                    np.subtract(vector[begin : begin + STRIP], strip, out=differences)
                    squares[row] += np.dot(differences, differences)
        return squares

    def pairwise(self) -> np.ndarray:
        """Return squared Euclidean distances between all vectors: float64 [vectors, vectors], symmetric, 0 on the diagonal.

        They come from a matrix product of differences to a central vector. An error is about 1e-6 of a vector's squared distance
        from the centre, so neither a common offset nor outliers blur the distances between similar vectors. If squares exceed the
        range of float32, the computation is repeated in float64.
        """
        squares = self._pairwise(np.float32)
        if not _is_in_range(squares):
            squares = self._pairwise(np.float64)
        return squares

    def _pairwise(self, dtype: type[np.floating]) -> np.ndarray:
        """Compute :meth:`pairwise` with differences and products in ``dtype``."""
        count, elements = len(self.vectors), len(self.vectors[0])
        centre = self.vectors[self._find_centre()]
        products = np.zeros((count, count))
        with np.errstate(over="ignore", invalid="ignore"):
            for begin, end, block in self._blocks([(0, elements)], range(count), dtype):
                differences = np.subtract(block, centre[begin:end], out=block)
                products += differences @ differences.T
            lengths = np.diagonal(products)
            squares: np.ndarray = lengths[:, None] + lengths - 2 * products
        np.fill_diagonal(squares, 0)
        np.maximum(squares, 0, out=squares)
        return squares

    def _find_centre(self) -> int:
        """Return the index of the vector with the smallest median distance to all vectors, on a sample of the elements."""
        count, elements = len(self.vectors), len(self.vectors[0])
        columns = np.linspace(0, elements - 1, min(elements, max(16, _SAMPLE // count)), dtype=np.int64)
        sample = np.stack([vector[columns] for vector in self.vectors]).astype(np.float64)
        medians = [np.median(np.square(sample - vector).sum(axis=1)) for vector in sample]
        return int(np.argmin(medians))

    def iter_sorted(self, chosen: Sequence[int]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the sorted values of each element, block by block.

        Args:
            chosen: indices of the vectors.

        Yields:
            First element and end (exclusive) of a block, and its values, float32 [elements, chosen], ascending in each row. You may
            modify the values; the next block overwrites them.
        """
        elements = len(self.vectors[0])
        width = max(1, _SORTED // len(chosen))
        # Reuse the memory, because allocation costs more than the copies.
        memory = np.empty(min(width, elements) * len(chosen), np.float32)
        for begin in range(0, elements, width):
            end = min(begin + width, elements)
            block = memory[: (end - begin) * len(chosen)].reshape(end - begin, len(chosen))
            for column, row in enumerate(chosen):
                block[:, column] = self.vectors[row][begin:end]
            block.sort(axis=1)
            yield begin, end, block

    def approximate_sum(self, weights: np.ndarray, chosen: Sequence[int], ranges: Ranges) -> np.ndarray:
        """Return a weighted sum of vectors in float32, several times as fast as NumPy's :meth:`add_to`.

        The error is below ``len(chosen) * 1.2e-7`` of the weighted sum of magnitudes, and usually far smaller.

        Args:
            weights: float64 [chosen]. Their sum must be below 1 to prevent overflow.
            chosen: indices of the vectors.
            ranges: bounds of the elements to sum.

        Returns:
            float32 [elements]: the concatenated ranges.
        """
        narrow = weights.astype(np.float32)
        total = np.empty(sum(stop - start for start, stop in ranges), np.float32)
        for begin, end, block in self._blocks(ranges, chosen, np.float32):
            np.dot(narrow, block, out=total[begin:end])
        return total

    def _blocks(
        self, ranges: Ranges, chosen: Sequence[int], dtype: type[np.floating]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Copy vectors block by block.

        Yields:
            First element and end (exclusive) of a block, counted over all ranges, and the block, [chosen, elements]. You may modify
            it; the next block overwrites it.
        """
        columns = max(1, _BLOCK // len(chosen))
        longest = min(columns, max((stop - start for start, stop in ranges), default=0))
        if self._memory.size < len(chosen) * longest or self._memory.dtype != dtype:
            # Reuse the memory, because allocation costs more than the work in it.
            self._memory = np.empty(len(chosen) * longest, dtype)
        done = 0
        for first, last in ranges:
            pieces = math.ceil((last - first) / columns)
            for piece in range(pieces):
                begin, end = (first + (last - first) * edge // pieces for edge in (piece, piece + 1))
                flat = self._memory[: len(chosen) * (end - begin)]
                np.concatenate([self.vectors[row][begin:end] for row in chosen], out=flat, casting="safe")
                yield done + begin - first, done + end - first, flat.reshape(len(chosen), end - begin)
            done += last - first


def _is_in_range(squares: np.ndarray) -> bool:
    """Return whether sums of squares are within the range of float32, so that they are precise."""
    return bool(np.isfinite(squares).all()) and float(np.max(squares, initial=0.0)) > 1e-30
