"""Reverberation: the sound of a room, from its impulse responses or with an exponential decay.

The power of each band is spread over the frames that follow, as the energy of the impulse response is: the fine structure of the
response, shorter than a frame, is left out. An example's power stays what it was, but for what rings on after its end.
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
from raydfl.data.transforms._recordings import extractor_of_power, waves_in
from raydfl.data.transforms._transform import Transform
from raydfl.data.transforms._values import Range

_LOUDNESS_DB = 60.0
"""By which sound has fallen after the reverberation time."""
_LONGEST_S = 3.0


def _check_times(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= value[0] <= value[1] <= _LONGEST_S:
        raise ValueError(f"reverberation times are from 0 to {_LONGEST_S:g} s; longer ones would be cut")
    return value


@dataclass(frozen=True, kw_only=True)
class Reverberation(Transform):
    """A room around the example."""

    power: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("logmel",)

    seconds: Annotated[
        Range,
        AfterValidator(_check_times),
        Field(
            description="Shortest and longest reverberation time in s (until sound has fallen by 60 dB), between which it is drawn "
            "evenly, 0 to 3; used without folder."
        ),
    ] = (0.2, 0.8)
    share: Annotated[float, Field(ge=0, le=1, description="Share of the examples that get a room, drawn anew.")] = 1.0
    folder: Annotated[
        Path | None,
        Field(description="Recordings of impulse responses, of which one is drawn; their first 3 s. null: a decay."),
    ] = None

    def table(self, features: AnyFeatures, seed: int) -> np.ndarray:
        """See :class:`Transform`: energy of each response by frame, float32 [responses, frames], adding up to 1.

        Without a folder one row: the seconds of a frame, from each to the first.
        """
        assert isinstance(features, FeatureSettings)  # noqa: S101 - see kinds
        hop, rate = features.hop, features.sample_rate
        if self.folder is None:
            frames = int(np.ceil(min(max(self.seconds), _LONGEST_S) * rate / hop)) + 1
            return (np.arange(frames) * hop / rate)[None].astype(np.float32)
        found = []
        for wave in waves_in(self.folder, extractor_of_power(features), "the impulse responses of data.transforms"):
            begin = int(np.abs(wave).argmax())  # the direct sound
            energy = np.square(wave[begin : begin + round(_LONGEST_S * rate)], dtype=np.float64)
            energy = np.pad(energy, (0, -len(energy) % hop)).reshape(-1, hop).sum(axis=1)
            if not energy.any():
                raise DataError(f"an impulse response in {self.folder} is silent; take it out")
            found.append(energy / energy.sum())
        longest = max(map(len, found))
        return np.stack([np.pad(energy, (0, longest - len(energy))) for energy in found]).astype(np.float32)

    def draw(
        self, rng: np.random.Generator, frames: np.ndarray, bands: int, table: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """See :class:`Transform`: share of a frame's power in it and the frames after it, float32 [examples, frames]."""
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
        """See :class:`Transform`."""
        energy = drawn["energy"][..., : x.shape[-2]].flatten(end_dim=-2)
        count, taps = energy.shape
        flat = F.pad(x.flatten(end_dim=-3).permute(2, 0, 1), (taps - 1, 0))  # [bands, examples, frames]
        spread = F.conv1d(flat, energy.flip(1).unsqueeze(1), groups=count)
        return spread.permute(1, 2, 0).reshape(x.shape)
