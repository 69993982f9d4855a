"""ResNet-18 with group normalisation: torchvision's, for images and, as images of one channel, for log-mel features.

K. He, X. Zhang, S. Ren, J. Sun, Deep Residual Learning for Image Recognition, CVPR 2016, table 1, 18 layers; normalisation over
groups of channels, as FedAPTA's code has it (Y. Wu, K. He, Group Normalization, ECCV 2018), since batch normalisation would make a
client's examples influence each other. The first convolution, 7 x 7 with stride 2, and the pooling after it are there for images of
any size: those of 32 x 32 reach the last block as one place.

The channels of a stage are one group, since its blocks add to them; the first convolution's are layer1's. Each block's inner
channels are a group of their own.

Names of layers are torchvision's (``bn1`` is a group normalisation here), but for the last, ``output``. 11,176,512 parameters below
it, of which the convolutions of layer2 to layer4, which FedAPTA prunes, have 11,010,048.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from raydfl.models._vision import Groups, VisionNetwork, group_norm, narrow_layers, torchvision_models
from raydfl.models._width import Channels, Width, narrowed


class ResNet18(VisionNetwork):
    """A residual network for images or sequences of feature frames. With ``lengths`` a batch gives the same as its items alone."""

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
            groups: of channels that are normalised together; a power of 2 up to 64.
            freeze: true: the first convolution, its normalisation and layer1 keep their first weights, and are never sent.
            width: share of the channels that it is built with, rounded up to multiples of ``groups``.

        Raises:
            ConfigError: torchvision is not installed, images of another number of channels, or another number of groups.
        """
        network = torchvision_models().resnet18(norm_layer=partial(group_norm, groups), num_classes=1)
        initial = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")  # torchvision's
        narrow_layers(network, _channels(network), width, groups, initial)
        super().__init__(network, inputs, classes, narrowed(network.fc.in_features, width, groups))
        if freeze:
            self.freeze("conv1", "bn1", "layer1")

    def _block(self, block: Any, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        shortcut = x if block.downsample is None else self._through(block.downsample, x, lengths)[0]
        y, after = self._chain([block.conv1, block.bn1, block.relu, block.conv2, block.bn2], x, lengths)
        return (y + shortcut).relu_(), after

    def channels(self) -> Channels:
        """Return what belongs to each stage's channels, and to the inner ones of each block."""
        return {**_channels(self), "output.weight": ((), ("layer4",))}


def _channels(network: nn.Module) -> dict[str, tuple[tuple[str, ...], ...]]:
    def convolution(path: str, norm: str, after: tuple[str, ...], before: tuple[str, ...]) -> None:
        found.update({f"{path}.weight": (after, before, (), ()), f"{norm}.weight": (after,), f"{norm}.bias": (after,)})

    found: dict[str, tuple[tuple[str, ...], ...]] = {}
    before: tuple[str, ...] = ("layer1",)
    convolution("conv1", "bn1", before, ())
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        after = (stage,)
        for number, block in enumerate(network.get_submodule(stage).children()):
            path = f"{stage}.{number}"
            convolution(f"{path}.conv1", f"{path}.bn1", (path,), before)
            convolution(f"{path}.conv2", f"{path}.bn2", after, (path,))
            if block.downsample is not None:
                convolution(f"{path}.downsample.0", f"{path}.downsample.1", after, before)
            before = after
    return found


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"resnet18": (ResNet18, {})}
