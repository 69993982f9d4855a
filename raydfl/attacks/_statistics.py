"""Statistics of the honest updates that colluding attackers know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from raydfl.rules import one_thread

_BLOCK = 1 << 15
"""Elements of a block. With some dozens of clients a block fits into the processor's cache."""


class HonestUpdates:
    """Honest updates of one key and layout, as changes from the server's tensors. Sums are in float64.

    Args:
        rows: float32 [elements] for each known client, in client order. At least one row; rows are never modified.
        reference: float32 [elements], the server's tensors.
    """

    def __init__(self, rows: Sequence[np.ndarray], reference: np.ndarray) -> None:
        self.rows = rows
        self.reference = reference

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def mean(self) -> np.ndarray:
        """Uniform mean of the changes: float64 [elements]."""
        mean: np.ndarray = self._row_mean - self.reference
        return mean

    @cached_property
    def deviation(self) -> np.ndarray:
        """Standard deviation of each element over the clients, without Bessel's correction: float64 [elements]."""
        squares = np.zeros(len(self.reference))
        for columns, block in self._iter_centred():
            squares[columns] = np.square(block).sum(axis=0)
        result: np.ndarray = np.sqrt(squares / len(self.rows))
        return result

    def products(self, direction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute inner products of the centred changes.

        Args:
            direction: float64 [elements].

        Returns:
            The products with each other, float64 [clients, clients], and with ``direction``, float64 [clients].
        """
        gram, along = np.zeros((len(self.rows), len(self.rows))), np.zeros(len(self.rows))
        with one_thread():
            for columns, block in self._iter_centred():
                gram += block @ block.T
                along += block @ direction[columns]
        return gram, along

    @cached_property
    def _row_mean(self) -> np.ndarray:
        total = np.zeros(len(self.reference))
        for row in self.rows:
            total += row
        return total / len(self.rows)

    def _iter_centred(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield blocks of elements: their columns, and the centred rows float64 [clients, elements]."""
        for start in range(0, len(self.reference), _BLOCK):
            columns = slice(start, start + _BLOCK)
            yield columns, np.stack([row[columns] for row in self.rows]) - self._row_mean[columns]
