"""Features on a device: the whole store where it fits, else the examples at hand. Batches are cut there; nothing is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from raydfl.core.types import Batch
from raydfl.data import Drawn, Examples, Frames
from raydfl.data.features import FeatureStore

_SHARE = 1 / 3
"""The share of a device's free memory that a store may take: the rest is for models and what is computed."""


def frames_on(store: FeatureStore, device: torch.device) -> Tensor | None:
    """Return all frames of a store on a device, [frames, bands] of the store's own type; ``None`` when they would take too much."""
    if device not in store.moved:
        fits = store.frames.nbytes <= _free(device) * _SHARE
        store.moved[device] = torch.from_numpy(np.array(store.frames)).to(device) if fits else None
    frames: Tensor | None = store.moved[device]
    return frames


def _free(device: torch.device) -> float:
    """Return how many bytes this process may still take of a device."""
    if device.type != "cuda":
        return float("inf")
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_reserved(device)
    return min(float(free), allowed)


class Resident:
    """The examples of some clients on a device, with the positions of every batch.

    Args:
        views: of each client.
        plans: of each client the positions of each batch, longest list first.
        windows: of each client first rows in the store and numbers of frames of the examples of each batch.
        widest: the most examples of a client in a batch.
        device: where they are wanted.
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
        one = len(store.frames) > 0 and all(own.store is store for own in views)
        whole = frames_on(store, device) if one else None
        starts = np.zeros((len(plans[0]), len(plans), widest), np.int64)
        counts = np.zeros_like(starts)
        place = 0
        for client, (own, plan) in enumerate(zip(views, plans, strict=True)):
            moved = np.zeros_like(own.starts)
            if whole is None:  # where _gathered puts them
                moved = place + np.cumsum(own.counts) - own.counts - own.starts
                place += int(own.counts.sum())
            for step, (index, (first, length)) in enumerate(zip(plan, windows[client], strict=True)):
                starts[step, client, : len(index)] = first + moved[index]
                counts[step, client, : len(index)] = length
        self._frames = _gathered(views, device) if whole is None else whole
        self._starts = torch.from_numpy(starts).to(device)
        self._counts = torch.from_numpy(counts).to(device)
        self._longest = int(counts.max(initial=0))
        self._time = torch.arange(self._longest, device=device)

    def cut(self, step: int, clients: int, width: int, frames: int) -> Tensor:
        """Return one step's features of the first clients, float32 [clients, width, frames, bands], 0 where there is no frame."""
        starts, counts = (table[step, :clients, :width, None] for table in (self._starts, self._counts))
        inside = self._time[:frames] < counts
        rows = torch.where(inside, starts + self._time[:frames], 0)
        x = self._frames.index_select(0, rows.view(-1)).float().view(*rows.shape, self._frames.shape[1])
        return x.masked_fill_(~inside.unsqueeze(-1), 0.0)


def _gathered(views: Sequence[Frames], device: torch.device) -> Tensor:
    """Return the clients' own frames one after another on the device."""
    count = sum(int(own.counts.sum()) for own in views)
    frames = np.empty((max(count, 1), views[0].store.bands), views[0].store.frames.dtype)
    place = 0
    for own in views:
        for start, length in zip(own.starts.tolist(), own.counts.tolist(), strict=True):
            frames[place : place + length] = own.store.frames[start : start + length]
            place += length
    return torch.from_numpy(frames).to(device)


class StackedBatches:
    """The batches of several clients, step by step.

    Clients come with the most steps first, so that those who have a batch in a step are always a prefix. In a step all have as
    many examples as the one that has the most: the others' missing examples are padding of weight 0 (features 0, label 0, one
    frame). On the CPU a batch is copied together when it is asked for; on another device everything lies there from the start.

    Args:
        examples: of each client, all of the same form.
        plans: of each client the positions of each batch, longest list first.
        device: where the batches are wanted.
        seeds: of each client's fit, for the transforms; ``None``: nothing random is done to examples.
        first: number of the first batch in the fit.
    """

    def __init__(
        self,
        examples: Sequence[Examples],
        plans: Sequence[Sequence[np.ndarray]],
        device: torch.device,
        seeds: Sequence[int] | None = None,
        first: int = 0,
    ) -> None:
        steps, clients = len(plans[0]), len(plans)
        self.sizes = np.zeros((steps, clients), np.int64)
        """int64 [steps, clients]: real examples."""
        for client, plan in enumerate(plans):
            self.sizes[: len(plan), client] = [len(index) for index in plan]
        widest = int(self.sizes.max(initial=0))
        labels = np.zeros((steps, clients, widest), np.int64)
        columns = {name: np.zeros_like(labels) for name in examples[0].columns}
        for client, (own, plan) in enumerate(zip(examples, plans, strict=True)):
            for step, index in enumerate(plan):
                labels[step, client, : len(index)] = own.labels[index]
                for name, column in columns.items():
                    column[step, client, : len(index)] = own.columns[name][index]
        self._labels = torch.from_numpy(examples[0].targets(labels)).to(device)
        self._columns = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        real = np.arange(widest) < self.sizes[:, :, None]
        self._weights = torch.from_numpy(real.astype(np.float32)).to(device)
        self._views = {
            name: _StackedView([own.views[name] for own in examples], plans, real.shape, device, seeds, first)
            for name in examples[0].views
        }

    def __len__(self) -> int:
        return len(self.sizes)

    def clients(self, step: int) -> int:
        """Return how many clients, from the first on, have a batch in this step."""
        return int(np.count_nonzero(self.sizes[step]))

    def batch(self, step: int) -> Batch:
        """Return the clients' batches of one step: views [clients, batch, frames, bands], everything else [clients, batch, ...].

        ``weight`` is ``None`` where there is no padding.
        """
        clients = self.clients(step)
        sizes = self.sizes[step, :clients]
        width = int(sizes.max())

        def cut(tables: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
            return {name: own[step, :clients, :width] for name, own in tables.items() if own is not None}

        return Batch(
            {name: view.features(step, clients, width) for name, view in self._views.items()},
            self._labels[step, :clients, :width],
            cut({name: view.lengths for name, view in self._views.items()}),
            cut({name: view.present for name, view in self._views.items()}),
            None if (sizes == width).all() else self._weights[step, :clients, :width],
            cut(self._columns),
        )


class _StackedView:
    """One view of the batches of several clients. Arguments as those of :class:`StackedBatches`.

    Args:
        shape: steps, clients and the most examples of a client in a batch.
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
                [own.draw(index, seed, first + step) for step, index in enumerate(plan)]
                for own, plan, seed in zip(views, plans, seeds, strict=True)
            ]
        self._windows = [
            [own.window(index, random) for index, random in zip(plan, each, strict=True)]
            for own, plan, each in zip(views, plans, drawn, strict=True)
        ]
        frames, present = np.ones(shape, np.int64), np.zeros(shape, bool)
        for client, (own, plan) in enumerate(zip(views, plans, strict=True)):
            for step, index in enumerate(plan):
                frames[step, client, : len(index)] = self._windows[client][step][1]
                present[step, client, : len(index)] = own.counts[index] > 0
        self._longest = frames.max(axis=(1, 2), initial=1) if fixed is None else np.full(shape[0], fixed)
        self.lengths = torch.from_numpy(frames).to(device) if fixed is None else None
        """int64 [steps, clients, batch]: frames of each example; ``None``: all have the same number."""
        self.present = torch.from_numpy(present).to(device) if views[0].optional else None
        """bool [steps, clients, batch]: whether each example has the view; ``None``: all have."""
        self._transforms = None if plain else _Transforms(views, self._windows, drawn, shape, device)
        self._resident = Resident(views, plans, self._windows, shape[2], device) if device.type != "cpu" else None

    def features(self, step: int, clients: int, width: int) -> Tensor:
        """Return one step's features of the first clients: float32 [clients, width, frames, bands]."""
        frames = int(self._longest[step])
        if self._resident is not None:
            x = self._resident.cut(step, clients, width, frames)
        else:
            x = self._copy(step, clients, width, frames)
        return x if self._transforms is None else self._transforms.apply(x, step, clients, width)

    def _copy(self, step: int, clients: int, width: int, frames: int) -> Tensor:
        x = np.empty((clients, width, frames, self._views[0].store.bands), np.float32)
        for row, own, windows in zip(x, self._views, self._windows, strict=False):
            starts, counts = windows[step]
            own.copy(starts, counts, row[: len(starts)])
            row[len(starts) :] = 0.0
        return torch.from_numpy(x)


def batch_of_first(batch: Batch) -> Batch:
    """Return the first client's batch, which has no padding."""
    return Batch.from_tensors({name: tensor[0] for name, tensor in batch.tensors().items()})


class _Transforms:
    """The pipeline of the examples for each step's batches, with all that was drawn for it on the device.

    Args:
        views: of each client.
        windows: of each client first rows in the store and numbers of frames of the examples of each batch.
        drawn: of each client what was drawn for each batch.
        shape: steps, clients and the most examples of a client in a batch.
        device: where the batches are.
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
        for client, (own, each, random) in enumerate(zip(views, windows, drawn, strict=True)):
            for step, (starts, counts) in enumerate(each):
                tables[""][step, client, : len(starts)] = own.count_valid_frames(starts, counts)
                for name, values in (random[step] or {}).items():
                    if name not in tables:
                        tables[name] = np.zeros((*shape, *values.shape[1:]), values.dtype)
                    tables[name][step, client, : len(starts)] = values
        self._tables = {name: torch.from_numpy(table).to(device) for name, table in tables.items()}

    def apply(self, x: Tensor, step: int, clients: int, width: int) -> Tensor:
        """Return one step's x [clients, width, ...] as the batch has it."""
        own = {name: table[step, :clients, :width] for name, table in self._tables.items()}
        frames = own.pop("")
        return self._pipeline.apply(x, frames, own if self._random else None)
