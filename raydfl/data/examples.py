"""Examples: batches cut by index from memory-mapped features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from raydfl.core.types import Batch
from raydfl.data.features.cache import FeatureStore


@dataclass(frozen=True, slots=True)
class Examples:
    """Some examples of a feature store. An example is a clip, or a segment of one."""

    store: FeatureStore
    starts: np.ndarray
    """int64 [examples]: first row in the store's frames."""
    counts: np.ndarray
    """int [examples]: frames of each example."""
    labels: np.ndarray
    """int64 [examples]: class indices."""
    clips: np.ndarray
    """int64 [examples]: number of the clip; segments of one clip have the same."""
    length: int | None
    """Frames of every example when all of the population have the same number, else ``None``."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """int64 [examples] each, by name: what batches carry as :attr:`Batch.columns`."""

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: np.ndarray) -> Examples:
        """Return the examples at these positions (int [n]), in that order."""
        indices = np.asarray(indices, np.int64)
        return Examples(
            self.store,
            self.starts[indices],
            self.counts[indices],
            self.labels[indices],
            self.clips[indices],
            self.length,
            {name: column[indices] for name, column in self.columns.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[Examples], column: str) -> Examples:
        """Return the examples of several parts of one store end to end; ``column`` gets the number of each one's part."""
        first = parts[0]
        for part in parts[1:]:
            if part.store is not first.store:
                raise ValueError("examples of several feature stores cannot be in one batch")
        number = np.repeat(np.arange(len(parts)), [len(part) for part in parts])

        def end_to_end(name: str) -> np.ndarray:
            return np.concatenate([getattr(part, name) for part in parts])

        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
        return cls(
            first.store,
            end_to_end("starts"),
            end_to_end("counts"),
            end_to_end("labels"),
            end_to_end("clips"),
            first.length,
            {**columns, column: number},
        )

    def batch(self, index: np.ndarray, device: torch.device | str = "cpu") -> Batch:
        """Return the examples at positions ``index`` (int [n]) as one batch on ``device``.

        ``x`` is float32 [n, frames, bands]. When lengths differ, all are padded with zeros to the batch's longest and ``lengths``
        holds their own; in a population whose examples all have one length ``lengths`` is ``None``.
        """
        counts = self.counts[index].tolist()
        longest = self.length if self.length is not None else max(counts, default=1)
        x = np.empty((len(counts), longest, self.store.bands), np.float32)
        self.copy(index, x)
        lengths = None
        if self.length is None:
            lengths = torch.tensor(counts, dtype=torch.int64, device=device)
        return Batch(
            x=torch.from_numpy(x).to(device),
            y=torch.from_numpy(self.labels[index].astype(np.int64)).to(device),
            lengths=lengths,
            columns={name: torch.from_numpy(column[index]).to(device) for name, column in self.columns.items()},
        )

    def copy(self, index: np.ndarray, out: np.ndarray) -> None:
        """Write the frames of the examples at positions ``index`` (int [n]) into ``out``.

        Args:
            out: float32 [n, frames, bands], at least as many frames as the longest of them has; the rest becomes 0.
        """
        frames = self.store.frames.view(np.ndarray)  # cutting the map itself costs twice as much
        for row, start, count in zip(out, self.starts[index].tolist(), self.counts[index].tolist(), strict=True):
            row[:count] = frames[start : start + count]
            if count < len(row):
                row[count:] = 0.0

    def read_ahead(self) -> None:
        """Ask the kernel to fetch these examples from the disk, where the page cache cannot keep everything anyway."""
        if not self.store.fits_in_memory:
            self.store.read_ahead(self.starts, self.counts)

    def order(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """Return the positions (int64 [at most batch_size]) of each batch of one pass over all examples, the last may be smaller.

        Args:
            rng: shuffles; ``None``: in order.
        """
        order = np.arange(len(self)) if rng is None else rng.permutation(len(self))
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def batches(
        self, batch_size: int, rng: np.random.Generator | None, device: torch.device | str = "cpu"
    ) -> Iterator[Batch]:
        """Yield all examples once, in the batches of :meth:`order`."""
        for index in self.order(batch_size, rng):
            yield self.batch(index, device)


@dataclass(frozen=True, slots=True)
class ClientData:
    """What a client has."""

    train: Examples
    """What it trains on where the method makes no plan of its own: the first of its pools."""
    validation: Examples
    """Its own hold-out, clean; may be empty."""
    test: Examples
    """A client's own test, clean; empty unless ``data.split.client_test`` makes one. The server's where that itself computes."""
    further: Mapping[str, Examples] = field(default_factory=dict)
    """Training examples in further pools, by name."""
    first: str = "train"
    """Name of the first pool."""

    @property
    def pools(self) -> Mapping[str, Examples]:
        """All training examples by pool, those of ``train`` first."""
        return {self.first: self.train, **self.further}
