"""Vision: the common part of torchvision's networks: images or features in, group normalisation, padding that is not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.ops import Conv2d
from raydfl.models._norm import GroupNorm, inside_of
from raydfl.models._width import Channels, narrowed

COLOURS = 3
"""Channels that the first convolution sees."""

Groups = Annotated[int, Field(ge=1)]


class VisionNetwork(nn.Module):
    """A network of torchvision's for images, or for features as images of one channel; its layers have torchvision's names.

    One channel is repeated for the first convolution, which is thus torchvision's for any data, and fits its weights.
    """

    images: ClassVar[bool | None] = None

    def __init__(
        self, network: nn.Module, inputs: int | tuple[int, int, int], classes: int, inputs_of_last: int | None = None
    ) -> None:
        """Take the layers of ``network``, in their order, but for its last, ``fc``.

        Args:
            network: torchvision's, with group normalisation.
            inputs: channels (1 or 3), rows and columns of an image; features of a frame.
            classes: outputs.
            inputs_of_last: channels that the last layer sees; ``None``: those of ``fc``.

        Raises:
            ConfigError: images of another number of channels.
        """
        super().__init__()
        if isinstance(inputs, tuple) and inputs[0] not in (1, COLOURS):
            raise ConfigError(
                f"images of {inputs[0]} channels; one (grey, which is repeated) or {COLOURS} can be taken"
            )
        self.steps: list[str] = []
        for name, part in network.named_children():
            if not isinstance(part, nn.Linear | nn.AdaptiveAvgPool2d):
                for layer in part.modules():
                    if type(layer) is nn.Conv2d:
                        layer.__class__ = Conv2d  # the same layer, with raydfl's operator
                self.add_module(name, part)
                self.steps.append(name)
            elif isinstance(part, nn.Linear):
                self.output = nn.Linear(inputs_of_last or part.in_features, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits float32 [batch, classes]; see :meth:`embed` for the arguments."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the mean over what is left of rows and columns: float32 [batch, channels of the last convolution].

        Args:
            x: images, float32 [batch, channels, rows, columns]; or features, float32 [batch, frames, inputs].
            lengths: of features, int64 [batch]: frames that count; ``None``: all.
        """
        if x.ndim == 3:
            x = x.unsqueeze(1)
        if lengths is not None:
            x = x * inside_of(x.squeeze(1), lengths).movedim(-1, 1)
        x = x.expand(-1, COLOURS, -1, -1)
        x, lengths = self._chain([getattr(self, name) for name in self.steps], x, lengths)
        if lengths is None:
            return x.mean(dim=(2, 3))
        return x.mean(dim=3).sum(dim=2) / lengths.clamp_min(1).unsqueeze(1)

    def freeze(self, *names: str) -> None:
        """Let these parts keep their first weights: nothing trains them, and nobody sends them."""
        for name in names:
            getattr(self, name).requires_grad_(False)

    def _through(self, part: nn.Module, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what a part makes of x [batch, channels, frames, bands], and the frames of that that count.

        Args:
            lengths: int64 [batch]: frames that count, where x is not 0 beyond them; ``None``: all do.
        """
        if isinstance(part, GroupNorm):
            return part(x, lengths), lengths
        if isinstance(part, nn.Conv2d | nn.MaxPool2d):
            # Nothing is below 0 after ReLU, so padding is never the maximum. All kernels are odd: a frame of the result counts
            # where the frame in the kernel's middle does.
            stride = part.stride if isinstance(part.stride, int) else part.stride[0]
            x = part(x)
            if lengths is None:
                return x, None
            lengths = (lengths + stride - 1) // stride
            if isinstance(
                part, nn.MaxPool2d
            ):  # which sees frames that count from the first that does not; norms leave 0 there
                x = x * inside_of(x.movedim(1, -1), lengths).movedim(-1, 1)
            return x, lengths
        if isinstance(part, nn.Sequential):
            return self._chain([*part], x, lengths)
        return self._block(part, x, lengths) if [*part.children()] else (part(x), lengths)

    def _chain(self, parts: Sequence[nn.Module], x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what some parts make of x one after another; see :meth:`_through`."""
        for before, part, after in zip((None, *parts), parts, (*parts[1:], None), strict=False):
            if isinstance(part, GroupNorm) and isinstance(after, nn.ReLU):
                x = part(x, lengths, relu=True)
            elif not (isinstance(before, GroupNorm) and isinstance(part, nn.ReLU)):
                x, lengths = self._through(part, x, lengths)
        return x, lengths

    def _block(self, block: Any, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what a block of the network makes of x: its ``forward``, written with :meth:`_chain`."""
        raise NotImplementedError


def narrow_layers(
    network: nn.Module,
    channels: Channels,
    width: float,
    multiple: int,
    initial: Callable[[Tensor], object] | None = None,
) -> None:
    """Put narrower convolutions and normalisations in the place of a network's; with a width of 1 leave it as it is.

    Args:
        network: to be changed.
        channels: which groups of channels are in its tensors; see :mod:`raydfl.models._width`.
        width: share of the channels of each group, rounded up.
        multiple: of which their number must be one.
        initial: draws a convolution's first weights in their place; ``None``: as PyTorch does.
    """
    if width == 1:
        return
    for path, layer in [*network.named_modules()]:
        of_outputs, *others = channels.get(f"{path}.weight", ((),))
        if isinstance(layer, nn.GroupNorm) and of_outputs:
            fewer: nn.Module = GroupNorm(layer.num_groups, narrowed(layer.num_channels, width, multiple))
        elif isinstance(layer, nn.Conv2d) and (of_outputs or any(others)):
            outputs = narrowed(layer.out_channels, width, multiple) if of_outputs else layer.out_channels
            each_by_itself = layer.groups > 1
            inputs = narrowed(layer.in_channels, width, multiple) if others[0] else layer.in_channels
            fewer = nn.Conv2d(
                outputs if each_by_itself else inputs,
                outputs,
                layer.kernel_size,  # type: ignore[arg-type]  # it has two numbers
                layer.stride,  # type: ignore[arg-type]
                layer.padding,  # type: ignore[arg-type]
                groups=outputs if each_by_itself else 1,
                bias=layer.bias is not None,
            )
            if initial is not None:
                initial(fewer.weight)
        else:
            continue
        network.set_submodule(path, fewer)


def group_norm(groups: int, channels: int) -> GroupNorm:
    """Return a fresh normalisation over so many groups of channels.

    Raises:
        ConfigError: the channels cannot be divided so.
    """
    if channels % groups:
        raise ConfigError(f"groups is {groups}, and {channels} channels make no {groups} equal groups; take 1 or 2")
    return GroupNorm(groups, channels)


def torchvision_models() -> ModuleType:
    """Return ``torchvision.models``.

    Raises:
        ConfigError: torchvision is not installed.
    """
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another PyTorch
        raise ConfigError(
            f"this network is torchvision's, which cannot be imported ({error}): pip install 'raydfl[vision]'"
        ) from error
    module: ModuleType = models
    return module
