"""Random crop: a part of each example, at another place in every epoch."""

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
    """Part of an example, drawn anew for each batch; clips that are shorter stay whole."""

    kinds: ClassVar[tuple[str, ...]] = ("logmel", "kaldi", "file", "model", "image")

    size: Annotated[int, Field(ge=1, description="Frames of the part; of images its rows and columns.")]
    pad: Annotated[int, Field(ge=0, description="Of images: rows and columns put around each before it is cut.")] = 0
    pad_with: Annotated[
        Literal["zero", "black"],
        Field(description="What these are: zero after mean and deviation, so the mean; or black, zero before."),
    ] = "zero"
    test: Annotated[
        Literal["centre", "segments"],
        Field(
            description="What is cut of an example that is measured on. centre: its middle. segments: parts from its beginning on, "
            "of whose predictions the mean is taken."
        ),
    ] = "centre"
    stride: Annotated[
        int | None, Field(ge=1, description="Frames from one segment to the next. null: as long as a segment.")
    ] = None

    def least(self) -> tuple[int, int]:
        """See :class:`Transform`."""
        return max(1, self.size - 2 * self.pad), max(1, self.size - 2 * self.pad) if self.pad else 1

    def check(self, features: AnyFeatures) -> None:
        """See :class:`Transform`."""
        if features.kind == "image" and (self.test != "centre" or self.stride is not None):
            raise ConfigError("test: segments and stride are for clips; of images the middle is taken")
        if features.kind != "image" and self.pad:
            raise ConfigError("pad is for images; clips that are shorter than the part stay whole")
        if self.pad_with != "zero" and not self.pad:
            raise ConfigError("pad_with says what is put around images, and pad is 0; set pad, or leave pad_with out")
        if self.stride is not None and self.test != "segments":
            raise ConfigError("stride is for test: segments; leave it out")

    def corners(self, rng: np.random.Generator, count: int, rows: int, columns: int) -> dict[str, np.ndarray]:
        """Draw the first row and column of the part of each of ``count`` padded images."""
        bounds = {"top": rows + 2 * self.pad - self.size, "left": columns + 2 * self.pad - self.size}
        return {f"crop/{name}": rng.integers(0, free + 1, count) for name, free in bounds.items()}

    def cut_images(self, x: Tensor, drawn: Mapping[str, Tensor] | None, black: Tensor | None) -> Tensor:
        """Return the parts [..., images, channels, size, size] of images; their middles where nothing is drawn.

        Args:
            x: float32 [..., images, channels, rows, columns].
            drawn: see :meth:`corners`.
            black: float32 [channels, 1, 1]: what a pixel of 0 has become, where ``pad_with`` needs it.
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
