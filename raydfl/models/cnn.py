"""CNN: two-dimensional convolutions on images, each with pooling, and a hidden layer.

The network for MNIST of McMahan et al., AISTATS 2017, section 3: two 5 x 5 convolutions of 32 and 64 channels, each with ReLU and
2 x 2 max pooling, a layer of 512 ReLU units, the output; 1,663,370 parameters for 28 x 28 grey images and 10 classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.ops import Conv2d, Dropout, relu_pool
from raydfl.models._width import Channels, Width, narrowed, of_layers

Count = Annotated[int, Field(ge=1)]


class CNN(nn.Module):
    """A network for images."""

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
        """Build it.

        Args:
            inputs: channels, rows and columns of an image.
            classes: outputs.
            filters: channels of each convolution; each is followed by 2 x 2 max pooling.
            kernel: rows and columns that a convolution sees; odd.
            hidden: units of the hidden layer.
            dropout: share of its values zeroed while training, 0..1.
            width: share of the filters and hidden units that it is built with, rounded up.
            scaled: divide what each convolution gives by ``width`` while training.

        Raises:
            ConfigError: an even kernel, or images too small for so many convolutions.
        """
        super().__init__()
        channels, rows, columns = inputs
        if kernel % 2 == 0:
            raise ConfigError(f"kernel is {kernel}; an odd number has a middle, use {kernel + 1}")
        smallest = min(rows, columns) >> len(filters)
        if smallest < 1:
            raise ConfigError(
                f"images of {rows} x {columns} are too small for {len(filters)} times 2 x 2 pooling; take fewer filters"
            )
        filters, hidden = tuple(narrowed(each, width) for each in filters), narrowed(hidden, width)
        self.scale = 1 / width if scaled else 1.0
        self.convolutions = nn.ModuleList(
            Conv2d(before, after, kernel, padding=kernel // 2) for before, after in pairwise((channels, *filters))
        )
        places = (rows >> len(filters)) * (columns >> len(filters))
        self.hidden = nn.Linear(filters[-1] * places, hidden)
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits float32 [batch, classes] of x float32 [batch, channels, rows, columns]."""
        logits: Tensor = self.output(self.embed(x))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the hidden layer's output, float32 [batch, hidden]."""
        x = x.permute(0, 2, 3, 1)
        for convolution in self.convolutions:
            x = relu_pool(convolution.channels_last(x), 2)  # type: ignore[operator]
            if self.training and self.scale != 1:
                x = x * self.scale
        hidden: Tensor = self.dropout(self.hidden(x.permute(0, 3, 1, 2).flatten(1)).relu())
        return hidden

    def channels(self) -> Channels:
        """Return what belongs to each convolution's filters and to the hidden units."""
        found = of_layers([f"convolutions.{number}" for number in range(len(self.convolutions))], 4)
        last = f"convolutions.{len(self.convolutions) - 1}"
        return {
            **found,
            "hidden.weight": (("hidden",), (last,)),
            "hidden.bias": (("hidden",),),
            "output.weight": ((), ("hidden",)),
        }


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "cnn": (CNN, {}),
    "cnn_small": (CNN, {"filters": (8, 16), "kernel": 3, "hidden": 64}),
}
