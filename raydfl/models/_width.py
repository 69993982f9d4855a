"""Width: networks with a fraction of their channels, and groups of channels.

The output channels of a layer and the input channels of the next layer form a group. A network with support for narrower
versions has

- the option ``width``, the fraction of its channels;
- ``channels()``, a mapping from tensor names to the groups of each dimension, in order. Dimensions with a fixed size, such as
  the inputs and outputs of the network, have no group. Tensors without an entry have fixed sizes.

Example of two layers, where the second reads each channel of the first at 49 positions::

    {"first.weight": (("first",), (), (), ()), "first.bias": (("first",),), "second.weight": ((), ("first",))}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

Channels = Mapping[str, tuple[tuple[str, ...], ...]]
"""Groups of channels, by tensor and dimension."""

Width = Annotated[float, Field(gt=0, le=1)]
"""Type of the option ``width``."""


def scale_channels(channels: int, width: float, multiple: int = 1) -> int:
    """Compute the number of channels at a width, rounded up to a multiple.

    >>> scale_channels(64, 0.5), scale_channels(5, 0.5), scale_channels(24, 0.3, multiple=4)
    (32, 3, 8)
    """
    # In binary, 0.07 * 100 is 7.000...01, so a small constant is subtracted.
    return min(channels, multiple * max(1, math.ceil(channels * width / multiple - 1e-9)))


def chain_layers(layers: Sequence[str], dimensions: int) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Build the groups of channels of consecutive convolutions.

    Args:
        layers: names of the layers, also used as names of the groups.
        dimensions: number of dimensions of the weights.
    """
    groups: dict[str, tuple[tuple[str, ...], ...]] = {}
    previous: tuple[str, ...] = ()
    for layer in layers:
        groups |= {f"{layer}.weight": ((layer,), previous, *((),) * (dimensions - 2)), f"{layer}.bias": ((layer,),)}
        previous = (layer,)
    return groups
