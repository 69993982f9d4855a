"""Random crop: cut a random part of each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.core.ops import spectra
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.transforms._transform import Transform


@dataclass(frozen=True, kw_only=True)
class RandomCrop(Transform):
    """Cut a random part of each example. Shorter clips stay whole."""

    kinds: ClassVar[tuple[str, ...]] = ("logmel", "kaldi", "file", "model", "image")

    size: Annotated[int, Field(ge=1, description="Length of the part in frames, or its side in pixels for images.")]
    pad: Annotated[int, Field(ge=0, description="Pixels added on each side of an image before cropping.")] = 0
    pad_with: Annotated[
        Literal["zero", "black"],
        Field(
            description="Value of the added pixels. zero: 0 after normalisation (the mean). black: 0 before normalisation."
        ),
    ] = "zero"
    test: Annotated[
        Literal["centre", "segments"],
        Field(
            description="Crop for evaluation. centre: the middle. segments: consecutive parts; their predictions are averaged."
        ),
    ] = "centre"
    stride: Annotated[
        int | None, Field(ge=1, description="Frames between the starts of two segments. null: the length of a segment.")
    ] = None

    def least(self) -> tuple[int, int]:
        """Return the smallest supported example."""
        return max(1, self.size - 2 * self.pad), max(1, self.size - 2 * self.pad) if self.pad else 1

    def check(self, features: AnyFeatures) -> None:
        """Reject options without effect on the features."""
        if features.kind == "image" and (self.test != "centre" or self.stride is not None):
            raise ConfigError(
                "test: segments and stride apply to clips only. Remove them: images are cropped at the centre."
            )
        if features.kind != "image" and self.pad:
            raise ConfigError("pad is for images, because shorter clips stay whole. Remove pad.")
        if self.pad_with != "zero" and not self.pad:
            raise ConfigError("pad_with has no effect, because pad is 0. Set pad, or remove pad_with.")
        if self.stride is not None and self.test != "segments":
            raise ConfigError("stride applies to test: segments only. Remove stride, or set test to segments.")

    def corners(self, rng: np.random.Generator, count: int, rows: int, columns: int) -> dict[str, np.ndarray]:
        """Draw the first row and the first column of the part of ``count`` padded images, int64 [count]."""
        bounds = {"top": rows + 2 * self.pad - self.size, "left": columns + 2 * self.pad - self.size}
        return {f"crop/{name}": rng.integers(0, free + 1, count) for name, free in bounds.items()}

    def cut_images(self, x: Tensor, drawn: Mapping[str, Tensor] | None, black: Tensor | None) -> Tensor:
        """Cut parts [..., images, channels, size, size] out of images. Without ``drawn``, cut the middle.

        Args:
            x: images, float32 [..., images, channels, rows, columns].
            drawn: random numbers from :meth:`corners`.
            black: normalised value of a black pixel, float32 [channels, 1, 1], for ``pad_with: black``.
        """
        around = (self.pad, self.pad, self.pad, self.pad)
        pad = torch.nn.functional.pad
        x = pad(x, around) if black is None else pad(x - black, around) + black
        rows, columns = x.shape[-2:]
        steps = spectra.places(self.size, x.device)
        if drawn is None:
            top, left = (rows - self.size) // 2, (columns - self.size) // 2
            return x[..., top : top + self.size, left : left + self.size].contiguous()
        below = (drawn["crop/top"].unsqueeze(-1) + steps)[..., None, :, None]
        x = x.gather(-2, below.expand(*x.shape[:-2], self.size, columns))
        beside = (drawn["crop/left"].unsqueeze(-1) + steps)[..., None, None, :]
        return x.gather(-1, beside.expand(*x.shape[:-1], self.size))
