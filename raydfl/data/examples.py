"""Examples: batches cut by index from memory-mapped features."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from raydfl.core.types import Batch
from raydfl.data.features.cache import FeatureStore
from raydfl.data.segment import SegmentSettings, segments
from raydfl.data.transforms import PLAIN, Drawn, Pipeline


@dataclass(frozen=True, slots=True)
class Frames:
    """One view of some examples: for each of them rows of a feature store."""

    store: FeatureStore
    starts: np.ndarray
    """int64 [examples]: first row in the store's frames."""
    counts: np.ndarray
    """int [examples]: frames of each example; 0 where it lacks the view."""
    length: int | None
    """Frames of every example in a batch when all of the population have the same number there, else ``None``."""
    pipeline: Pipeline = PLAIN
    """The way of stored frames into a batch."""
    stream: int = 0
    """Number of the view: each draws its own random numbers."""
    optional: bool = False
    """Whether examples may lack the view."""

    def take(self, indices: np.ndarray) -> Frames:
        """Return the frames of the examples at these positions (int64 [n])."""
        return replace(self, starts=self.starts[indices], counts=self.counts[indices])

    @classmethod
    def joined(cls, parts: Sequence[Frames]) -> Frames:
        """Return the frames of several parts of one store end to end."""
        if any(part.store is not parts[0].store for part in parts):
            raise ValueError("examples of several feature stores cannot be in one batch")
        starts, counts = (np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "counts"))
        return replace(parts[0], starts=starts, counts=counts)

    def batch(
        self, index: np.ndarray, device: torch.device | str = "cpu", drawn: Drawn | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the view of the examples at positions ``index`` (int [n]): float32 [n, frames, bands], and the lengths.

        When lengths differ, all are padded with zeros to the batch's longest and the second is int64 [n]: their own; where all of
        the population have one length it is ``None``.

        Args:
            index: the positions.
            device: where the tensors are wanted.
            drawn: see :meth:`draw`; ``None``: nothing random is done.
        """
        starts, counts = self.window(index, drawn)
        longest = self.length if self.length is not None else int(counts.max(initial=1))
        if self.pipeline.plain:
            x = torch.from_numpy(self._stored(starts, counts, longest)).to(device)
        else:
            x = self._transformed(starts, counts, longest, device, drawn)
        if self.length is not None:
            return x, None
        return x, torch.from_numpy(counts.astype(np.int64, copy=False)).to(device)

    def _stored(self, starts: np.ndarray, counts: np.ndarray, longest: int) -> np.ndarray:
        """Return frames as they are stored: float32 [n, longest, bands]."""
        shape = len(counts), longest, self.store.bands
        # All frames of all examples: NumPy copies them in one call.
        if len(counts) and self.store.frames.dtype == np.float32 and (counts == longest).all():
            found: np.ndarray = self.store.windows(longest)[starts].reshape(shape)
            return found
        stored = np.empty(shape, np.float32)
        self.copy(starts, counts, stored)
        return stored

    def _transformed(
        self, starts: np.ndarray, counts: np.ndarray, longest: int, device: torch.device | str, drawn: Drawn | None
    ) -> Tensor:
        """Return x of a batch by way of the pipeline; frames that are padding in all examples need not go it."""
        sounding = self.sounding(starts, counts)
        frames = longest if self.pipeline.pixels is not None else int(sounding.max(initial=1))
        stored = self._stored(starts, np.minimum(counts, frames), frames)
        random = None if drawn is None else {name: torch.from_numpy(a).to(device) for name, a in drawn.items()}
        x = self.pipeline.apply(torch.from_numpy(stored).to(device), torch.from_numpy(sounding).to(device), random)
        return torch.nn.functional.pad(x, (0, 0, 0, longest - frames)) if frames < longest else x

    def draw(self, index: np.ndarray, seed: int, number: int) -> Drawn:
        """Draw the transforms of the examples at positions ``index`` in one batch of a training.

        Args:
            index: the positions.
            seed: of the fit.
            number: of the batch in it.
        """

        def sounding(drawn: Drawn) -> np.ndarray:
            return self.sounding(*self.window(index, drawn))

        return self.pipeline.draw((seed, number, self.stream), self.counts[index], self.store.bands, sounding)

    def window(self, index: np.ndarray, drawn: Drawn | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return first rows in the store and numbers of frames (int [n] each) that a batch has of these examples."""
        return self.pipeline.window(self.starts[index], self.counts[index], drawn)

    def sounding(self, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return how many of some frames are no padding in the store: int64, of the shape of ``starts``."""
        offsets = self.store.offsets
        if not len(self.store):  # a view that nobody here has
            return np.zeros(starts.shape, np.int64)
        clip = np.searchsorted(offsets, starts, side="right") - 1
        rest = offsets[clip] + self.store.lengths[clip] - starts
        found: np.ndarray = np.clip(rest, 0, counts).astype(np.int64)
        return found

    def copy(self, starts: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
        """Write frames of some examples into ``out``.

        Args:
            starts: int [n]: first row in the store.
            counts: int [n]: rows.
            out: float32 [n, frames, bands], at least as many frames as the longest of them has; the rest becomes 0.
        """
        frames = self.store.frames.view(np.ndarray)  # cutting the map itself costs twice as much
        for row, start, count in zip(out, starts.tolist(), counts.tolist(), strict=True):
            row[:count] = frames[start : start + count]
            if count < len(row):
                row[count:] = 0.0


@dataclass(frozen=True, slots=True)
class Examples:
    """Some examples. An example is a clip, or a segment of one."""

    views: Mapping[str, Frames]
    """The views of the examples by name; at least one."""
    labels: np.ndarray
    """int64 [examples]: class indices; with :attr:`sets` indices of its rows."""
    clips: np.ndarray
    """int64 [examples]: number of the clip; segments of one clip have the same."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """int64 [examples] each, by name: what batches carry as :attr:`Batch.columns`."""
    classes: tuple[str, ...] = ()
    """Names of the classes."""
    sets: np.ndarray | None = None
    """bool [labels, classes]: the classes of each label, where a label is a set of them; ``None``: a label is one class."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def first_view(self) -> Frames:
        """The first of the views."""
        return next(iter(self.views.values()))

    @property
    def form(self) -> Hashable:
        """The properties that examples of several clients have in common if these are computed at once."""
        views = ((name, v.length, v.store.bands, id(v.pipeline)) for name, v in self.views.items())
        return tuple(self.columns), tuple(views)

    @property
    def changed(self) -> bool:
        """True where anything but copying is done to stored frames of any view on their way into a batch."""
        return not all(view.pipeline.plain for view in self.views.values())

    def take(self, indices: np.ndarray) -> Examples:
        """Return the examples at these positions (int [n]), in that order."""
        indices = np.asarray(indices, np.int64)
        return replace(
            self,
            views={name: view.take(indices) for name, view in self.views.items()},
            labels=self.labels[indices],
            clips=self.clips[indices],
            columns={name: column[indices] for name, column in self.columns.items()},
        )

    def as_tested(self) -> Examples:
        """Return these training examples cut into the segments in which a random crop has others measured; else as they are."""
        view, crop = self.first_view, self.first_view.pipeline.crop
        if crop is None or crop.test != "segments":
            return self
        settings = SegmentSettings(frames=crop.size, stride=crop.stride or crop.size)
        which, first, frames = segments(view.counts, settings, None)
        found = self.take(which)
        cut = replace(found.first_view, starts=found.first_view.starts + first, counts=frames)
        return replace(found, views={**found.views, next(iter(found.views)): cut})

    def seen_by(self, view: str) -> Examples:
        """Return the examples with one view alone, so that no other is read."""
        return self if [*self.views] == [view] else replace(self, views={view: self.views[view]})

    def targets(self, labels: np.ndarray) -> np.ndarray:
        """Return labels (int [n]) as batches have them: int64 [n], or float32 [n, classes] where a label is a set of classes."""
        return labels.astype(np.int64, copy=False) if self.sets is None else self.sets[labels].astype(np.float32)

    @classmethod
    def joined(cls, parts: Sequence[Examples], column: str) -> Examples:
        """Return the examples of several parts end to end; ``column`` gets the number of each one's part.

        All parts have the same feature stores.
        """
        first = parts[0]
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
        columns[column] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return replace(
            first,
            views={name: Frames.joined([part.views[name] for part in parts]) for name in first.views},
            labels=np.concatenate([part.labels for part in parts]),
            clips=np.concatenate([part.clips for part in parts]),
            columns=columns,
        )

    def batch(
        self, index: np.ndarray, device: torch.device | str = "cpu", drawn: Mapping[str, Drawn] | None = None
    ) -> Batch:
        """Return the examples at positions ``index`` (int [n]) as one batch on ``device``.

        Args:
            index: the positions.
            device: where the batch is wanted.
            drawn: what :meth:`draw` gave for these examples; ``None``: nothing random is done to them.
        """
        views, lengths = {}, {}
        for name, view in self.views.items():
            views[name], own = view.batch(index, device, None if drawn is None else drawn[name])
            if own is not None:
                lengths[name] = own
        return Batch(
            views,
            torch.from_numpy(self.targets(self.labels[index])).to(device),
            lengths,
            {n: torch.from_numpy(v.counts[index] > 0).to(device) for n, v in self.views.items() if v.optional},
            columns={name: torch.from_numpy(column[index]).to(device) for name, column in self.columns.items()},
        )

    def draw(self, index: np.ndarray, seed: int, number: int) -> dict[str, Drawn]:
        """Draw the transforms of the examples at positions ``index`` in one batch, by view: see :meth:`Frames.draw`."""
        return {name: view.draw(index, seed, number) for name, view in self.views.items()}

    def read_ahead(self) -> None:
        """Ask the kernel to fetch these examples from the disk, where the page cache cannot keep everything anyway."""
        for view in self.views.values():
            if not view.store.fits_in_memory:
                view.store.read_ahead(view.starts, view.counts)

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
    """A client's examples."""

    pools: Mapping[str, Examples]
    """Training examples by pool; at least one."""
    validation: Examples
    """Its own hold-out, clean; may be empty."""
    test: Examples
    """A client's own test, clean; empty unless ``data.split.client_test`` makes one. The server's where that itself computes."""

    @property
    def train(self) -> Examples:
        """The examples of the first pool, on which a client trains where the method makes no plan of its own."""
        return next(iter(self.pools.values()))
