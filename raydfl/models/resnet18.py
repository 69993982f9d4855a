"""ResNet-18 of torchvision with group normalisation, for images and for log-mel features as images of one channel.

K. He, X. Zhang, S. Ren, J. Sun, Deep Residual Learning for Image Recognition, CVPR 2016, table 1, 18 layers. Group normalisation
(Y. Wu, K. He, Group Normalization, ECCV 2018) replaces batch normalisation, as in FedAPTA's code, because batch normalisation
makes examples of a client influence each other. Images of any size pass the first convolution, 7 x 7 with stride 2, and its
pooling. An image of 32 x 32 has a single position in the last block.

``norm: frozen_batch`` keeps batch normalisation with the constant statistics, scales and shifts of a file (``init_from``), as for a
pretrained network. Constant statistics do not depend on the examples of a batch.

The channels of a stage form a group, because its blocks add to them. The first convolution shares the group of layer1. The
inner channels of each block form a separate group.

Layers have torchvision's names (``bn1`` is a group normalisation) except the last layer, ``output``. The layers below it have
11,176,512 parameters, of which 11,010,048 belong to the convolutions of layer2 to layer4, pruned by FedAPTA.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.models._norm import FrozenBatchNorm
from raydfl.models._vision import Groups, VisionNetwork, group_norm, narrow_layers, torchvision_models
from raydfl.models._width import Channels, Width, scale_channels


class ResNet18(VisionNetwork):
    """Residual network for images or sequences of feature frames. With ``lengths``, outputs do not depend on padding."""

    def __init__(
        self,
        inputs: int | tuple[int, int, int],
        classes: int,
        groups: Groups = 2,
        freeze: bool = False,
        width: Width = 1.0,
        norm: Literal["group", "frozen_batch"] = "group",
    ) -> None:
        """Initialise the network.

        Args:
            inputs: channels (1 or 3), rows and columns of an image, or features of a frame.
            classes: number of outputs.
            groups: groups of channels in normalisations, a power of 2 up to 64.
            freeze: freeze the first convolution, its normalisation and layer1 at their initial weights. They are never sent.
            width: fraction of the channels, rounded up to multiples of ``groups``.
            norm: group: group normalisation. frozen_batch: batch normalisation with the constant values of ``init_from``,
                without effect if there is no file.

        Raises:
            ConfigError: torchvision is not installed, or the number of image channels or groups is not supported, or frozen
                batch normalisation would be narrowed.
        """
        if norm == "frozen_batch" and width != 1:
            raise ConfigError(
                f"norm: frozen_batch has statistics for all channels, but width is {width:g}. Set width to 1, or norm to group."
            )
        layer = FrozenBatchNorm if norm == "frozen_batch" else partial(group_norm, groups)
        network = torchvision_models().resnet18(norm_layer=layer, num_classes=1)
        initial = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")  # torchvision's initialisation
        narrow_layers(network, _channels(network), width, groups, initial)
        super().__init__(network, inputs, classes, scale_channels(network.fc.in_features, width, groups))
        if freeze:
            self.freeze("conv1", "bn1", "layer1")

    def _apply_block(self, block: Any, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        shortcut = x if block.downsample is None else self._apply_part(block.downsample, x, lengths)[0]
        y, after = self._apply_parts([block.conv1, block.bn1, block.relu, block.conv2, block.bn2], x, lengths)
        return (y + shortcut).relu_(), after

    def channels(self) -> Channels:
        """Return the groups of channels: the channels of each stage, and the inner channels of each block."""
        return {**_channels(self), "output.weight": ((), ("layer4",))}


def _channels(network: nn.Module) -> dict[str, tuple[tuple[str, ...], ...]]:
    def add_convolution(path: str, norm: str, after: tuple[str, ...], before: tuple[str, ...]) -> None:
        groups.update({f"{path}.weight": (after, before, (), ()), f"{norm}.weight": (after,), f"{norm}.bias": (after,)})

    groups: dict[str, tuple[tuple[str, ...], ...]] = {}
    before: tuple[str, ...] = ("layer1",)
    add_convolution("conv1", "bn1", before, ())
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        after = (stage,)
        for number, block in enumerate(network.get_submodule(stage).children()):
            path = f"{stage}.{number}"
            add_convolution(f"{path}.conv1", f"{path}.bn1", (path,), before)
            add_convolution(f"{path}.conv2", f"{path}.bn2", after, (path,))
            if block.downsample is not None:
                add_convolution(f"{path}.downsample.0", f"{path}.downsample.1", after, before)
            before = after
    return groups


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"resnet18": (ResNet18, {})}
