"""SpecAugment: mask random ranges of frames and bands.

D. S. Park, W. Chan, Y. Zhang, C.-C. Chiu, B. Zoph, E. D. Cubuk, Q. V. Le, SpecAugment: A Simple Data Augmentation Method for
Automatic Speech Recognition, Interspeech 2019, section 2: time masking and frequency masking. Time warping is not implemented,
because it had the smallest effect in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import spectra
from raydfl.data.transforms._transform import Transform


@dataclass(frozen=True, kw_only=True)
class SpecAugment(Transform):
    """Set random ranges of frames and bands to the mean of the example."""

    frames: Annotated[int, Field(ge=0, description="Largest length of a mask in frames. Uniform from 0.")] = 20
    frame_masks: Annotated[int, Field(ge=0, le=100, description="Number of frame masks in each example.")] = 2
    share: Annotated[
        float,
        Field(gt=0, le=1, description="Largest length of a mask as a fraction of the example's frames. 1: no limit."),
    ] = 1.0
    bands: Annotated[int, Field(ge=0, description="Largest width of a mask in bands. Uniform from 0.")] = 8
    band_masks: Annotated[int, Field(ge=0, le=100, description="Number of band masks in each example.")] = 2

    def least(self) -> tuple[int, int]:
        """Require examples as large as the largest masks."""
        return self.frames if self.frame_masks else 1, self.bands if self.band_masks else 1

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw the first frames (bands) and lengths of the masks, int64 [examples, masks]."""
        longest = np.minimum(np.floor(frames * self.share), self.frames)[:, None]
        share = rng.random((2, len(frames), self.frame_masks + self.band_masks))
        # Rounding down is faster than rng.integers with bounds for each example, and uniform to 1e-13.
        lengths = (share[0, :, : self.frame_masks] * (longest + 1)).astype(np.int64)
        widths = (share[0, :, self.frame_masks :] * (self.bands + 1)).astype(np.int64)
        return {
            "lengths": lengths,
            "firsts": (share[1, :, : self.frame_masks] * (frames[:, None] - lengths + 1)).astype(np.int64),
            "widths": widths,
            "lowest": (share[1, :, self.frame_masks :] * (bands - widths + 1)).astype(np.int64),
        }

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Set the masked ranges to the mean of the example."""
        masks = (drawn[name] for name in ("firsts", "lengths", "lowest", "widths"))
        return spectra.mask(x, frames, *masks)
