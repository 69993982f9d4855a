"""SpecAugment: stretches of frames and of bands are masked.

D. S. Park, W. Chan, Y. Zhang, C.-C. Chiu, B. Zoph, E. D. Cubuk, Q. V. Le, SpecAugment: A Simple Data Augmentation Method for
Automatic Speech Recognition, Interspeech 2019, section 2: time masking and frequency masking. Its time warping, which the
authors found to matter least, is left out.
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
    """Stretches of frames and of bands get the mean of the example."""

    frames: Annotated[int, Field(ge=0, description="Most frames of a mask; its length is drawn from 0 to that.")] = 20
    frame_masks: Annotated[int, Field(ge=0, le=100, description="Masks of frames in each example.")] = 2
    share: Annotated[
        float, Field(gt=0, le=1, description="Largest share of an example's frames that one mask covers.")
    ] = 1.0
    bands: Annotated[int, Field(ge=0, description="Most bands of a mask; its width is drawn from 0 to that.")] = 8
    band_masks: Annotated[int, Field(ge=0, le=100, description="Masks of bands in each example.")] = 2

    def least(self) -> tuple[int, int]:
        """See :class:`Transform`."""
        return self.frames if self.frame_masks else 1, self.bands if self.band_masks else 1

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """See :class:`Transform`: first frames (bands) and lengths of masks, int64 [examples, masks]."""
        longest = np.minimum(np.floor(frames * self.share), self.frames)[:, None]
        share = rng.random((2, len(frames), self.frame_masks + self.band_masks))
        # Rounded down, which is faster than integers between bounds of each example's own, and as even to 1e-13.
        lengths = (share[0, :, : self.frame_masks] * (longest + 1)).astype(np.int64)
        widths = (share[0, :, self.frame_masks :] * (self.bands + 1)).astype(np.int64)
        return {
            "lengths": lengths,
            "firsts": (share[1, :, : self.frame_masks] * (frames[:, None] - lengths + 1)).astype(np.int64),
            "widths": widths,
            "lowest": (share[1, :, self.frame_masks :] * (bands - widths + 1)).astype(np.int64),
        }

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """See :class:`Transform`."""
        masks = (drawn[name] for name in ("firsts", "lengths", "lowest", "widths"))
        return spectra.mask(x, frames, *masks)
