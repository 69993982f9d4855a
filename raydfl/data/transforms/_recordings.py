"""Recordings that transforms use: noise, and impulse responses of rooms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raydfl.core.errors import DataError
from raydfl.data.audio import read_audio
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.sets import list_recordings


def extractor_of_power(features: FeatureSettings) -> FeatureExtractor:
    """Return what computes log-mel features that are neither cut nor normalised."""
    neutral = {"normalise": "none", "seconds": None, "wave": "as_is", "dtype": "float32"}
    return FeatureExtractor(features.model_copy(update=neutral))


def power_of(features: FeatureSettings, logarithms: np.ndarray) -> np.ndarray:
    """Return the power in bands, of features that are not normalised: float32, of the same shape."""
    result: np.ndarray = np.exp(logarithms / features.log_power_factor).astype(np.float32)
    return result


def waves_in(folder: Path, extractor: FeatureExtractor, what: str) -> Iterator[np.ndarray]:
    """Yield the recordings in a folder, at any depth, in the order of their names: float32 [samples] at the features' rate.

    Args:
        what: they are, for the messages.

    Raises:
        DataError: there is no such folder, none is in it, or one cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"{what}: there is no folder {folder}; name a folder of recordings")
    names, _ = list_recordings(folder)
    if not names:
        raise DataError(f"{what}: no recording is in {folder}; it must hold recordings (.wav, .flac, .ogg ...)")
    for name in sorted(names):
        try:
            yield extractor.wave(*read_audio(folder / name))
        except DataError as error:
            raise DataError(f"{what}: {folder / name} cannot be used: {error}") from error
