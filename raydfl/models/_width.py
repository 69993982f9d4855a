"""Width: networks that are built with a share of their channels, and what they say of these.

What one layer gives the next one takes, so the output channels of the one and the input channels of the other are one group. A
network that can be made narrower has

- the option ``width``, a share of its channels, with which it is built with fewer of them;
- ``channels()``: by the names of its tensors, for each dimension the groups that lie in it one after another; none for a dimension
  that stays as it is, as those of the network's inputs and outputs do. Tensors that are not named stay whole.

For two layers, of which the second sees each channel of the first at 49 places::

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
"""The type of the option ``width``."""


def narrowed(channels: int, width: float, multiple: int = 1) -> int:
    """Return how many of some channels are left: ``width`` of them, rounded up to a multiple.

    >>> narrowed(64, 0.5), narrowed(5, 0.5), narrowed(24, 0.3, multiple=4)
    (32, 3, 8)
    """
    # 0.07 * 100 is 7.000...01: the guard makes it the ceiling of the decimal numbers that the user wrote.
    return min(channels, multiple * max(1, math.ceil(channels * width / multiple - 1e-9)))


def of_layers(layers: Sequence[str], dimensions: int) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the channels of convolutions, each of which sees the one before.

    Args:
        layers: their names, which become the groups'.
        dimensions: of their weights.
    """
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    before: tuple[str, ...] = ()
    for layer in layers:
        found |= {f"{layer}.weight": ((layer,), before, *((),) * (dimensions - 2)), f"{layer}.bias": ((layer,),)}
        before = (layer,)
    return found
