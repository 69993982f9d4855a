"""CRNN: 1-d convolutions over time, a GRU, the mean over time, one linear layer.

The five sizes of FedMLAC's table 3; what the table leaves open follows FedAudio's convolutional recurrent network: each
convolution keeps the number of frames and is followed by ReLU and max pooling; dropout once, after the last pooling; the GRU has
one layer; PyTorch's default initialisation; no normalisation layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.ops import GRU, Conv1d, Dropout, mean_over_time
from raydfl.models._width import Channels, Width, narrowed, of_layers

Count = Annotated[int, Field(ge=1)]


class CRNN(nn.Module):
    """A network for sequences of feature frames.

    With ``lengths`` a batch gives the same as its items alone, to float tolerance: neither a convolution at an item's end, nor
    the GRU's backward direction, nor the mean sees padding.
    """

    def __init__(
        self,
        inputs: int,
        classes: int,
        filters: Annotated[tuple[Count, ...], Field(min_length=1)] = (64, 64),
        kernel: Count = 3,
        hidden: Count = 128,
        bidirectional: bool = True,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1,
        pool: Count = 2,
        width: Width = 1.0,
        scaled: bool = False,
    ) -> None:
        """Build it.

        Args:
            inputs: features of a frame.
            classes: outputs.
            filters: channels of each convolution.
            kernel: frames that a convolution sees; odd.
            hidden: units of the GRU, in each direction.
            bidirectional: a second GRU direction, from the end.
            dropout: share of values zeroed before the GRU while training, 0..1.
            pool: frames that become one after each convolution; 1 is no pooling.
            width: share of the filters and of the GRU's units that it is built with, rounded up.
            scaled: divide what each convolution gives by ``width`` while training.

        Raises:
            ConfigError: an even kernel.
        """
        super().__init__()
        if kernel % 2 == 0:
            raise ConfigError(f"kernel is {kernel}; an odd number of frames has a middle one, use {kernel + 1}")
        self.pool = pool
        filters, hidden = tuple(narrowed(each, width) for each in filters), narrowed(hidden, width)
        self.scale = 1 / width if scaled else 1.0
        channels = (inputs, *filters)
        self.convolutions = nn.ModuleList(
            Conv1d(before, after, kernel, padding=kernel // 2) for before, after in pairwise(channels)
        )
        self.dropout = Dropout(dropout)
        self.gru = GRU(filters[-1], hidden, batch_first=True, bidirectional=bidirectional)
        self.output = nn.Linear(hidden * (1 + bidirectional), classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits float32 [batch, classes]; see :meth:`embed` for the arguments."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the mean over time of the GRU's output: float32 [batch, hidden * directions].

        Args:
            x: float32 [batch, frames, inputs].
            lengths: int64 [batch]: frames that count, at least 1 each; ``None``: all. An item too short for the pooling is
                taken as one frame after it.

        Raises:
            DataError: the whole batch has fewer frames than the pooling needs.
        """
        needed = self.pool ** len(self.convolutions)
        if x.shape[1] < needed:
            raise DataError(
                f"{x.shape[1]} frames are too few: {len(self.convolutions)} times max pooling by {self.pool} need at least "
                f"{needed}; use longer clips, a shorter hop, or a network with fewer filters or pool: 1"
            )
        for convolution in self.convolutions:
            x = convolution.pooled(x, self.pool, lengths)  # type: ignore[operator]
            if self.training and self.scale != 1:
                x = x * self.scale
            if lengths is not None:
                lengths = (lengths // self.pool).clamp_min(1)
        return mean_over_time(self.gru.outputs(self.dropout(x), lengths), lengths)

    def channels(self) -> Channels:
        """Return what belongs to each convolution's filters and to the units of each direction of the GRU."""
        found = of_layers([f"convolutions.{number}" for number in range(len(self.convolutions))], 3)
        seen = (f"convolutions.{len(self.convolutions) - 1}",)
        units = ("gru", "gru_reverse")[: 1 + self.gru.bidirectional]
        for unit, suffix in zip(units, ("", "_reverse"), strict=False):
            gates = (unit,) * 3
            found |= {f"gru.weight_ih_l0{suffix}": (gates, seen), f"gru.weight_hh_l0{suffix}": (gates, (unit,))}
            found |= {f"gru.bias_{kind}_l0{suffix}": (gates,) for kind in ("ih", "hh")}
        return {**found, "output.weight": ((), units)}


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "crnn": (CRNN, {}),
    "crnn_tiny": (CRNN, {"filters": (16,), "hidden": 32, "bidirectional": False}),
    "crnn_lite": (CRNN, {"filters": (32, 32), "hidden": 64, "bidirectional": False}),
    "crnn_mid": (CRNN, {"filters": (32, 32, 32), "hidden": 64, "bidirectional": False}),
    "crnn_base": (CRNN, {"filters": (64, 64), "hidden": 128, "bidirectional": True}),
    "crnn_deep": (CRNN, {"filters": (64, 128, 128), "hidden": 128, "bidirectional": True}),
}
