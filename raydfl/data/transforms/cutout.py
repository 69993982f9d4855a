"""Cutout: a square of each example is 0.

T. DeVries, G. W. Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, arXiv:1708.04552, section 3: the
middle of the square is drawn evenly among all places, so that a part of it may lie outside.
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
    """A square of an image, or as many frames and bands, becomes 0."""

    kinds: ClassVar[tuple[str, ...]] = ("logmel", "kaldi", "file", "model", "image")

    size: Annotated[int, Field(ge=1, description="Rows and columns of the square; of features its frames and bands.")]

    def least(self) -> tuple[int, int]:
        """See :class:`Transform`."""
        return self.size, 1

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """See :class:`Transform`: row and column of the square's middle, int64 [examples]."""
        return {"row": rng.integers(0, frames), "column": rng.integers(0, bands, len(frames))}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """See :class:`Transform`."""
        rows, columns = (
            _within(drawn[name], self.size, size) for name, size in (("row", x.shape[-2]), ("column", x.shape[-1]))
        )
        square = rows.unsqueeze(-1) & columns.unsqueeze(-2)
        return x.masked_fill(square.unsqueeze(-3) if x.ndim > frames.ndim + 2 else square, 0.0)


def _within(middle: Tensor, length: int, size: int) -> Tensor:
    """Return which of ``size`` places lie in a stretch of that length around the middle: bool [..., size]."""
    first = (middle - length // 2).unsqueeze(-1)
    place = spectra.places(size, middle.device)
    return (place >= first) & (place < first + length)
