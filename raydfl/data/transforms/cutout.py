"""Cutout: set a square of each example to 0.

T. DeVries, G. W. Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, arXiv:1708.04552, section 3. The
centre of the square is drawn uniformly, so that part of the square may be outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import spectra
from raydfl.data.transforms._transform import Transform


@dataclass(frozen=True, kw_only=True)
class Cutout(Transform):
    """Set a random square of an image, or of frames and bands, to 0."""

    kinds: ClassVar[tuple[str, ...]] = ("logmel", "kaldi", "file", "model", "image")

    size: Annotated[int, Field(ge=1, description="Rows and columns of the square (features: frames and bands).")]

    def least(self) -> tuple[int, int]:
        """Require at least as many frames as the square."""
        return self.size, 1

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw the row and column of the square's centre, int64 [examples]."""
        return {"row": rng.integers(0, frames), "column": rng.integers(0, bands, len(frames))}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Set the square to 0."""
        rows, columns = (
            _mask_around(drawn[name], self.size, size) for name, size in (("row", x.shape[-2]), ("column", x.shape[-1]))
        )
        square = rows.unsqueeze(-1) & columns.unsqueeze(-2)
        return x.masked_fill(square.unsqueeze(-3) if x.ndim > frames.ndim + 2 else square, 0.0)


def _mask_around(centre: Tensor, length: int, size: int) -> Tensor:
    """Return a mask of ``length`` positions around each centre: bool [..., size]."""
    first = (centre - length // 2).unsqueeze(-1)
    position = spectra.make_range(size, centre.device)
    return (position >= first) & (position < first + length)
