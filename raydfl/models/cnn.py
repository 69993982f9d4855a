"""CNN: two-dimensional convolutions on images with max pooling, and a hidden layer.

The network for MNIST of McMahan et al., AISTATS 2017, section 3: two 5 x 5 convolutions of 32 and 64 channels, each with ReLU and
2 x 2 max pooling, a hidden layer of 512 ReLU units, and the output layer. It has 1,663,370 parameters for 28 x 28 grey images
and 10 classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.ops import Conv2d, Dropout, relu_pool
from raydfl.models._width import Channels, Width, chain_layers, scale_channels

Count = Annotated[int, Field(ge=1)]


class CNN(nn.Module):
    """Convolutional network for images."""

    images: ClassVar[bool] = True

    def __init__(
        self,
        inputs: tuple[int, int, int],
        classes: int,
        filters: Annotated[tuple[Count, ...], Field(min_length=1)] = (32, 64),
        kernel: Count = 5,
        hidden: Count = 512,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        width: Width = 1.0,
        scaled: bool = False,
    ) -> None:
        """Initialise the network.

        Args:
            inputs: channels, rows and columns of an image.
            classes: number of outputs.
            filters: channels of each convolution, followed by 2 x 2 max pooling.
            kernel: rows and columns of a convolution's kernel, odd.
            hidden: units of the hidden layer.
            dropout: dropout probability of the hidden layer.
            width: fraction of the filters and hidden units, rounded up.
            scaled: divide the outputs of convolutions by ``width`` during training.

        Raises:
            ConfigError: the kernel is even, or images are too small for the pooling.
        """
        super().__init__()
        channels, rows, columns = inputs
        if kernel % 2 == 0:
            raise ConfigError(f"kernel is {kernel}, but kernels must be odd. Use {kernel + 1}.")
        smallest = min(rows, columns) >> len(filters)
        if smallest < 1:
            raise ConfigError(
                f"images of {rows} x {columns} are too small for {len(filters)} times 2 x 2 pooling. Use fewer filters."
            )
        filters, hidden = tuple(scale_channels(count, width) for count in filters), scale_channels(hidden, width)
        self.scale = 1 / width if scaled else 1.0
        self.convolutions = nn.ModuleList(
            Conv2d(before, after, kernel, padding=kernel // 2) for before, after in pairwise((channels, *filters))
        )
        positions = (rows >> len(filters)) * (columns >> len(filters))
        self.hidden = nn.Linear(filters[-1] * positions, hidden)
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits float32 [batch, classes] from x float32 [batch, channels, rows, columns]."""
        logits: Tensor = self.output(self.embed(x))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute the output of the hidden layer: float32 [batch, hidden]."""
        x = x.permute(0, 2, 3, 1)
        for convolution in self.convolutions:
            x = relu_pool(convolution.channels_last(x), 2)  # type: ignore[operator]
            if self.training and self.scale != 1:  # compensates for removed inputs of the next layer, like dropout
                x = x * self.scale
        hidden: Tensor = self.dropout(self.hidden(x.permute(0, 3, 1, 2).flatten(1)).relu())
        return hidden

    def channels(self) -> Channels:
        """Return the groups of channels: the filters of each convolution, and the hidden units."""
        convolutions = chain_layers([f"convolutions.{index}" for index in range(len(self.convolutions))], 4)
        last = f"convolutions.{len(self.convolutions) - 1}"
        return {
            **convolutions,
            "hidden.weight": (("hidden",), (last,)),
            "hidden.bias": (("hidden",),),
            "output.weight": ((), ("hidden",)),
        }


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "cnn": (CNN, {}),
    "cnn_small": (CNN, {"filters": (8, 16), "kernel": 3, "hidden": 64}),
}
