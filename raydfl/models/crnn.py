"""CRNN: 1-d convolutions over time, a GRU, the mean over time, and a linear layer.

The sizes are those of FedMLAC's table 3. Unspecified details follow FedAudio's convolutional recurrent network. Convolutions
keep the number of frames and are followed by ReLU and max pooling. Dropout follows the last pooling, and the GRU has one layer.
The initialisation is PyTorch's default, and the network has no normalisation layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.ops import GRU, Conv1d, Dropout, mean_over_time
from raydfl.models._width import Channels, Width, chain_layers, scale_channels

Count = Annotated[int, Field(ge=1)]


class CRNN(nn.Module):
    """Convolutional recurrent network for sequences of feature frames.

    With ``lengths``, outputs do not depend on padding (to float tolerance). Convolutions, the GRU's backward direction and the
    mean over time all ignore it.
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
        """Initialise the network.

        Args:
            inputs: features of a frame.
            classes: number of outputs.
            filters: channels of each convolution.
            kernel: frames of a convolution's kernel, odd.
            hidden: units of the GRU in each direction.
            bidirectional: add the backward direction of the GRU.
            dropout: dropout probability before the GRU.
            pool: size of max pooling in frames. 1: no pooling.
            width: fraction of the filters and of the GRU's units, rounded up.
            scaled: divide the outputs of convolutions by ``width`` during training.

        Raises:
            ConfigError: the kernel is even.
        """
        super().__init__()
        if kernel % 2 == 0:
            raise ConfigError(f"kernel is {kernel}, but kernels must be odd. Use {kernel + 1}.")
        self.pool = pool
        self.frames_per_token = pool ** len(filters)
        """Number of frames from a token to the next."""
        filters, hidden = tuple(scale_channels(count, width) for count in filters), scale_channels(hidden, width)
        self.scale = 1 / width if scaled else 1.0
        channels = (inputs, *filters)
        self.convolutions = nn.ModuleList(
            Conv1d(before, after, kernel, padding=kernel // 2) for before, after in pairwise(channels)
        )
        self.dropout = Dropout(dropout)
        self.gru = GRU(filters[-1], hidden, batch_first=True, bidirectional=bidirectional)
        self.output = nn.Linear(hidden * (1 + bidirectional), classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits float32 [batch, classes] from the arguments of :meth:`embed`."""
        return self.head(self.embed(x, lengths))

    def head(self, embedding: Tensor) -> Tensor:
        """Compute logits float32 [..., classes] from embeddings or frames float32 [..., hidden * directions]."""
        logits: Tensor = self.output(embedding)
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Average the :meth:`frames` over time: float32 [batch, hidden * directions]."""
        return mean_over_time(*self.frames(x, lengths))

    def frames(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the GRU's output at each time step after pooling.

        Args:
            x: float32 [batch, frames, inputs].
            lengths: int64 [batch], number of valid frames, at least 1. ``None``: all. An example shorter than the pooling
                counts as one frame after it.

        Returns:
            float32 [batch, tokens, hidden * directions], and the number of valid tokens, int64 [batch]. ``None``: all.

        Raises:
            DataError: the batch has fewer frames than the pooling needs.
        """
        needed = self.pool ** len(self.convolutions)
        if x.shape[1] < needed:
            raise DataError(
                f"{x.shape[1]} frames are too few: {len(self.convolutions)} times max pooling by {self.pool} need at least "
                f"{needed}. Use longer clips, a shorter hop, or a network with fewer filters or pool: 1."
            )
        for convolution in self.convolutions:
            x = convolution.pooled(x, self.pool, lengths)  # type: ignore[operator]
            if self.training and self.scale != 1:  # compensates for removed inputs of the next layer, like dropout
                x = x * self.scale
            if lengths is not None:
                lengths = (lengths // self.pool).clamp_min(1)
        return self.gru.outputs(self.dropout(x), lengths), lengths

    def channels(self) -> Channels:
        """Return the groups of channels: the filters of each convolution, and the units of each direction of the GRU."""
        groups = chain_layers([f"convolutions.{index}" for index in range(len(self.convolutions))], 3)
        last = (f"convolutions.{len(self.convolutions) - 1}",)
        units = ("gru", "gru_reverse")[: 1 + self.gru.bidirectional]
        for unit, suffix in zip(units, ("", "_reverse"), strict=False):
            gates = (unit,) * 3
            groups |= {f"gru.weight_ih_l0{suffix}": (gates, last), f"gru.weight_hh_l0{suffix}": (gates, (unit,))}
            groups |= {f"gru.bias_{kind}_l0{suffix}": (gates,) for kind in ("ih", "hh")}
        return {**groups, "output.weight": ((), units)}


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "crnn": (CRNN, {}),
    "crnn_tiny": (CRNN, {"filters": (16,), "hidden": 32, "bidirectional": False}),
    "crnn_lite": (CRNN, {"filters": (32, 32), "hidden": 64, "bidirectional": False}),
    "crnn_mid": (CRNN, {"filters": (32, 32, 32), "hidden": 64, "bidirectional": False}),
    "crnn_base": (CRNN, {"filters": (64, 64), "hidden": 128, "bidirectional": True}),
    "crnn_deep": (CRNN, {"filters": (64, 128, 128), "hidden": 128, "bidirectional": True}),
}
