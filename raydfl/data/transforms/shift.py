"""Shift: rotate examples in time."""

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
class Shift(Transform):
    """Shift the frames of an example by a random number, wrapping around at the ends."""

    frames: Annotated[
        int, Field(ge=0, description="Largest shift in frames, in both directions. Uniform in between. 0: no shift.")
    ] = 10

    def least(self) -> tuple[int, int]:
        """Require more frames than the largest shift."""
        return self.frames + 1, 1

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw the shift of each example in frames, int64 [examples]."""
        return {"by": rng.integers(-self.frames, self.frames + 1, len(frames))}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Rotate the frames of each example, without its padding."""
        position = spectra.make_range(x.shape[-2], x.device)
        source = (position - drawn["by"].unsqueeze(-1)) % frames.clamp_min(1).unsqueeze(-1)
        return x.gather(-2, source.unsqueeze(-1).expand(x.shape))
