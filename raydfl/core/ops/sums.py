"""Sums over many clients' vectors, which are read where they lie: nothing of a cohort's size is ever copied.

With the compiled operators (:mod:`raydfl.ops`) each sum reads the vectors at about the speed of memory. Without them NumPy does
the work on strips that stay in the cache, and some results are rounded to float32 on the way; each method says so.

Sums run in the order of the vectors and in one thread: to the bit, a result is a function of the vectors and weights alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from raydfl.core.ops._backend import compiled_for

Parts = Sequence[tuple[int, int]]
"""First element, and first beyond, of ranges of a vector."""

STRIP = 32_768  # elements of one vector worked on at a time: as float64 (256 KiB) they stay in the second-level cache
_SORTED = 2**18  # float32 elements of all vectors sorted at a time (1 MiB): they stay in the second-level cache
_SAMPLE = 2**17  # differences of one pair of vectors after another, in all, that the choice of a centre may cost
_BLOCK = 2**22  # float32 elements of all vectors copied at a time (16 MiB): they stay in the third-level cache


_FLOATS = torch.empty(0)
"""To ask with: making a tensor lets go of the interpreter, and another thread keeps it for a while."""


def sums_are_compiled() -> bool:
    """Return whether sums are compiled: the operators were built, and :func:`raydfl.ops.use` has not turned them off."""
    return compiled_for(_FLOATS) is not None and _built()


@cache
def _built() -> bool:
    """Return whether the loaded operators have these sums too: those built from older sources do not."""
    return hasattr(torch.ops.raydfl, "add_slices")


def as_tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return the arrays' memory as tensors, for operators that only read."""
    if all(array.flags.writeable for array in arrays):
        return [torch.from_numpy(array) for array in arrays]
    with warnings.catch_warnings():
        # What torch says about arrays that are not writeable does not concern them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return [torch.from_numpy(array) for array in arrays]


class ClientVectors:
    """One float32 vector for each client, in client order, contiguous and all of one length. They are only read."""

    def __init__(self, vectors: Sequence[np.ndarray]) -> None:
        """Wrap the vectors without copying them; they may be other processes' memory."""
        self.vectors = vectors
        self._tensors: list[torch.Tensor] = []
        self._memory = np.empty(0, np.float32)
        if sums_are_compiled():
            self._tensors = as_tensors(vectors)

    def add_to(
        self, total: np.ndarray, weights: Sequence[float], chosen: Sequence[int] | None = None, start: int = 0
    ) -> None:
        """Add ``weights[0] * vectors[0] + ...`` to ``total`` in float64, one after another.

        Each product is rounded before it is added, so that no fused operation rounds differently: the bits are the same with
        and without compiled operators, and however many vectors one call adds.

        Args:
            total: float64 [elements], contiguous.
            weights: one for each vector that is added.
            chosen: positions of the vectors to add, in the order of adding; all by default.
            start: where in the vectors the elements begin.
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

    def squared_deviations(self, parts: Parts) -> np.ndarray:
        """Return each vector's squared Euclidean distance to the mean of all: float64 [vectors].

        Differences are taken before they are squared, so vectors that are close to each other far from 0 keep their order.
        Compiled, all is done in float64. NumPy has float32 means and differences: distances that differ by less than about
        1e-6 of their size may then come in another order. Values beyond float32's squares cost it a second, float64 pass.

        Args:
            parts: the elements that count.
        """
        if self._tensors:
            starts, stops = [start for start, _ in parts], [stop for _, stop in parts]
            squares: np.ndarray = torch.ops.raydfl.squared_deviations(self._tensors, starts, stops).numpy()
            return squares
        squares = self._squared_deviations(parts, np.float32)
        if not np.all((squares > 1e-30) & (squares < np.inf)):  # beyond the range of float32, where it cannot sort
            squares = self._squared_deviations(parts, np.float64)
        return squares

    def _squared_deviations(self, parts: Parts, dtype: type[np.floating]) -> np.ndarray:
        """Compute :meth:`squared_deviations` in NumPy, with the differences in the given precision."""
        count = len(self.vectors)
        squares = np.zeros(count)
        with np.errstate(over="ignore", invalid="ignore"):
            for _, _, block in self._blocks(parts, range(count), dtype):
                mean = np.dot(np.ones(count, dtype), block)
                mean /= count
                apart = np.subtract(block, mean, out=block)
                squares += [np.dot(row, row) for row in apart]
        return squares

    def squared_distances(self, point: np.ndarray) -> np.ndarray:
        """Return each vector's squared Euclidean distance to a point: float64 [vectors].

        Differences are taken before they are squared. Both are float32, sums of up to 32,768 squares too; values beyond the
        range of float32's squares cost a second pass in float64.

        Args:
            point: float32 [elements].
        """
        squares = self._squared_distances(point, np.float32)
        if not _in_range(squares):
            squares = self._squared_distances(point, np.float64)
        return squares

    def _squared_distances(self, point: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
        """Compute :meth:`squared_distances` with the differences in the given precision."""
        squares = np.zeros(len(self.vectors))
        apart = np.empty(min(STRIP, len(point)), dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, len(point), STRIP):
                there = point[begin : begin + STRIP].astype(dtype, copy=False)
                part = apart[: len(there)]
                for row, vector in enumerate(self.vectors):
                    np.subtract(vector[begin : begin + STRIP], there, out=part)
                    squares[row] += np.dot(part, part)
        return squares

    def pairwise(self) -> np.ndarray:
        """Return the squared Euclidean distances between all vectors: float64 [vectors, vectors], symmetric, 0 on the diagonal.

        They come from one matrix product of the differences to a vector in the midst of the others. An error is therefore about
        1e-6 of the squared distance of the farther one from there: neither a common offset nor vectors far away blur the
        distances between those that are close together. Values beyond the range of float32's squares cost a second pass
        in float64.
        """
        squares = self._pairwise(np.float32)
        if not _in_range(squares):
            squares = self._pairwise(np.float64)
        return squares

    def _pairwise(self, dtype: type[np.floating]) -> np.ndarray:
        """Compute :meth:`pairwise` with differences and products in the given precision."""
        count, elements = len(self.vectors), len(self.vectors[0])
        centre = self.vectors[self._in_the_midst()]
        products = np.zeros((count, count))
        with np.errstate(over="ignore", invalid="ignore"):
            for begin, end, block in self._blocks([(0, elements)], range(count), dtype):
                apart = np.subtract(block, centre[begin:end], out=block)
                products += apart @ apart.T
            lengths = np.diagonal(products)
            squares: np.ndarray = lengths[:, None] + lengths - 2 * products
        np.fill_diagonal(squares, 0)
        np.maximum(squares, 0, out=squares)
        return squares

    def _in_the_midst(self) -> int:
        """Return the vector from which half of the others are least far, judged by a sample of the elements."""
        count, elements = len(self.vectors), len(self.vectors[0])
        columns = np.linspace(0, elements - 1, min(elements, max(16, _SAMPLE // count)), dtype=np.int64)
        sample = np.stack([vector[columns] for vector in self.vectors]).astype(np.float64)
        far = [np.median(np.square(sample - one).sum(axis=1)) for one in sample]
        return int(np.argmin(far))

    def ordered(self, chosen: Sequence[int]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the values of each element, sorted.

        Yields:
            Elements from, and to (not included); their values, float32 [elements, chosen], ascending in each row, to work in.
        """
        elements = len(self.vectors[0])
        width = max(1, _SORTED // len(chosen))
        memory = np.empty(
            min(width, elements) * len(chosen), np.float32
        )  # kept: fresh memory costs more than the copies
        for begin in range(0, elements, width):
            end = min(begin + width, elements)
            block = memory[: (end - begin) * len(chosen)].reshape(end - begin, len(chosen))
            for column, row in enumerate(chosen):
                block[:, column] = self.vectors[row][begin:end]
            block.sort(axis=1)
            yield begin, end, block

    def approximate_sum(self, weights: np.ndarray, chosen: Sequence[int], parts: Parts) -> np.ndarray:
        """Add up some weighted vectors in NumPy's float32: several times as fast there as :meth:`add_to`.

        Its error is below ``len(chosen) * 1.2e-7`` of the weighted sum of the magnitudes, and as a rule far smaller.

        Args:
            weights: float64 [chosen]; sums below 1, so that nothing overflows.
            chosen: positions of the vectors.
            parts: the elements wanted; they lie one part after another in the result.

        Returns:
            float32 [elements of all parts].
        """
        narrow = weights.astype(np.float32)
        total = np.empty(sum(stop - start for start, stop in parts), np.float32)
        for begin, end, block in self._blocks(parts, chosen, np.float32):
            np.dot(narrow, block, out=total[begin:end])
        return total

    def _blocks(
        self, parts: Parts, chosen: Sequence[int], dtype: type[np.floating]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Copies of some vectors, block by block.

        Yields:
            The block's first element and the first beyond it, counted over all parts, and the block, [chosen, elements], to
            work in: the next one overwrites it.
        """
        columns = max(1, _BLOCK // len(chosen))
        longest = min(columns, max((stop - start for start, stop in parts), default=0))
        if self._memory.size < len(chosen) * longest or self._memory.dtype != dtype:
            self._memory = np.empty(
                len(chosen) * longest, dtype
            )  # kept: fresh memory costs more than the work done in it
        done = 0
        for first, last in parts:
            pieces = math.ceil((last - first) / columns)
            for piece in range(pieces):
                begin, end = (first + (last - first) * edge // pieces for edge in (piece, piece + 1))
                flat = self._memory[: len(chosen) * (end - begin)]
                np.concatenate([self.vectors[row][begin:end] for row in chosen], out=flat, casting="safe")
                yield done + begin - first, done + end - first, flat.reshape(len(chosen), end - begin)
            done += last - first


def _in_range(squares: np.ndarray) -> bool:
    """Return whether float32 could hold what was squared and summed, so that the result is as precise as it should be."""
    return bool(np.isfinite(squares).all()) and float(np.max(squares, initial=0.0)) > 1e-30
