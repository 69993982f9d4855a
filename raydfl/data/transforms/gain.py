"""Gain: make examples louder or softer."""

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
    """Multiply the power of each example by a random factor."""

    power: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("logmel",)

    db: Annotated[Range, Field(description="Lower and upper limit of the gain in dB. Uniform in between.")] = (
        -6.0,
        6.0,
    )

    def check(self, features: AnyFeatures) -> None:
        """Check that normalisation does not cancel the gain."""
        if features.normalise == "clip":
            raise ConfigError(
                "data.features.normalise: clip cancels every gain, so that gain has no effect. Remove gain, or set "
                "data.features.normalise to none."
            )

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw the factor on power, float32 [examples]."""
        return {"factor": (10 ** (rng.uniform(*self.db, len(frames)) / 10)).astype(np.float32)}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Multiply the power by the factor."""
        return x.mul_(drawn["factor"][..., None, None])
