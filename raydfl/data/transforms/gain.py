"""Gain: an example is louder or softer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.transforms._transform import Transform
from raydfl.data.transforms._values import Range


@dataclass(frozen=True, kw_only=True)
class Gain(Transform):
    """A factor on an example's power."""

    power: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("logmel",)

    db: Annotated[Range, Field(description="Lowest and highest gain in dB, between which it is drawn evenly.")] = (
        -6.0,
        6.0,
    )

    def check(self, features: AnyFeatures) -> None:
        """See :class:`Transform`: a z-score of the clip takes every gain back."""
        if features.normalise == "clip":
            raise ConfigError(
                "data.features.normalise: clip takes any gain back, so it would change nothing; leave it out, or take "
                "normalise none"
            )

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """See :class:`Transform`: the factor on power, float32 [examples]."""
        return {"factor": (10 ** (rng.uniform(*self.db, len(frames)) / 10)).astype(np.float32)}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """See :class:`Transform`."""
        return x.mul_(drawn["factor"][..., None, None])
