"""Reverberation: simulate rooms by impulse responses or an exponential decay.

The power of each frame and band is spread over the following frames, in proportion to the energy of the impulse response.
Details of the response within a frame are neglected. An example keeps its power, except for reverberation beyond its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import DataError
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.transforms._recordings import load_waves, make_power_extractor
from raydfl.data.transforms._transform import Transform
from raydfl.data.transforms._values import Range

_LOUDNESS_DB = 60.0
"""Decay of the sound level within the reverberation time."""
_LONGEST_S = 3.0


def _check_times(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= value[0] <= value[1] <= _LONGEST_S:
        raise ValueError(f"reverberation times must be in ascending order, from 0 to {_LONGEST_S:g} s")
    return value


@dataclass(frozen=True, kw_only=True)
class Reverberation(Transform):
    """Add the reverberation of a random room."""

    power: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("logmel",)

    seconds: Annotated[
        Range,
        AfterValidator(_check_times),
        Field(
            description="Lower and upper limit of the reverberation time (decay by 60 dB) in seconds, 0 to 3. Uniform in between. "
            "No effect with folder."
        ),
    ] = (0.2, 0.8)
    share: Annotated[
        float, Field(ge=0, le=1, description="Probability of reverberation for each example. 0: no reverberation.")
    ] = 1.0
    folder: Annotated[
        Path | None,
        Field(
            description="Folder of impulse responses. Each example gets a random response, cut to 3 s. null: exponential decay."
        ),
    ] = None

    def table(self, features: AnyFeatures, seed: int) -> np.ndarray:
        """Compute the energy of each impulse response by frame: float32 [responses, frames], with sum 1.

        Without a folder: the times of the frames in seconds, float32 [1, frames].
        """
        assert isinstance(features, FeatureSettings)  # noqa: S101 - ensured by kinds
        hop, rate = features.hop, features.sample_rate
        if self.folder is None:
            frames = int(np.ceil(min(max(self.seconds), _LONGEST_S) * rate / hop)) + 1
            return (np.arange(frames) * hop / rate)[None].astype(np.float32)
        responses = []
        for wave in load_waves(self.folder, make_power_extractor(features), "the impulse responses of data.transforms"):
            start = int(np.abs(wave).argmax())  # the direct sound
            energy = np.square(wave[start : start + round(_LONGEST_S * rate)], dtype=np.float64)
            energy = np.pad(energy, (0, -len(energy) % hop)).reshape(-1, hop).sum(axis=1)
            if not energy.any():
                raise DataError(f"An impulse response in {self.folder} is silent. Remove it from the folder.")
            responses.append(energy / energy.sum())
        longest = max(map(len, responses))
        return np.stack([np.pad(energy, (0, longest - len(energy))) for energy in responses]).astype(np.float32)

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Draw the distribution of a frame's power over this and the following frames: float32 [examples, frames]."""
        assert table is not None  # noqa: S101
        if self.folder is None:
            time = rng.uniform(*self.seconds, len(frames))[:, None]
            energy = 10 ** (-_LOUDNESS_DB / 10 * table / np.maximum(time, 1e-6))
            energy /= energy.sum(axis=1, keepdims=True)
        else:
            energy = table[rng.integers(0, len(table), len(frames))]
        dry = rng.random(len(frames)) >= self.share
        energy[dry] = np.eye(1, energy.shape[1])
        return {"energy": energy.astype(np.float32)}

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], table: Tensor | None) -> Tensor:
        """Spread the power over the following frames."""
        energy = drawn["energy"][..., : x.shape[-2]].flatten(end_dim=-2)
        count, taps = energy.shape
        flat = F.pad(x.flatten(end_dim=-3).permute(2, 0, 1), (taps - 1, 0))  # [bands, examples, frames]
        spread = F.conv1d(flat, energy.flip(1).unsqueeze(1), groups=count)
        return spread.permute(1, 2, 0).reshape(x.shape)
