"""Settings shared by several kinds of features: sample rate, channel, length, dtype and normalisation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from raydfl.core.settings import Settings

EPSILON = 1e-5
"""Offset of a band's standard deviation before the division. A constant band thus becomes 0."""

SampleRate = Annotated[
    int, Field(ge=1_000, le=192_000, description="Sample rate in Hz, 1000 to 192000. Clips are resampled to it.")
]
Channel = Annotated[
    Literal["first", "mean"] | Annotated[int, Field(ge=0)],
    Field(description="Channel of a clip: the first, the mean of all, or a number from 0."),
]
Normalise = Literal["clip", "group", "client", "part", "none"]
BY_TRAINING_CLIPS = ("group", "client", "part")
"""Normalisations with statistics of training clips. They need the division of the clips."""
GivenNormalise = Annotated[
    Normalise,
    Field(
        description="Frames for the z-scores of each band. clip: the clip's. group, client, part: those of all training clips of "
        "the group (speaker), client or part (data set). none: no z-scores."
    ),
]
"""Normalisation of users' features."""
Frames = Annotated[
    int | None,
    Field(
        ge=1,
        le=100_000,
        description="Frames of every clip, 1 to 100000. Longer clips are cut, and shorter clips get zero frames after the "
        "normalisation. null: clips keep their lengths.",
    ),
]
Seconds = Annotated[
    float | None,
    Field(gt=0, le=3_600, description="Maximum length of clips in seconds. Longer clips are cut. null: no limit."),
]
Dtype = Annotated[
    Literal["float32", "float16"],
    Field(description="Type in the cache. float16 halves its size. Batches are always float32."),
]


class WaveSettings(Settings):
    """Base class of features of recordings, with fields or constants ``seconds`` and ``sample_rate``."""

    @property
    def samples(self) -> int | None:
        """Maximum number of samples of a wave, or None for no limit."""
        settings: Any = self
        return None if settings.seconds is None else max(1, round(settings.seconds * settings.sample_rate))

    def key(self) -> dict[str, Any]:
        """Return all settings that affect the values, for the cache key."""
        return self.model_dump(mode="json")


def standardise(matrix: np.ndarray) -> np.ndarray:
    """Scale features, float32 [frames, bands], to mean 0 and deviation 1 in each band."""
    result: np.ndarray = (matrix - matrix.mean(axis=0)) / (matrix.std(axis=0) + EPSILON)
    return result
