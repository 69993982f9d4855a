"""Batches of several clients at once: every tensor has a leading dimension of clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raydfl.data.examples import Examples
from raydfl.data.resident import Resident
from raydfl.types import Batch


class StackedBatches:
    """The batches of several clients, step by step.

    Clients come with the most steps first, so that those who have a batch in a step are always a prefix. In a step all have as
    many examples as the one that has the most: the others' missing examples are padding of weight 0 (features 0, label 0, one
    frame). On the CPU a batch is copied together when it is asked for; on another device everything lies there from the start.

    Args:
        examples: of each client, all with the same ``length``.
        plans: of each client the positions of each batch, longest list first.
        device: where the batches are wanted.
    """

    def __init__(
        self, examples: Sequence[Examples], plans: Sequence[Sequence[np.ndarray]], device: torch.device
    ) -> None:
        self.examples = examples
        self.plans = plans
        self.device = device
        self.fixed_length = examples[0].length
        steps, clients = len(plans[0]), len(plans)
        self.sizes = np.zeros((steps, clients), np.int64)
        """int64 [steps, clients]: real examples."""
        for client, plan in enumerate(plans):
            self.sizes[: len(plan), client] = [len(index) for index in plan]
        widest = int(self.sizes.max(initial=0))
        labels = np.zeros((steps, clients, widest), np.int64)
        frames = np.ones((steps, clients, widest), np.int64)
        for client, (own, plan) in enumerate(zip(examples, plans, strict=True)):
            for step, index in enumerate(plan):
                labels[step, client, : len(index)] = own.labels[index]
                frames[step, client, : len(index)] = own.counts[index]
        fixed = self.fixed_length
        self.longest = frames.max(axis=(1, 2), initial=1) if fixed is None else np.full(steps, fixed)
        """int64 [steps]: frames of a batch."""
        self._labels = torch.from_numpy(labels).to(device)
        self._frames = torch.from_numpy(frames).to(device) if self.fixed_length is None else None
        real = np.arange(widest) < self.sizes[:, :, None]
        self._weights = torch.from_numpy(real.astype(np.float32)).to(device)
        self._resident = Resident(examples, plans, widest, device) if device.type != "cpu" else None

    def __len__(self) -> int:
        return len(self.sizes)

    def clients(self, step: int) -> int:
        """How many clients, from the first on, have a batch in this step."""
        return int(np.count_nonzero(self.sizes[step]))

    def batch(self, step: int) -> Batch:
        """The clients' batches of one step: x [clients, batch, frames, bands], everything else [clients, batch].

        ``lengths`` is ``None`` where all examples of the population have one length, ``weight`` where there is no padding.
        """
        clients = self.clients(step)
        sizes = self.sizes[step, :clients]
        width = int(sizes.max())
        frames = int(self.longest[step])
        if self._resident is not None:
            x = self._resident.cut(step, clients, width, frames)
        else:
            x = self._copy(step, clients, width, frames)
        return Batch(
            x=x,
            y=self._labels[step, :clients, :width],
            lengths=None if self._frames is None else self._frames[step, :clients, :width],
            weight=None if (sizes == width).all() else self._weights[step, :clients, :width],
        )

    def _copy(self, step: int, clients: int, width: int, frames: int) -> Tensor:
        x = np.empty((clients, width, frames, self.examples[0].store.bands), np.float32)
        for row, own, plan in zip(x, self.examples, self.plans, strict=False):
            index = plan[step]
            own.copy(index, row[: len(index)])
            row[len(index) :] = 0.0
        return torch.from_numpy(x)
