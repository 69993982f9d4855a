"""Examples of clients and server, and batches of them from memory-mapped features."""

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
    """A view of examples: for each example, a range of rows of a feature store."""

    store: FeatureStore
    starts: np.ndarray
    """int64 [examples]: first row of each example in the store."""
    counts: np.ndarray
    """int [examples]: frames of each example; 0 if it lacks the view."""
    length: int | None
    """Common number of frames of all examples of the population; ``None`` if they differ."""
    pipeline: Pipeline = PLAIN
    """The transforms from stored frames to a batch."""
    stream: int = 0
    """Index of the view. It selects a separate stream of random numbers."""
    optional: bool = False
    """Whether examples may lack the view."""

    def take(self, indices: np.ndarray) -> Frames:
        """Select examples by position (int64 [n])."""
        return replace(self, starts=self.starts[indices], counts=self.counts[indices])

    @classmethod
    def concatenate(cls, parts: Sequence[Frames]) -> Frames:
        """Concatenate the frames of several parts with a common feature store."""
        if any(part.store is not parts[0].store for part in parts):
            raise ValueError("a batch cannot mix examples of several feature stores")
        starts, counts = (np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "counts"))
        return replace(parts[0], starts=starts, counts=counts)

    def batch(
        self, index: np.ndarray, device: torch.device | str = "cpu", drawn: Drawn | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a batch of the view, padded with zeros to its longest example.

        Args:
            index: int [n], positions of the examples.
            device: device of the tensors.
            drawn: random numbers from :meth:`draw`; ``None``: no augmentation.

        Returns:
            float32 [n, frames, bands], and the examples' lengths in frames, int64 [n]; ``None`` if all examples of the
            population have the same length.
        """
        starts, counts = self.window(index, drawn)
        longest = self.length if self.length is not None else int(counts.max(initial=1))
        if self.pipeline.plain:
            x = torch.from_numpy(self._read(starts, counts, longest)).to(device)
        else:
            x = self._transform(starts, counts, longest, device, drawn)
        if self.length is not None:
            return x, None
        return x, torch.from_numpy(counts.astype(np.int64, copy=False)).to(device)

    def _read(self, starts: np.ndarray, counts: np.ndarray, longest: int) -> np.ndarray:
        """Return stored frames, float32 [n, longest, bands]."""
        shape = len(counts), longest, self.store.bands
        # Without padding, NumPy copies all frames in a single call.
        if len(counts) and self.store.frames.dtype == np.float32 and (counts == longest).all():
            frames: np.ndarray = self.store.windows(longest)[starts].reshape(shape)
            return frames
        stored = np.empty(shape, np.float32)
        self.copy(starts, counts, stored)
        return stored

    def _transform(
        self, starts: np.ndarray, counts: np.ndarray, longest: int, device: torch.device | str, drawn: Drawn | None
    ) -> Tensor:
        """Apply the pipeline to frames. It skips frames that are padding in all examples."""
        valid = self.count_valid_frames(starts, counts)
        frames = longest if self.pipeline.pixels is not None else int(valid.max(initial=1))
        stored = self._read(starts, np.minimum(counts, frames), frames)
        random = None if drawn is None else {name: torch.from_numpy(a).to(device) for name, a in drawn.items()}
        x = self.pipeline.apply(torch.from_numpy(stored).to(device), torch.from_numpy(valid).to(device), random)
        return torch.nn.functional.pad(x, (0, 0, 0, longest - frames)) if frames < longest else x

    def draw(self, index: np.ndarray, seed: int, number: int) -> Drawn:
        """Draw the random numbers of the transforms for a training batch.

        Args:
            index: int [n], positions of the examples.
            seed: seed of the fit.
            number: index of the batch in the fit.
        """

        def count_valid(drawn: Drawn) -> np.ndarray:
            return self.count_valid_frames(*self.window(index, drawn))

        return self.pipeline.draw((seed, number, self.stream), self.counts[index], self.store.bands, count_valid)

    def window(self, index: np.ndarray, drawn: Drawn | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the first rows in the store and the numbers of frames (int [n] each) of examples after random crops."""
        return self.pipeline.window(self.starts[index], self.counts[index], drawn)

    def find_starts(self, rows: np.ndarray) -> np.ndarray:
        """Convert rows of the store to frames from the start of their clip, int64 in the shape of ``rows``."""
        offsets = self.store.offsets
        found: np.ndarray = rows - offsets[np.searchsorted(offsets, rows, side="right") - 1]
        return found

    def count_valid_frames(self, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Count the frames of each window that are not padding in the store, int64 in the shape of ``starts``."""
        offsets = self.store.offsets
        if not len(self.store):  # no clip here has the view
            return np.zeros(starts.shape, np.int64)
        clip = np.searchsorted(offsets, starts, side="right") - 1
        remaining = offsets[clip] + self.store.lengths[clip] - starts
        valid: np.ndarray = np.clip(remaining, 0, counts).astype(np.int64)
        return valid

    def copy(self, starts: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
        """Copy stored frames into a batch.

        Args:
            starts: int [n], first rows in the store.
            counts: int [n], numbers of rows.
            out: float32 [n, frames, bands] with ``frames`` at least ``counts.max()``. The remaining frames become 0.
        """
        frames = self.store.frames.view(np.ndarray)  # slices of the memory map itself take twice as long
        for row, start, count in zip(out, starts.tolist(), counts.tolist(), strict=True):
            row[:count] = frames[start : start + count]
            if count < len(row):
                row[count:] = 0.0


@dataclass(frozen=True, slots=True)
class Examples:
    """A sequence of examples. An example is a clip, or a segment of a clip."""

    views: Mapping[str, Frames]
    """The views of the examples by name, at least the first."""
    labels: np.ndarray
    """int64 [examples]: class indices, or row indices of :attr:`sets`, :attr:`sequences` or :attr:`events`."""
    clips: np.ndarray
    """int64 [examples]: index of the clip in the manifest. Segments of a clip share it."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """int64 [examples] by name: the values of :attr:`Batch.columns`."""
    classes: tuple[str, ...] = ()
    """Names of the classes."""
    sets: np.ndarray | None = None
    """bool [labels, classes]: the classes of each label; ``None``: each label is a single class."""
    sequences: np.ndarray | None = None
    """int32 [labels, longest]: the classes of each label in order, -1 after the end; ``None``: labels are not transcripts."""
    joint: str = ""
    """Text between two classes of a transcript."""
    events: np.ndarray | None = None
    """float64 [labels, most events, 3]: onset and offset in seconds from the start of the clip, and class, -1 after the last event.
    Events without times last from -inf to inf. ``None``: labels are not events."""
    frame_seconds: float = 0.0
    """Time between two frames of the first view, if labels are events."""
    trials: np.ndarray | None = None
    """int32 [trials, 3]: two clips, and 1 for equal or 0 for different speakers (``data.trials``); ``None``: no file."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def first_view(self) -> Frames:
        """Frames of the first view."""
        return next(iter(self.views.values()))

    @property
    def form(self) -> Hashable:
        """A key of the batch layout. Clients train batched only if their examples have equal keys."""
        views = ((name, v.length, v.store.bands, id(v.pipeline)) for name, v in self.views.items())
        return tuple(self.columns), tuple(views)

    @property
    def changed(self) -> bool:
        """True if a transform changes the stored frames of any view."""
        return not all(view.pipeline.plain for view in self.views.values())

    def take(self, indices: np.ndarray) -> Examples:
        """Select examples by position (int [n])."""
        indices = np.asarray(indices, np.int64)
        return replace(
            self,
            views={name: view.take(indices) for name, view in self.views.items()},
            labels=self.labels[indices],
            clips=self.clips[indices],
            columns={name: column[indices] for name, column in self.columns.items()},
        )

    def cut_for_test(self) -> Examples:
        """Cut training examples into test segments, if a random crop has ``test: segments``."""
        view, crop = self.first_view, self.first_view.pipeline.crop
        if crop is None or crop.test != "segments":
            return self
        settings = SegmentSettings(frames=crop.size, stride=crop.stride or crop.size)
        clip, first, frames = segments(view.counts, settings, None)
        examples = self.take(clip)
        cut = replace(examples.first_view, starts=examples.first_view.starts + first, counts=frames)
        return replace(examples, views={**examples.views, next(iter(examples.views)): cut})

    def select_view(self, view: str) -> Examples:
        """Return the examples with a single view."""
        return self if [*self.views] == [view] else replace(self, views={view: self.views[view]})

    def targets(self, labels: np.ndarray, starts: np.ndarray | None = None) -> np.ndarray:
        """Convert label indices to targets.

        Args:
            labels: int [n].
            starts: int [n], first frame of each example in its clip, for :attr:`events`. ``None``: 0.

        Returns:
            int64 [n]; multi-hot float32 [n, classes] with :attr:`sets`; int64 [n, longest] with :attr:`sequences`; float32 [n, most
            events, 3] with :attr:`events`, with times in frames from the start of the example.
        """
        if self.events is not None:
            events: np.ndarray = self.events[labels]
            events[..., :2] /= self.frame_seconds
            if starts is not None:
                events[..., :2] -= starts[..., None, None]
            return events.astype(np.float32)
        if self.sequences is not None:
            found: np.ndarray = self.sequences[labels].astype(np.int64)
            return found
        return labels.astype(np.int64, copy=False) if self.sets is None else self.sets[labels].astype(np.float32)

    @classmethod
    def concatenate(cls, parts: Sequence[Examples], column: str) -> Examples:
        """Concatenate examples with common feature stores.

        Args:
            parts: the examples.
            column: name of a new column with the index of each example's part.
        """
        first = parts[0]
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
        columns[column] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return replace(
            first,
            views={name: Frames.concatenate([part.views[name] for part in parts]) for name in first.views},
            labels=np.concatenate([part.labels for part in parts]),
            clips=np.concatenate([part.clips for part in parts]),
            columns=columns,
        )

    def batch(
        self, index: np.ndarray, device: torch.device | str = "cpu", drawn: Mapping[str, Drawn] | None = None
    ) -> Batch:
        """Return a batch of examples.

        Args:
            index: int [n], positions of the examples.
            device: device of the batch.
            drawn: random numbers from :meth:`draw`; ``None``: no augmentation.
        """
        views, lengths = {}, {}
        for name, view in self.views.items():
            views[name], view_lengths = view.batch(index, device, None if drawn is None else drawn[name])
            if view_lengths is not None:
                lengths[name] = view_lengths
        starts = None
        if self.events is not None:
            first = self.first_view
            rows, _ = first.window(index, None if drawn is None else drawn[next(iter(self.views))])
            starts = first.find_starts(rows)
        return Batch(
            views,
            torch.from_numpy(self.targets(self.labels[index], starts)).to(device),
            lengths,
            {n: torch.from_numpy(v.counts[index] > 0).to(device) for n, v in self.views.items() if v.optional},
            columns={name: torch.from_numpy(column[index]).to(device) for name, column in self.columns.items()},
        )

    def draw(self, index: np.ndarray, seed: int, number: int) -> dict[str, Drawn]:
        """Draw the random numbers of all views' transforms for a training batch (:meth:`Frames.draw`)."""
        return {name: view.draw(index, seed, number) for name, view in self.views.items()}

    def read_ahead(self) -> None:
        """Ask the kernel to read these examples from disk, unless the feature store fits in memory."""
        for view in self.views.values():
            if not view.store.fits_in_memory:
                view.store.read_ahead(view.starts, view.counts)

    def order(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """Return the example positions of each batch of an epoch, int64 [at most batch_size].

        Args:
            batch_size: examples in a batch. The last batch may be smaller.
            rng: generator that shuffles the examples; ``None``: keep their order.
        """
        order = np.arange(len(self)) if rng is None else rng.permutation(len(self))
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def batches(
        self, batch_size: int, rng: np.random.Generator | None, device: torch.device | str = "cpu"
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch (:meth:`order`)."""
        for index in self.order(batch_size, rng):
            yield self.batch(index, device)


@dataclass(frozen=True, slots=True)
class ClientData:
    """The examples of a client."""

    pools: Mapping[str, Examples]
    """Training examples by pool, at least one pool."""
    validation: Examples
    """The client's validation set, without corruption. May be empty."""
    test: Examples
    """The client's test set, without corruption. Empty without ``data.split.client_test``. At the server: its test set."""

    @property
    def train(self) -> Examples:
        """The examples of the first pool, the default training set."""
        return next(iter(self.pools.values()))
