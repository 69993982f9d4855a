"""Settings that all kinds of features have in common: sample rate, channel, type, normalisation."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

EPSILON = 1e-5
"""Added to a band's standard deviation (decibels) before dividing by it, so that a silent band gives 0."""

SampleRate = Annotated[
    int, Field(ge=1_000, le=192_000, description="Hz: every clip is resampled to this rate. 1000 to 192000.")
]
Channel = Annotated[
    Literal["first", "mean"] | Annotated[int, Field(ge=0)],
    Field(description="Of several channels take the first, their mean, or one by its number: 0 is the first."),
]
Normalise = Literal["clip", "group", "client", "part", "none"]
BY_TRAINING_CLIPS = ("group", "client", "part")
"""Ways to normalise by statistics of training clips: which these are is known once the clips are divided."""
GivenNormalise = Annotated[
    Normalise,
    Field(
        description="z-score of each band over the frames of the clip, or over all frames of the training clips of its group "
        "(speaker), of its client, or of the whole part (data set), or none: the numbers as they are."
    ),
]
"""Normalisation of features that are not computed here."""
Frames = Annotated[
    int | None,
    Field(
        ge=1,
        le=100_000,
        description="Longer clips are cut to this number of frames, shorter ones get frames of zeros at the end (after "
        "normalisation). null: every clip keeps its length. 1 to 100000.",
    ),
]
Dtype = Annotated[
    Literal["float32", "float16"],
    Field(description="Type in the cache; batches are float32 in any case. float16 halves it."),
]


def z_scored(matrix: np.ndarray) -> np.ndarray:
    """Scale ``matrix`` (float32 [frames, bands]) to mean 0 and deviation 1 in each band."""
    result: np.ndarray = (matrix - matrix.mean(axis=0)) / (matrix.std(axis=0) + EPSILON)
    return result
