"""Shift: an example begins earlier or later."""

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
    """Frames move to later or earlier places; what is moved out at one end comes in at the other."""

    frames: Annotated[
        int, Field(ge=0, description="Most frames of a shift; it is drawn evenly from minus that to plus that.")
    ] = 10

    def least(self) -> tuple[int, int]:
        """See :class:`Transform`."""
        return self.frames + 1, 1

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """See :class:`Transform`: frames by which it moves, int64 [examples]."""
        return {"by": rng.integers(-self.frames, self.frames + 1, len(frames))}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """See :class:`Transform`."""
        place = spectra.places(x.shape[-2], x.device)
        source = (place - drawn["by"].unsqueeze(-1)) % frames.clamp_min(1).unsqueeze(-1)
        return x.gather(-2, source.unsqueeze(-1).expand(x.shape))
