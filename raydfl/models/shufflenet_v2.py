"""ShuffleNet V2 with group normalisation: torchvision's, for images and, as images of one channel, for log-mel features.

N. Ma, X. Zhang, H.-T. Zheng, J. Sun, ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture Design, ECCV 2018, table 5,
width 1.0; each batch normalisation is replaced by one over groups of channels, as FedAPTA's code has it, since batch normalisation
would make a client's examples influence each other.

``width`` is that of the channels inside the blocks, between a branch's 1 x 1 convolutions, and of the last convolution's. Those
that blocks hand on stay whole: each block divides them by their places and lets them take turns, so which of them the next one
computes with changes from block to block, and a choice of them would be no such network.

Names of layers are torchvision's, but for the last, ``output``. 1,253,604 parameters below it, of which the convolutions of stage3,
stage4 and conv5, which FedAPTA prunes (the depthwise ones too), have 1,208,140.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.models._vision import Groups, VisionNetwork, group_norm, narrow_layers, torchvision_models
from raydfl.models._width import Channels, Width, narrowed

_BRANCHES = 2


class ShuffleNetV2(VisionNetwork):
    """A small network for images or sequences of feature frames. With ``lengths`` a batch gives the same as its items alone."""

    def __init__(
        self,
        inputs: int | tuple[int, int, int],
        classes: int,
        groups: Groups = 2,
        freeze: bool = False,
        width: Width = 1.0,
    ) -> None:
        """Build it.

        Args:
            inputs: channels (1 or 3), rows and columns of an image; features of a frame.
            classes: outputs.
            groups: of channels that are normalised together; 1 or 2.
            freeze: true: the first convolution with its normalisation and stage2 keep their first weights, and are never sent.
            width: share of the channels inside the blocks, and of the last convolution's, that it is built with, rounded up to
                multiples of ``groups``.

        Raises:
            ConfigError: torchvision is not installed, images of another number of channels, or another number of groups.
        """
        network = torchvision_models().shufflenet_v2_x1_0(num_classes=1)
        for part in [*network.modules()]:
            for name, child in part.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(part, name, group_norm(groups, child.num_features))
        narrow_layers(network, _channels(network), width, groups)
        super().__init__(network, inputs, classes, narrowed(network.fc.in_features, width, groups))
        if freeze:
            self.freeze("conv1", "stage2")

    def _block(self, block: Any, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        left, right = x.chunk(_BRANCHES, dim=1) if block.stride == 1 else (x, x)
        if block.stride > 1:
            left, _ = self._through(block.branch1, left, lengths)
        right, after = self._through(block.branch2, right, lengths)
        # The channels of both branches take turns; they lie last in memory.
        y = torch.stack([left.movedim(1, 3), right.movedim(1, 3)], dim=4).flatten(3).movedim(3, 1)
        return y, after

    def channels(self) -> Channels:
        """Return what belongs to the channels inside each block, and to the last convolution's."""
        return {**_channels(self), "output.weight": ((), ("conv5",))}


def _channels(network: nn.Module) -> dict[str, tuple[tuple[str, ...], ...]]:
    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    for path, _ in network.named_modules():
        if path.endswith(".branch2"):
            inner = (path,)
            found |= {f"{path}.0.weight": (inner, (), (), ()), f"{path}.3.weight": (inner, (), (), ())}
            found |= {f"{path}.{norm}.{kind}": (inner,) for norm in (1, 4) for kind in ("weight", "bias")}
            found[f"{path}.5.weight"] = ((), inner, (), ())
    return {
        **found,
        "conv5.0.weight": (("conv5",), (), (), ()),
        "conv5.1.weight": (("conv5",),),
        "conv5.1.bias": (("conv5",),),
    }


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"shufflenet_v2": (ShuffleNetV2, {})}
