"""Flip: mirror images horizontally."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.data.transforms._transform import Transform


@dataclass(frozen=True, kw_only=True)
class Flip(Transform):
    """Mirror random images horizontally."""

    kinds: ClassVar[tuple[str, ...]] = ("image",)

    share: Annotated[float, Field(ge=0, le=1, description="Probability of a flip for each image.")] = 0.5

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw a mask of the images to flip: bool [examples]."""
        return {"flipped": rng.random(len(frames)) < self.share}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Flip the images in the mask."""
        return torch.where(drawn["flipped"][..., None, None, None], x.flip(-1), x)
