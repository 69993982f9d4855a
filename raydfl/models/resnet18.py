"""ResNet-18 with group normalisation: torchvision's, for images and, as images of one channel, for log-mel features.

K. He, X. Zhang, S. Ren, J. Sun, Deep Residual Learning for Image Recognition, CVPR 2016, table 1, 18 layers; normalisation over
groups of channels, as FedAPTA's code has it (Y. Wu, K. He, Group Normalization, ECCV 2018), since batch normalisation would make a
client's examples influence each other. The first convolution, 7 x 7 with stride 2, and the pooling after it are there for images of
any size: those of 32 x 32 reach the last block as one place.

Names of layers are torchvision's (``bn1`` is a group normalisation here), but for the last, ``output``. 11,176,512 parameters below
it, of which the convolutions of layer2 to layer4, which FedAPTA prunes, have 11,010,048.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from raydfl.models._vision import Groups, VisionNetwork, group_norm, torchvision_models


class ResNet18(VisionNetwork):
    """A residual network for images or sequences of feature frames. With ``lengths`` a batch gives the same as its items alone."""

    def __init__(
        self, inputs: int | tuple[int, int, int], classes: int, groups: Groups = 2, freeze: bool = False
    ) -> None:
        """Build it.

        Args:
            inputs: channels (1 or 3), rows and columns of an image; features of a frame.
            classes: outputs.
            groups: of channels that are normalised together; a power of 2 up to 64.
            freeze: true: the first convolution, its normalisation and layer1 keep their first weights, and are never sent.

        Raises:
            ConfigError: torchvision is not installed, images of another number of channels, or another number of groups.
        """
        norm = partial(group_norm, groups)
        super().__init__(torchvision_models().resnet18(norm_layer=norm, num_classes=1), inputs, classes)
        if freeze:
            self.freeze("conv1", "bn1", "layer1")

    def _block(self, block: Any, x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor | None]:
        shortcut = x if block.downsample is None else self._through(block.downsample, x, inside)[0]
        y, after = self._chain([block.conv1, block.bn1, block.relu, block.conv2, block.bn2], x, inside)
        return (y + shortcut).relu(), after


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"resnet18": (ResNet18, {})}
