"""Split CNN: blocks of one convolution over time and one over frequency, side by side; group normalisation; the maximum over all.

The network of FedSTAR (V. Tsouvalas, A. Saeed, T. Ozcelebi, Federated Self-Training for Semi-Supervised Audio Recognition, ACM
TECS 2022), as its code has it: in each of four blocks

    time       convolution of 4 frames x 1 band, group norm, ReLU    ┐ joined
    frequency  convolution of 1 frame x 4 bands, group norm, ReLU    ┘
    mix        convolution of 1 x 1, group norm, ReLU, 2 x 2 maximum, dropout of whole maps

then the maximum over what is left of time and frequency, and one linear layer: 134,648 weights below it. Where a kernel is even it
sees one place more after than before, as TensorFlow pads; kernels begin as Glorot and Bengio drew them, biases at 0.

Deviation: where an odd number of frames or bands is pooled, the last stands for itself and is not left out, so that clips of any
length can be taken. At the paper's 96 frames and 64 bands nothing is odd.
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
from raydfl.models._norm import GroupNorm, inside_of, normalised
from raydfl.models._width import Channels, Width, narrowed

Count = Annotated[int, Field(ge=1)]

EPSILON = 1e-3
"""Constant that group normalisation adds to the variance: TensorFlow's default."""


class SplitCNN(nn.Module):
    """A network for sequences of feature frames, without recurrence. With ``lengths`` a batch gives the same as its items alone."""

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
        """Build it.

        Args:
            inputs: features of a frame, neighbours in frequency side by side; any number.
            classes: outputs.
            filters: channels of each block.
            kernel: frames, and bands, that a convolution sees.
            groups: of channels that are normalised together.
            dropout: share of each block's maps zeroed while training, 0..1.
            width: share of the filters that it is built with, rounded up to multiples of ``groups``.
            scaled: divide what each convolution gives by ``width`` while training.

        Raises:
            ConfigError: channels that cannot be divided into so many groups.
        """
        super().__init__()
        for channels in filters:
            if channels % groups:
                raise ConfigError(
                    f"filters are {list(filters)} and groups {groups}: {channels} channels make no equal groups; take multiples of "
                    f"{groups}"
                )
        filters = tuple(narrowed(each, width, groups) for each in filters)
        scale = 1 / width if scaled else 1.0
        self.blocks = nn.ModuleList(
            _Block(before, after, kernel, groups, dropout, scale) for before, after in pairwise((1, *filters))
        )
        self.output = nn.Linear(filters[-1], classes)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # all have one

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits float32 [batch, classes]; see :meth:`embed` for the arguments."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return each map's maximum: float32 [batch, channels of the last block].

        Args:
            x: float32 [batch, frames, inputs].
            lengths: int64 [batch]: frames that count; ``None``: all.
        """
        x = x.unsqueeze(-1)
        if lengths is not None:
            x = x * inside_of(x, lengths)
        for block in self.blocks:
            x = block(x, lengths)
            lengths = None if lengths is None else (lengths + 1) // 2
        return x.amax(dim=(1, 2))

    def channels(self) -> Channels:
        """Return what belongs to each convolution's filters."""
        found: dict[str, tuple[tuple[str, ...], ...]] = {}
        before: tuple[str, ...] = ()
        for number in range(len(self.blocks)):
            time, frequency, mix = (f"blocks.{number}.{part}" for part in ("time", "frequency", "mix"))
            for layer, seen in ((time, before), (frequency, before), (mix, (time, frequency))):
                found |= {f"{layer}.weight": ((layer,), seen, (), ()), f"{layer}.bias": ((layer,),)}
                found |= {f"{layer}_norm.{kind}": ((layer,),) for kind in ("weight", "bias")}
            before = (mix,)
        return {**found, "output.weight": ((), before)}


class _Block(nn.Module):
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
        """Return [batch, (frames + 1) // 2, (bands + 1) // 2, channels] of [batch, frames, bands, channels]; 0 in padding."""
        in_time = self._scaled(conv2d(x, self.time.weight, self.time.bias, padding=self.in_time))
        in_frequency = self._scaled(conv2d(x, self.frequency.weight, self.frequency.bias, padding=self.in_frequency))
        both = normalised([in_time, in_frequency], [self.time_norm, self.frequency_norm], lengths, relu=True)
        mixed = self._scaled(conv2d(both, self.mix.weight, self.mix.bias))
        pooled = normalised([mixed], [self.mix_norm], lengths, relu=True, pool=2, ceil=True)
        if not self.training or self.dropout.p == 0:
            return pooled
        kept: Tensor = self.dropout(torch.ones_like(pooled[:, 0, 0]))
        return pooled * kept[:, None, None]

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.scale if self.training and self.scale != 1 else x


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "split_cnn": (SplitCNN, {}),
    "split_cnn_tiny": (SplitCNN, {"filters": (4, 8)}),
}
"""``split_cnn`` is FedSTAR's; ``split_cnn_tiny`` is for tests and first tries."""
