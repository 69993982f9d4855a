"""The work of all contestants: data, initial weights, the cohort of each round, and the orders of examples.

It is made once, and passed as a file, so that contestants in different environments need nothing of raydfl and all must
reach the same model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from peers.model import ARCHITECTURES, PlainCNN, PlainCRNN


@dataclass
class Work:
    """Rounds of local training with SGD, one epoch each."""

    x: Tensor
    """float32 [examples, frames, bands] or, for images, [examples, channels, rows, columns], client by client."""
    y: Tensor
    """int64 [examples]."""
    offsets: list[int]
    """[clients + 1]: bounds of each client's examples."""
    cohorts: list[list[int]]
    """Clients of each round, ascending."""
    orders: Tensor
    """int64 [rounds, cohort, most examples of a client]: the order of a client's examples, padded at the end."""
    architectures: dict[str, str]
    """By model name: ``{"model": "crnn_lite"}``, or ``plugin`` and ``local`` for FedMLAC."""
    weights: dict[str, dict[str, Tensor]]
    """First state dict by model name."""
    classes: int
    kernel: int
    batch_size: int
    lr: float
    images: Tensor | None = None
    """Of a work with two views: float32 [examples, channels, rows, columns]."""
    seeing: list[bool] | None = None
    """[clients]: whether the client has the images."""
    first_rounds: int = 0
    """Of the first phase, where there are two."""

    def save(self, path: Path) -> None:
        """Write the work to a file."""
        torch.save(asdict(self), path)

    @classmethod
    def load(cls, path: Path | str) -> Work:
        """Open a file; its tensors are memory-mapped."""
        return cls(**torch.load(path, mmap=True, weights_only=True))

    def build(self, name: str = "model") -> nn.Module:
        """Return the named model with its initial weights."""
        options, shape = ARCHITECTURES[self.architectures[name]], tuple(self.x.shape[1:])
        if len(shape) == 3:
            model: nn.Module = PlainCNN(shape, self.classes, **options)
        else:
            model = PlainCRNN(shape[1], self.classes, kernel=self.kernel, **options)
        model.load_state_dict(self.weights[name])
        return model

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's x and y."""
        where = slice(self.offsets[client], self.offsets[client + 1])
        return self.x[where], self.y[where]

    def sees(self, client: int) -> Tensor | None:
        """Return a client's images, if it has them."""
        where = slice(self.offsets[client], self.offsets[client + 1])
        return self.images[where] if self.images is not None and self.seeing and self.seeing[client] else None

    def order(self, round_index: int, client: int) -> Tensor:
        """Return a client's order of examples in a round, int64 [examples of the client]."""
        position = self.cohorts[round_index].index(client)
        return self.orders[round_index, position, : self.offsets[client + 1] - self.offsets[client]]
