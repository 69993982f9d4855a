"""Flip: an image's mirror image."""

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
    """Left and right are exchanged."""

    kinds: ClassVar[tuple[str, ...]] = ("image",)

    share: Annotated[float, Field(ge=0, le=1, description="Share of the images that are flipped, drawn anew.")] = 0.5

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """See :class:`Transform`: bool [examples]."""
        return {"flipped": rng.random(len(frames)) < self.share}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """See :class:`Transform`."""
        return torch.where(drawn["flipped"][..., None, None, None], x.flip(-1), x)
