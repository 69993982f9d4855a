"""Split CNN: blocks with parallel convolutions over time and over frequency, and a global maximum.

The network of FedSTAR (V. Tsouvalas, A. Saeed, T. Ozcelebi, Federated Self-Training for Semi-Supervised Audio Recognition, ACM
TECS 2022), as in the authors' code. Each of four blocks has

    time       convolution of 4 frames x 1 band, group norm, ReLU    ┐ concatenated
    frequency  convolution of 1 frame x 4 bands, group norm, ReLU    ┘
    mix        convolution of 1 x 1, group norm, ReLU, 2 x 2 maximum, dropout of whole maps

The maximum over time and frequency and a linear layer follow. The layers below the last layer have 134,648 weights. Even
kernels are padded as in TensorFlow, with one more position after than before. Weights have Xavier initialisation, and biases
start at 0.

Deviation: pooling keeps the last frame or band of an odd number, so that clips of any length are accepted. The paper's sizes,
96 frames and 64 bands, are always even.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.ops import Conv2d, Dropout, conv2d
from raydfl.models._norm import GroupNorm, mask_frames, normalise
from raydfl.models._width import Channels, Width, scale_channels

Count = Annotated[int, Field(ge=1)]

EPSILON = 1e-3
"""Constant added to the variance in group normalisation, TensorFlow's default."""


class SplitCNN(nn.Module):
    """Convolutional network for sequences of feature frames. With ``lengths``, outputs do not depend on padding."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        filters: Annotated[tuple[Count, ...], Field(min_length=1)] = (24, 32, 64, 128),
        kernel: Count = 4,
        groups: Count = 4,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1,
        width: Width = 1.0,
        scaled: bool = False,
    ) -> None:
        """Initialise the network.

        Args:
            inputs: features of a frame, ordered by frequency. Any number.
            classes: number of outputs.
            filters: channels of each block.
            kernel: frames, and bands, of a convolution's kernel.
            groups: groups of channels in normalisations.
            dropout: dropout probability of each block's maps.
            width: fraction of the filters, rounded up to multiples of ``groups``.
            scaled: divide the outputs of convolutions by ``width`` during training.

        Raises:
            ConfigError: the number of channels is not a multiple of ``groups``.
        """
        super().__init__()
        for channels in filters:
            if channels % groups:
                raise ConfigError(
                    f"filters are {list(filters)}, but {channels} channels cannot be divided into {groups} groups. Use multiples "
                    f"of {groups}."
                )
        filters = tuple(scale_channels(count, width, groups) for count in filters)
        scale = 1 / width if scaled else 1.0
        self.blocks = nn.ModuleList(
            _SplitBlock(before, after, kernel, groups, dropout, scale) for before, after in pairwise((1, *filters))
        )
        self.output = nn.Linear(filters[-1], classes)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # every layer has a bias

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits float32 [batch, classes] from the arguments of :meth:`embed`."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute the maximum of each map: float32 [batch, channels of the last block].

        Args:
            x: float32 [batch, frames, inputs].
            lengths: int64 [batch], number of valid frames. ``None``: all.
        """
        x = x.unsqueeze(-1)
        if lengths is not None:
            x = x * mask_frames(x, lengths)
        for block in self.blocks:
            x = block(x, lengths)
            lengths = None if lengths is None else (lengths + 1) // 2  # pooling keeps an incomplete last window
        return x.amax(dim=(1, 2))

    def channels(self) -> Channels:
        """Return the groups of channels: the filters of each convolution."""
        groups: dict[str, tuple[tuple[str, ...], ...]] = {}
        before: tuple[str, ...] = ()
        for index in range(len(self.blocks)):
            time, frequency, mix = (f"blocks.{index}.{name}" for name in ("time", "frequency", "mix"))
            for layer, inputs in ((time, before), (frequency, before), (mix, (time, frequency))):
                groups |= {f"{layer}.weight": ((layer,), inputs, (), ()), f"{layer}.bias": ((layer,),)}
                groups |= {f"{layer}_norm.{kind}": ((layer,),) for kind in ("weight", "bias")}
            before = (mix,)
        return {**groups, "output.weight": ((), before)}


class _SplitBlock(nn.Module):
    def __init__(self, before: int, after: int, kernel: int, groups: int, dropout: float, scale: float) -> None:
        super().__init__()
        self.scale = scale
        before_, after_ = (kernel - 1) // 2, kernel // 2
        self.in_time, self.in_frequency = (before_, 0, after_, 0), (0, before_, 0, after_)
        self.time = Conv2d(before, after, (kernel, 1))
        self.time_norm = GroupNorm(groups, after, EPSILON)
        self.frequency = Conv2d(before, after, (1, kernel))
        self.frequency_norm = GroupNorm(groups, after, EPSILON)
        self.mix = Conv2d(2 * after, after, 1)
        self.mix_norm = GroupNorm(groups, after, EPSILON)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Map [batch, frames, bands, channels] to [batch, (frames + 1) // 2, (bands + 1) // 2, channels], 0 in padding."""
        in_time = self._rescale(conv2d(x, self.time.weight, self.time.bias, padding=self.in_time))
        in_frequency = self._rescale(conv2d(x, self.frequency.weight, self.frequency.bias, padding=self.in_frequency))
        both = normalise([in_time, in_frequency], [self.time_norm, self.frequency_norm], lengths, relu=True)
        mixed = self._rescale(conv2d(both, self.mix.weight, self.mix.bias))
        pooled = normalise([mixed], [self.mix_norm], lengths, relu=True, pool=2, ceil=True)
        if not self.training or self.dropout.p == 0:
            return pooled
        mask: Tensor = self.dropout(torch.ones_like(pooled[:, 0, 0]))
        return pooled * mask[:, None, None]

    def _rescale(self, x: Tensor) -> Tensor:
        return x * self.scale if self.training and self.scale != 1 else x


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "split_cnn": (SplitCNN, {}),
    "split_cnn_tiny": (SplitCNN, {"filters": (4, 8)}),
}
"""``split_cnn`` is the paper's network. ``split_cnn_tiny`` is for tests and first experiments."""
