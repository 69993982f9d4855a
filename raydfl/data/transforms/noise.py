"""Noise: background noise, white or from recordings, at a random signal-to-noise ratio.

The noise is added to the power in mel bands. On average, the power of a sum of two independent signals is the sum of their
powers. The added power is computed from real noise and fluctuates from frame to frame. The cross term of the two signals, with
mean 0, is neglected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import spectra
from raydfl.core.seeds import generator
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.transforms._recordings import load_waves, make_power_extractor
from raydfl.data.transforms._transform import Transform
from raydfl.data.transforms._values import Range

_WHITE_S = 10.0
_LONGEST_S = 600.0
"""Largest total duration of the recordings of noise in seconds. Further recordings are ignored."""


@dataclass(frozen=True, kw_only=True)
class Noise(Transform):
    """Add background noise. The signal-to-noise ratio compares mean powers, summed over the bands."""

    power: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("logmel",)

    snr_db: Annotated[
        Range, Field(description="Lower and upper limit of the signal-to-noise ratio in dB. Uniform in between.")
    ] = (0.0, 20.0)
    share: Annotated[float, Field(ge=0, le=1, description="Probability of noise for each example. 0: no noise.")] = 1.0
    folder: Annotated[
        Path | None,
        Field(
            description="Folder of noise recordings. Each example gets a random excerpt. Only the first 10 minutes are used. "
            "null: white noise."
        ),
    ] = None

    def table(self, features: AnyFeatures, seed: int) -> np.ndarray:
        """Compute the power of the noise in bands: float32 [frames, bands], with a mean frame power of 1."""
        assert isinstance(features, FeatureSettings)  # noqa: S101 - ensured by kinds
        extractor = make_power_extractor(features)
        samples = round(_WHITE_S * features.sample_rate)
        waves: list[np.ndarray] = []
        if self.folder is None:
            white = generator(seed, 0, "", "transform/noise").standard_normal(samples, dtype=np.float32)
            waves.append(0.1 * white)  # any level serves: the power is scaled to 1 below
        else:
            for wave in load_waves(self.folder, extractor, "the noise of data.transforms"):
                waves.append(wave / max(float(np.sqrt(np.mean(np.square(wave)))), 1e-9))
                if sum(map(len, waves)) > _LONGEST_S * features.sample_rate:
                    break
        logarithms = np.concatenate([extractor.features(wave) for wave in waves])
        power = np.exp(logarithms / features.log_power_factor).astype(np.float32)
        scaled: np.ndarray = (power / power.sum(axis=1).mean()).astype(np.float32)
        return scaled

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw the ratio of noise power to signal power, float32 [examples], and the first frame of the excerpt."""
        assert table is not None  # noqa: S101
        noisy = rng.random(len(frames)) < self.share
        ratio = 10 ** (-rng.uniform(*self.snr_db, len(frames)) / 10)
        return {
            "ratio": np.where(noisy, ratio, 0.0).astype(np.float32),
            "first": rng.integers(0, len(table), len(frames)),
        }

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Add the scaled noise."""
        assert table is not None  # noqa: S101
        return spectra.add_noise(x, frames, table, drawn["first"], drawn["ratio"])
