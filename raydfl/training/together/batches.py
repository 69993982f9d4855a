"""Stacked batches of several clients, cut on the device from the full feature store or, if it is too large, from their examples.

Cutting a batch never synchronises the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from raydfl.core.types import Batch
from raydfl.data import Drawn, Examples, Frames
from raydfl.data.features import FeatureStore

_SHARE = 1 / 3
"""Largest fraction of a device's free memory for a feature store. The rest is for models and activations."""


def move_frames(store: FeatureStore, device: torch.device) -> Tensor | None:
    """Copy all frames of a store to a device, once.

    Returns:
        [frames, bands] in the store's type, or ``None`` if they need too much of the device's free memory.
    """
    if device not in store.device_copies:
        fits = store.frames.nbytes <= _get_free_memory(device) * _SHARE
        store.device_copies[device] = torch.from_numpy(np.array(store.frames)).to(device) if fits else None
    frames: Tensor | None = store.device_copies[device]
    return frames


def _get_free_memory(device: torch.device) -> float:
    """Return the remaining memory of a device for this process, in bytes. The CPU has no limit."""
    if device.type != "cuda":
        return float("inf")
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_reserved(device)
    return min(float(free), allowed)


class ResidentFrames:
    """Frames of several clients on a device, and the windows of every batch.

    Args:
        views: frames of each client.
        plans: positions in each batch of each client, longest plan first.
        windows: first rows in the store and frame counts of the examples in each batch of each client.
        widest: largest number of examples of a client in a batch.
        device: target device.
    """

    def __init__(
        self,
        views: Sequence[Frames],
        plans: Sequence[Sequence[np.ndarray]],
        windows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
        widest: int,
        device: torch.device,
    ) -> None:
        store = views[0].store
        is_common = len(store.frames) > 0 and all(view.store is store for view in views)
        all_frames = move_frames(store, device) if is_common else None
        starts = np.zeros((len(plans[0]), len(plans), widest), np.int64)
        counts = np.zeros_like(starts)
        position = 0
        for client, (view, plan) in enumerate(zip(views, plans, strict=True)):
            offsets = np.zeros_like(view.starts)
            if all_frames is None:  # rows in the result of _gather_frames
                offsets = position + np.cumsum(view.counts) - view.counts - view.starts
                position += int(view.counts.sum())
            for step, (index, (first, length)) in enumerate(zip(plan, windows[client], strict=True)):
                starts[step, client, : len(index)] = first + offsets[index]
                counts[step, client, : len(index)] = length
        self._frames = _gather_frames(views, device) if all_frames is None else all_frames
        self._starts = torch.from_numpy(starts).to(device)
        self._counts = torch.from_numpy(counts).to(device)
        self._longest = int(counts.max(initial=0))
        self._time = torch.arange(self._longest, device=device)

    def cut(self, step: int, clients: int, width: int, frames: int) -> Tensor:
        """Cut the features of a step for the first clients: float32 [clients, width, frames, bands], 0 in padding."""
        starts, counts = (table[step, :clients, :width, None] for table in (self._starts, self._counts))
        inside = self._time[:frames] < counts
        rows = torch.where(inside, starts + self._time[:frames], 0)
        x = self._frames.index_select(0, rows.view(-1)).float().view(*rows.shape, self._frames.shape[1])
        return x.masked_fill_(~inside.unsqueeze(-1), 0.0)


def _gather_frames(views: Sequence[Frames], device: torch.device) -> Tensor:
    """Concatenate the clients' frames on a device."""
    count = sum(int(view.counts.sum()) for view in views)
    frames = np.empty((max(count, 1), views[0].store.bands), views[0].store.frames.dtype)
    position = 0
    for view in views:
        for start, length in zip(view.starts.tolist(), view.counts.tolist(), strict=True):
            frames[position : position + length] = view.store.frames[start : start + length]
            position += length
    return torch.from_numpy(frames).to(device)


class StackedBatches:
    """Batches of several clients, step by step.

    Clients are sorted by decreasing number of steps, so that the active clients of a step are a prefix. In each step, smaller
    batches are padded to the largest with examples of weight 0 (features 0, label 0, one frame). The CPU assembles a batch on
    request. A GPU gets all data at the start.

    Args:
        examples: examples of each client, all of the same form.
        plans: positions in each batch of each client, longest plan first.
        device: device of the batches.
        seeds: seed of each client's fit, for the transforms. ``None``: no random transforms.
        first: number of the first batch in the fit.
        weights: weight of each client's examples, float32 [examples]. ``None``: 1.
    """

    def __init__(
        self,
        examples: Sequence[Examples],
        plans: Sequence[Sequence[np.ndarray]],
        device: torch.device,
        seeds: Sequence[int] | None = None,
        first: int = 0,
        weights: Sequence[np.ndarray] | None = None,
    ) -> None:
        steps, clients = len(plans[0]), len(plans)
        self.sizes = np.zeros((steps, clients), np.int64)
        """Numbers of examples without padding, int64 [steps, clients]."""
        for client, plan in enumerate(plans):
            self.sizes[: len(plan), client] = [len(index) for index in plan]
        widest = int(self.sizes.max(initial=0))
        labels = np.zeros((steps, clients, widest), np.int64)
        columns = {name: np.zeros_like(labels) for name in examples[0].columns}
        for client, (source, plan) in enumerate(zip(examples, plans, strict=True)):
            for step, index in enumerate(plan):
                labels[step, client, : len(index)] = source.labels[index]
                for name, column in columns.items():
                    column[step, client, : len(index)] = source.columns[name][index]
        self._columns = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        real = np.arange(widest) < self.sizes[:, :, None]
        filled = real.astype(np.float32)
        for client, own in enumerate(weights or ()):
            for step, index in enumerate(plans[client]):
                filled[step, client, : len(index)] = own[index]
        self._weights, self._weighted = torch.from_numpy(filled).to(device), weights is not None
        self._views = {
            name: _StackedView([source.views[name] for source in examples], plans, real.shape, device, seeds, first)
            for name in examples[0].views
        }
        starts = None if examples[0].events is None else next(iter(self._views.values())).find_starts(real.shape)
        self._labels = torch.from_numpy(examples[0].targets(labels, starts)).to(device)

    def __len__(self) -> int:
        return len(self.sizes)

    def clients(self, step: int) -> int:
        """Return the number of clients with a batch in this step."""
        return int(np.count_nonzero(self.sizes[step]))

    def batch(self, step: int) -> Batch:
        """Assemble the batch of a step: views [clients, batch, frames, bands], everything else [clients, batch, ...].

        ``weight`` is ``None`` without padding and class weights.
        """
        clients = self.clients(step)
        sizes = self.sizes[step, :clients]
        width = int(sizes.max())

        def cut(tables: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
            return {name: table[step, :clients, :width] for name, table in tables.items() if table is not None}

        return Batch(
            {name: view.features(step, clients, width) for name, view in self._views.items()},
            self._labels[step, :clients, :width],
            cut({name: view.lengths for name, view in self._views.items()}),
            cut({name: view.present for name, view in self._views.items()}),
            None if (sizes == width).all() and not self._weighted else self._weights[step, :clients, :width],
            cut(self._columns),
        )


class _StackedView:
    """A single view in the batches of several clients. Takes the arguments of :class:`StackedBatches`.

    Args:
        shape: steps, clients and the largest number of examples of a client in a batch.
    """

    def __init__(
        self,
        views: Sequence[Frames],
        plans: Sequence[Sequence[np.ndarray]],
        shape: tuple[int, ...],
        device: torch.device,
        seeds: Sequence[int] | None,
        first: int,
    ) -> None:
        self._views, fixed, plain = views, views[0].length, views[0].pipeline.plain
        drawn: list[list[Drawn | None]] = [[None] * len(plan) for plan in plans]
        if not plain and seeds is not None:
            drawn = [
                [view.draw(index, seed, first + step) for step, index in enumerate(plan)]
                for view, plan, seed in zip(views, plans, seeds, strict=True)
            ]
        self._windows = [
            [view.window(index, values) for index, values in zip(plan, batches, strict=True)]
            for view, plan, batches in zip(views, plans, drawn, strict=True)
        ]
        frames, present = np.ones(shape, np.int64), np.zeros(shape, bool)
        for client, (view, plan) in enumerate(zip(views, plans, strict=True)):
            for step, index in enumerate(plan):
                frames[step, client, : len(index)] = self._windows[client][step][1]
                present[step, client, : len(index)] = view.counts[index] > 0
        self._longest = frames.max(axis=(1, 2), initial=1) if fixed is None else np.full(shape[0], fixed)
        self.lengths = torch.from_numpy(frames).to(device) if fixed is None else None
        """Frame counts, int64 [steps, clients, batch]. ``None``: all examples have the same length."""
        self.present = torch.from_numpy(present).to(device) if views[0].optional else None
        """Mask of the examples with this view, bool [steps, clients, batch]. ``None``: every example has it."""
        self._transforms = None if plain else _Transforms(views, self._windows, drawn, shape, device)
        self._resident = ResidentFrames(views, plans, self._windows, shape[2], device) if device.type != "cpu" else None

    def find_starts(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the first frame of each example in its clip, int64 [steps, clients, batch]."""
        starts = np.zeros(shape, np.int64)
        for client, (view, windows) in enumerate(zip(self._views, self._windows, strict=True)):
            for step, (rows, _) in enumerate(windows):
                starts[step, client, : len(rows)] = view.find_starts(rows)
        return starts

    def features(self, step: int, clients: int, width: int) -> Tensor:
        """Assemble the features of a step for the first clients: float32 [clients, width, frames, bands]."""
        frames = int(self._longest[step])
        if self._resident is not None:
            x = self._resident.cut(step, clients, width, frames)
        else:
            x = self._copy(step, clients, width, frames)
        return x if self._transforms is None else self._transforms.apply(x, step, clients, width)

    def _copy(self, step: int, clients: int, width: int, frames: int) -> Tensor:
        x = np.empty((clients, width, frames, self._views[0].store.bands), np.float32)
        for row, view, windows in zip(x, self._views, self._windows, strict=False):
            starts, counts = windows[step]
            view.copy(starts, counts, row[: len(starts)])
            row[len(starts) :] = 0.0
        return torch.from_numpy(x)


def select_first(batch: Batch) -> Batch:
    """Select the first client's batch from a stacked batch without padding."""
    return Batch.from_tensors({name: tensor[0] for name, tensor in batch.tensors().items()})


def trim_padding(batch: Batch) -> Batch:
    """Remove frames beyond the longest example of the batch."""
    views = dict(batch.views)
    for name, lengths in batch.view_lengths.items():
        views[name] = views[name][:, : max(1, int(lengths.max()))].contiguous()
    return dataclasses.replace(batch, views=views)


class _Transforms:
    """Transforms of the batches of each step, with their random values on the device.

    Args:
        views: frames of each client.
        windows: first rows in the store and frame counts of the examples in each batch of each client.
        drawn: random values for each batch of each client.
        shape: steps, clients and the largest number of examples of a client in a batch.
        device: device of the batches.
    """

    def __init__(
        self,
        views: Sequence[Frames],
        windows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
        drawn: Sequence[Sequence[Drawn | None]],
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._pipeline = views[0].pipeline
        tables: dict[str, np.ndarray] = {"": np.zeros(shape, np.int64)}
        self._random = drawn[0][0] is not None if drawn[0] else False
        for client, (view, client_windows, batches) in enumerate(zip(views, windows, drawn, strict=True)):
            for step, (starts, counts) in enumerate(client_windows):
                tables[""][step, client, : len(starts)] = view.count_valid_frames(starts, counts)
                for name, values in (batches[step] or {}).items():
                    if name not in tables:
                        tables[name] = np.zeros((*shape, *values.shape[1:]), values.dtype)
                    tables[name][step, client, : len(starts)] = values
        self._tables = {name: torch.from_numpy(table).to(device) for name, table in tables.items()}

    def apply(self, x: Tensor, step: int, clients: int, width: int) -> Tensor:
        """Transform the features [clients, width, ...] of a step."""
        values = {name: table[step, :clients, :width] for name, table in self._tables.items()}
        frames = values.pop("")
        return self._pipeline.apply(x, frames, values if self._random else None)
