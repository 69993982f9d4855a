"""Knowledge of colluding attackers about a round: honest updates, as changes to what the server has, and their statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from raydfl.rules import one_thread

_BLOCK = 1 << 15
"""Elements that are worked on at a time: of some dozens of clients they stay in the processor's cache."""


class HonestUpdates:
    """Honest updates of one key and layout. Rows are read where they lie, in blocks; sums are in float64.

    Args:
        rows: one float32 [elements] for each known client, in client order, at least one; they are not written into.
        reference: float32 [elements]: what the changes are counted from.
    """

    def __init__(self, rows: Sequence[np.ndarray], reference: np.ndarray) -> None:
        self.rows = rows
        self.reference = reference

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def mean(self) -> np.ndarray:
        """The uniform mean change: float64 [elements]."""
        mean: np.ndarray = self._row_mean - self.reference
        return mean

    @cached_property
    def deviation(self) -> np.ndarray:
        """The standard deviation of every element over the clients (divided by their number): float64 [elements]."""
        squares = np.zeros(len(self.reference))
        for where, block in self._centred():
            squares[where] = np.square(block).sum(axis=0)
        result: np.ndarray = np.sqrt(squares / len(self.rows))
        return result

    def products(self, direction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inner products of the changes' differences to their mean.

        Args:
            direction: float64 [elements].

        Returns:
            With each other: float64 [clients, clients]; with ``direction``: float64 [clients].
        """
        gram, along = np.zeros((len(self.rows), len(self.rows))), np.zeros(len(self.rows))
        with one_thread():
            for where, block in self._centred():
                gram += block @ block.T
                along += block @ direction[where]
        return gram, along

    @cached_property
    def _row_mean(self) -> np.ndarray:
        total = np.zeros(len(self.reference))
        for row in self.rows:
            total += row
        return total / len(self.rows)

    def _centred(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Blocks of elements: where they lie, and float64 [clients, elements] less the mean."""
        for start in range(0, len(self.reference), _BLOCK):
            where = slice(start, start + _BLOCK)
            yield where, np.stack([row[where] for row in self.rows]) - self._row_mean[where]
