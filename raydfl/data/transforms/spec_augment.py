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

from raydfl.data.transforms._transform import Transform
from raydfl.data.transforms._values import places


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
        longest = np.minimum(np.floor(frames * self.share).astype(np.int64), self.frames)[:, None]
        lengths = rng.integers(0, longest + 1, (len(frames), self.frame_masks))
        widths = rng.integers(0, self.bands + 1, (len(frames), self.band_masks))
        return {
            "lengths": lengths,
            "firsts": rng.integers(0, frames[:, None] - lengths + 1),
            "widths": widths,
            "lowest": rng.integers(0, bands - widths + 1),
        }

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """See :class:`Transform`."""
        mean = x.sum(dim=(-2, -1)) / (frames.clamp_min(1) * x.shape[-1])
        frames_kept = _left(drawn["firsts"], drawn["lengths"], x.shape[-2]).unsqueeze(-1)
        kept = frames_kept * _left(drawn["lowest"], drawn["widths"], x.shape[-1]).unsqueeze(-2)
        return x.mul_(kept).addcmul_(1 - kept, mean[..., None, None])


def _left(first: Tensor, length: Tensor, size: int) -> Tensor:
    """Return which of ``size`` places no mask covers: float32 [..., size], 1 or 0."""
    place = places(size, first.device)
    first = first.unsqueeze(-1)
    return ((place < first) | (place >= first + length.unsqueeze(-1))).all(dim=-2).float()
