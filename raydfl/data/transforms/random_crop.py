"""Random crop: cut a random section out of each example."""

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
    """Cut a random section out of each example. Shorter clips are not padded."""

    kinds: ClassVar[tuple[str, ...]] = ("logmel", "kaldi", "file", "model", "image")

    size: Annotated[int, Field(ge=1, description="Frames of the section (images: its rows and columns).")]
    pad: Annotated[int, Field(ge=0, description="Images: padding on every side before the crop, in pixels.")] = 0
    pad_with: Annotated[
        Literal["zero", "black"],
        Field(
            description="Colour of the padding. zero: the mean of the normalised images. black: 0 before normalisation."
        ),
    ] = "zero"
    test: Annotated[
        Literal["centre", "segments"],
        Field(
            description="Crop of evaluation examples. centre: the central section. segments: consecutive sections from the "
            "start; their predictions are averaged."
        ),
    ] = "centre"
    stride: Annotated[
        int | None, Field(ge=1, description="Frames between the starts of consecutive segments. null: size.")
    ] = None

    def least(self) -> tuple[int, int]:
        """Require examples at least as large as the section, minus padding."""
        return max(1, self.size - 2 * self.pad), max(1, self.size - 2 * self.pad) if self.pad else 1

    def check(self, features: AnyFeatures) -> None:
        """Compare the options with the kind of features."""
        if features.kind == "image" and (self.test != "centre" or self.stride is not None):
            raise ConfigError(
                "test: segments and stride are for clips. Images always use the centre: remove both options."
            )
        if features.kind != "image" and self.pad:
            raise ConfigError("pad is for images. Remove it: clips shorter than size are not cropped.")
        if self.pad_with != "zero" and not self.pad:
            raise ConfigError("pad_with has no effect with pad: 0. Set pad, or remove pad_with.")
        if self.stride is not None and self.test != "segments":
            raise ConfigError("stride requires test: segments. Set test, or remove stride.")

    def draw_corners(self, rng: np.random.Generator, count: int, rows: int, columns: int) -> dict[str, np.ndarray]:
        """Draw the first row and column of the section of each of ``count`` images, in coordinates with padding."""
        bounds = {"top": rows + 2 * self.pad - self.size, "left": columns + 2 * self.pad - self.size}
        return {f"crop/{name}": rng.integers(0, free + 1, count) for name, free in bounds.items()}

    def cut_images(self, x: Tensor, drawn: Mapping[str, Tensor] | None, black: Tensor | None) -> Tensor:
        """Crop images to [..., images, channels, size, size].

        Args:
            x: images float32 [..., images, channels, rows, columns].
            drawn: values from :meth:`draw_corners`. ``None``: crop the centre.
            black: normalised black pixel, float32 [channels, 1, 1], for ``pad_with: black``.
        """
        margins = (self.pad, self.pad, self.pad, self.pad)
        pad = torch.nn.functional.pad
        x = (
            pad(x, margins) if black is None else pad(x - black, margins) + black
        )  # pad() has one value for all channels
        rows, columns = x.shape[-2:]
        steps = spectra.make_range(self.size, x.device)
        if drawn is None:
            top, left = (rows - self.size) // 2, (columns - self.size) // 2
            return x[..., top : top + self.size, left : left + self.size].contiguous()
        row_index = (drawn["crop/top"].unsqueeze(-1) + steps)[..., None, :, None]
        x = x.gather(-2, row_index.expand(*x.shape[:-2], self.size, columns))
        column_index = (drawn["crop/left"].unsqueeze(-1) + steps)[..., None, None, :]
        return x.gather(-1, column_index.expand(*x.shape[:-1], self.size))
