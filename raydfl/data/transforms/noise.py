"""Noise: white noise or recordings of noise in the background, at a drawn signal-to-noise ratio.

It is added to the power in mel bands: the power of a sum of two signals that have nothing to do with each other is, on average, the
sum of their powers. Noise that is drawn here is real noise's power, with its fluctuations from frame to frame; what is left out is
the product of the two signals, whose mean is 0.
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
from raydfl.data.transforms._recordings import extractor_of_power, power_of, waves_in
from raydfl.data.transforms._transform import Transform
from raydfl.data.transforms._values import Range

_WHITE_S = 10.0
_LONGEST_S = 600.0
"""Limit for all recordings of noise together; what comes after it is not used."""


@dataclass(frozen=True, kw_only=True)
class Noise(Transform):
    """Noise in the background. The ratio is that of mean powers, summed over the bands."""

    power: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("logmel",)

    snr_db: Annotated[
        Range, Field(description="Lowest and highest signal-to-noise ratio in dB, between which it is drawn evenly.")
    ] = (0.0, 20.0)
    share: Annotated[float, Field(ge=0, le=1, description="Share of the examples that get noise, drawn anew.")] = 1.0
    folder: Annotated[
        Path | None,
        Field(description="Recordings of noise, of which a stretch is drawn; at most 10 minutes. null: white noise."),
    ] = None

    def table(self, features: AnyFeatures, seed: int) -> np.ndarray:
        """See :class:`Transform`: the power in bands, float32 [frames, bands]; mean of a frame's sum: 1."""
        assert isinstance(features, FeatureSettings)  # noqa: S101 - see kinds
        extractor = extractor_of_power(features)
        samples = round(_WHITE_S * features.sample_rate)
        waves: list[np.ndarray] = []
        if self.folder is None:
            white = generator(seed, 0, "", "transform/noise").standard_normal(samples, dtype=np.float32)
            waves.append(0.1 * white)
        else:
            for wave in waves_in(self.folder, extractor, "the noise of data.transforms"):
                waves.append(wave / max(float(np.sqrt(np.mean(np.square(wave)))), 1e-9))
                if sum(map(len, waves)) > _LONGEST_S * features.sample_rate:
                    break
        power = np.concatenate([power_of(features, extractor.features(wave)) for wave in waves])
        scaled: np.ndarray = (power / power.sum(axis=1).mean()).astype(np.float32)
        return scaled

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """See :class:`Transform`: power of noise to that of the signal float32 [examples]; the noise's first frame."""
        assert table is not None  # noqa: S101
        noisy = rng.random(len(frames)) < self.share
        ratio = 10 ** (-rng.uniform(*self.snr_db, len(frames)) / 10)
        return {
            "ratio": np.where(noisy, ratio, 0.0).astype(np.float32),
            "first": rng.integers(0, len(table), len(frames)),
        }

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """See :class:`Transform`."""
        assert table is not None  # noqa: S101
        return spectra.add_noise(x, frames, table, drawn["first"], drawn["ratio"])
