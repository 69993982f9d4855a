"""Recordings for transforms: noise, and impulse responses of rooms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raydfl.core.errors import DataError
from raydfl.data.audio import read_audio
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.sets import list_recordings


def make_power_extractor(features: FeatureSettings) -> FeatureExtractor:
    """Build an extractor of log-mel features without cutting and normalisation."""
    neutral = {"normalise": "none", "seconds": None, "wave": "as_is", "dtype": "float32"}
    return FeatureExtractor(features.model_copy(update=neutral))


def to_power(features: FeatureSettings, logarithms: np.ndarray) -> np.ndarray:
    """Convert unnormalised log-mel features to the power in bands: float32, same shape."""
    result: np.ndarray = np.exp(logarithms / features.of_log_power).astype(np.float32)
    return result


def read_waves(folder: Path, extractor: FeatureExtractor, what: str) -> Iterator[np.ndarray]:
    """Yield the recordings below a folder in the order of their names: float32 [samples] at the features' rate.

    Args:
        what: purpose of the recordings, for messages.

    Raises:
        DataError: the folder is missing or has no recordings, or a recording cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"{what}: there is no folder {folder}. Name a folder of recordings.")
    names, _ = list_recordings(folder)
    if not names:
        raise DataError(f"{what}: no recording is in {folder}. Put recordings there (.wav, .flac, .ogg ...).")
    for name in sorted(names):
        try:
            yield extractor.wave(*read_audio(folder / name))
        except DataError as error:
            raise DataError(f"{what}: {folder / name} cannot be used: {error}") from error
