"""The networks in plain PyTorch without raydfl: the models of the bare loops and the peers in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "crnn_tiny": {"filters": [16], "hidden": 32, "bidirectional": False},
    "crnn_lite": {"filters": [32, 32], "hidden": 64, "bidirectional": False},
    "crnn_base": {"filters": [64, 64], "hidden": 128, "bidirectional": True},
    "cnn_small": {"filters": [8, 16], "kernel": 3, "hidden": 64},
}


class PlainCRNN(nn.Module):
    """1-d convolutions with ReLU and pooling by 2, a GRU, the mean over time, a linear layer."""

    def __init__(
        self, inputs: int, classes: int, filters: list[int], kernel: int, hidden: int, bidirectional: bool
    ) -> None:
        super().__init__()
        channels = [inputs, *filters]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(channels[i], channels[i + 1], kernel, padding=kernel // 2) for i in range(len(filters))
        )
        self.gru = nn.GRU(filters[-1], hidden, batch_first=True, bidirectional=bidirectional)
        self.output = nn.Linear(hidden * (2 if bidirectional else 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits float32 [batch, classes] for x float32 [batch, frames, inputs]."""
        return self.output(self.embed(x))

    def embed(self, x: Tensor) -> Tensor:
        """Features float32 [batch, hidden, or twice as many]."""
        x = x.transpose(1, 2)
        for convolution in self.convolutions:
            x = F.max_pool1d(F.relu(convolution(x)), 2)
        x, _ = self.gru(x.transpose(1, 2))
        return x.mean(dim=1)


class PlainCNN(nn.Module):
    """2-d convolutions with ReLU and pooling by 2 x 2, a hidden layer with ReLU, a linear layer."""

    def __init__(
        self, inputs: tuple[int, int, int], classes: int, filters: list[int], kernel: int, hidden: int
    ) -> None:
        super().__init__()
        channels, rows, columns = inputs
        counts = [channels, *filters]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(counts[i], counts[i + 1], kernel, padding=kernel // 2) for i in range(len(filters))
        )
        self.hidden = nn.Linear(filters[-1] * (rows >> len(filters)) * (columns >> len(filters)), hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits float32 [batch, classes] for x float32 [batch, channels, rows, columns]."""
        for convolution in self.convolutions:
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        return self.output(F.relu(self.hidden(x.flatten(1))))
