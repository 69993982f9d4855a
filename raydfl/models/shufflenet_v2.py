"""ShuffleNet V2 of torchvision with group normalisation, for images and for log-mel features as images of one channel.

N. Ma, X. Zhang, H.-T. Zheng, J. Sun, ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture Design, ECCV 2018, table 5,
width 1.0. Group normalisation replaces batch normalisation, as in FedAPTA's code, because batch normalisation makes examples
of a client influence each other.

``width`` scales the channels inside the blocks, between the 1 x 1 convolutions of a branch, and the channels of the last
convolution. Channels between blocks keep their number. Each block splits and shuffles them by position, so a subset of them
is not a ShuffleNet.

Layers have torchvision's names except the last layer, ``output``. The layers below it have 1,253,604 parameters, of which
1,208,140 belong to the convolutions of stage3, stage4 and conv5 (depthwise ones included), pruned by FedAPTA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.models._vision import Groups, VisionNetwork, group_norm, narrow_layers, torchvision_models
from raydfl.models._width import Channels, Width, scale_channels

_BRANCHES = 2


class ShuffleNetV2(VisionNetwork):
    """Small convolutional network for images or feature frames. With ``lengths``, outputs do not depend on padding."""

    def __init__(
        self,
        inputs: int | tuple[int, int, int],
        classes: int,
        groups: Groups = 2,
        freeze: bool = False,
        width: Width = 1.0,
    ) -> None:
        """Initialise the network.

        Args:
            inputs: channels (1 or 3), rows and columns of an image, or features of a frame.
            classes: number of outputs.
            groups: groups of channels in normalisations, 1 or 2.
            freeze: freeze the first convolution, its normalisation and stage2 at their initial weights. They are never sent.
            width: fraction of the channels inside the blocks and of the last convolution, rounded up to multiples of
                ``groups``.

        Raises:
            ConfigError: torchvision is not installed, or the number of image channels or groups is not supported.
        """
        network = torchvision_models().shufflenet_v2_x1_0(num_classes=1)
        for part in [*network.modules()]:
            for name, child in part.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(part, name, group_norm(groups, child.num_features))
        narrow_layers(network, _channels(network), width, groups)
        super().__init__(network, inputs, classes, scale_channels(network.fc.in_features, width, groups))
        if freeze:
            self.freeze("conv1", "stage2")

    def _apply_block(self, block: Any, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        left, right = x.chunk(_BRANCHES, dim=1) if block.stride == 1 else (x, x)
        if block.stride > 1:
            left, _ = self._apply_part(block.branch1, left, lengths)
        right, after = self._apply_part(block.branch2, right, lengths)
        # Interleave the channels of both branches, in channels-last memory.
        y = torch.stack([left.movedim(1, 3), right.movedim(1, 3)], dim=4).flatten(3).movedim(3, 1)
        return y, after

    def channels(self) -> Channels:
        """Return the groups of channels: the channels inside each block, and of the last convolution."""
        return {**_channels(self), "output.weight": ((), ("conv5",))}


def _channels(network: nn.Module) -> dict[str, tuple[tuple[str, ...], ...]]:
    groups: dict[str, tuple[tuple[str, ...], ...]] = {}
    for path, _ in network.named_modules():
        if path.endswith(".branch2"):
            inner = (path,)
            groups |= {f"{path}.0.weight": (inner, (), (), ()), f"{path}.3.weight": (inner, (), (), ())}
            groups |= {f"{path}.{norm}.{kind}": (inner,) for norm in (1, 4) for kind in ("weight", "bias")}
            groups[f"{path}.5.weight"] = ((), inner, (), ())
    return {
        **groups,
        "conv5.0.weight": (("conv5",), (), (), ()),
        "conv5.1.weight": (("conv5",),),
        "conv5.1.bias": (("conv5",),),
    }


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"shufflenet_v2": (ShuffleNetV2, {})}
