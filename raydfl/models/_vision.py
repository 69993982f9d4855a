"""Base class of torchvision networks for images or features, with normalisations that support padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.ops import Conv2d
from raydfl.models._norm import FrozenBatchNorm, GroupNorm, mask_frames
from raydfl.models._width import Channels, scale_channels

COLOURS = 3
"""Input channels of the first convolution."""

Groups = Annotated[int, Field(ge=1)]
_NORMS = (GroupNorm, FrozenBatchNorm)


class VisionNetwork(nn.Module):
    """A torchvision network for images, or for features as images of one channel. Layers keep torchvision's names.

    A single channel is repeated, so the first convolution always has torchvision's shape and accepts its weights.
    """

    images: ClassVar[bool | None] = None

    def __init__(
        self, network: nn.Module, inputs: int | tuple[int, int, int], classes: int, inputs_of_last: int | None = None
    ) -> None:
        """Adopt all layers of ``network`` except its last layer ``fc``.

        Args:
            network: torchvision's network with the normalisations of :mod:`raydfl.models._norm`.
            inputs: channels (1 or 3), rows and columns of an image, or features of a frame.
            classes: number of outputs.
            inputs_of_last: input channels of the last layer. ``None``: as in ``fc``.

        Raises:
            ConfigError: images have neither 1 nor 3 channels.
        """
        super().__init__()
        if isinstance(inputs, tuple) and inputs[0] not in (1, COLOURS):
            raise ConfigError(
                f"images have {inputs[0]} channels, but the network needs 1 (grey) or {COLOURS}. Convert the images."
            )
        # embed() replaces the global pooling, because it has to ignore padding.
        self.steps: list[str] = []
        for name, part in network.named_children():
            if not isinstance(part, nn.Linear | nn.AdaptiveAvgPool2d):
                for layer in part.modules():
                    if type(layer) is nn.Conv2d:
                        layer.__class__ = Conv2d  # use raydfl's operator
                self.add_module(name, part)
                self.steps.append(name)
            elif isinstance(part, nn.Linear):
                self.output = nn.Linear(inputs_of_last or part.in_features, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits float32 [batch, classes] from the arguments of :meth:`embed`."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Average the last convolution over rows and columns: float32 [batch, channels of the last convolution].

        Args:
            x: images, float32 [batch, channels, rows, columns], or features, float32 [batch, frames, inputs].
            lengths: int64 [batch], number of valid frames of features. ``None``: all.
        """
        if x.ndim == 3:
            x = x.unsqueeze(1)
        if lengths is not None:
            x = x * mask_frames(x.squeeze(1), lengths).movedim(-1, 1)
        x = x.expand(-1, COLOURS, -1, -1)  # repeats a single channel
        x, lengths = self._apply_parts([getattr(self, name) for name in self.steps], x, lengths)
        if lengths is None:
            return x.mean(dim=(2, 3))
        return x.mean(dim=3).sum(dim=2) / lengths.clamp_min(1).unsqueeze(1)

    def freeze(self, *names: str) -> None:
        """Freeze these submodules at their initial weights. Frozen tensors are neither trained nor sent."""
        for name in names:
            getattr(self, name).requires_grad_(False)

    def _apply_part(self, part: nn.Module, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Apply a submodule.

        Args:
            part: the submodule.
            x: [batch, channels, frames, bands], 0 in padding.
            lengths: int64 [batch], number of valid frames. ``None``: all.

        Returns:
            The output, and its number of valid frames.
        """
        if isinstance(part, _NORMS):
            return part(x, lengths), lengths
        if isinstance(part, nn.Conv2d | nn.MaxPool2d):
            # After ReLU no value is below 0, so padding is never the maximum. All kernels are odd, so an output frame is valid
            # if the centre of its kernel is.
            stride = part.stride if isinstance(part.stride, int) else part.stride[0]
            x = part(x)
            if lengths is None:
                return x, None
            lengths = (lengths + stride - 1) // stride
            if isinstance(part, nn.MaxPool2d):  # pooling copies valid frames into the padding
                x = x * mask_frames(x.movedim(1, -1), lengths).movedim(-1, 1)
            return x, lengths
        if isinstance(part, nn.Sequential):
            return self._apply_parts([*part], x, lengths)
        return self._apply_block(part, x, lengths) if [*part.children()] else (part(x), lengths)

    def _apply_parts(
        self, parts: Sequence[nn.Module], x: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply submodules in sequence by :meth:`_apply_part`. Normalisation and ReLU form a single operation."""
        for before, part, after in zip((None, *parts), parts, (*parts[1:], None), strict=False):
            if isinstance(part, _NORMS) and isinstance(after, nn.ReLU):
                x = part(x, lengths, relu=True)
            elif not (isinstance(before, _NORMS) and isinstance(part, nn.ReLU)):
                x, lengths = self._apply_part(part, x, lengths)
        return x, lengths

    def _apply_block(self, block: Any, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Apply a block of the network: its ``forward``, written with :meth:`_apply_parts`."""
        raise NotImplementedError


def narrow_layers(
    network: nn.Module,
    channels: Channels,
    width: float,
    multiple: int,
    initial: Callable[[Tensor], object] | None = None,
) -> None:
    """Replace the convolutions and normalisations of a network by narrower layers, unless ``width`` is 1.

    Args:
        network: the network, changed in place.
        channels: its groups of channels, as in :mod:`raydfl.models._width`.
        width: fraction of the channels of each group, rounded up.
        multiple: divisor of the number of channels.
        initial: function that initialises the weights of a convolution in place. ``None``: PyTorch's default.
    """
    if width == 1:
        return
    for path, layer in [*network.named_modules()]:
        output_groups, *input_groups = channels.get(f"{path}.weight", ((),))
        if isinstance(layer, nn.GroupNorm) and output_groups:
            narrower: nn.Module = GroupNorm(layer.num_groups, scale_channels(layer.num_channels, width, multiple))
        elif isinstance(layer, nn.Conv2d) and (output_groups or any(input_groups)):
            outputs = scale_channels(layer.out_channels, width, multiple) if output_groups else layer.out_channels
            depthwise = layer.groups > 1
            inputs = scale_channels(layer.in_channels, width, multiple) if input_groups[0] else layer.in_channels
            narrower = nn.Conv2d(
                outputs if depthwise else inputs,
                outputs,
                layer.kernel_size,  # type: ignore[arg-type]  # always a pair
                layer.stride,  # type: ignore[arg-type]
                layer.padding,  # type: ignore[arg-type]
                groups=outputs if depthwise else 1,
                bias=layer.bias is not None,
            )
            if initial is not None:
                initial(narrower.weight)
        else:
            continue
        network.set_submodule(path, narrower)


def group_norm(groups: int, channels: int) -> GroupNorm:
    """Build a group normalisation.

    Raises:
        ConfigError: the number of channels is not a multiple of ``groups``.
    """
    if channels % groups:
        raise ConfigError(f"groups is {groups}, which does not divide {channels} channels. Set groups to 1 or 2.")
    return GroupNorm(groups, channels)


def torchvision_models() -> ModuleType:
    """Import ``torchvision.models``.

    Raises:
        ConfigError: torchvision is not installed.
    """
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another version of PyTorch
        raise ConfigError(
            f"this network needs torchvision, which cannot be imported ({error}). Run: pip install 'raydfl[vision]'"
        ) from error
    module: ModuleType = models
    return module
