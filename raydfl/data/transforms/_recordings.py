"""Recordings for transforms: noise, and impulse responses of rooms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.isolation import call_isolated
from raydfl.data.audio import read_audio
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.sets import list_recordings


def make_power_extractor(features: FeatureSettings) -> FeatureExtractor:
    """Create an extractor of log-mel features of full length, without normalisation."""
    neutral = {"normalise": "none", "seconds": None, "trim_db": None, "wave": "as_is", "dtype": "float32"}
    return FeatureExtractor(features.model_copy(update=neutral))


def load_waves(folder: Path, extractor: FeatureExtractor, option: str) -> Iterator[np.ndarray]:
    """Yield the recordings in a folder and its subfolders in alphabetical order.

    Args:
        folder: folder with recordings.
        extractor: extractor with the sample rate of the features.
        option: name of the folder's option, for messages.

    Yields:
        Samples at the features' sample rate, float32 [samples].

    Raises:
        DataError: the folder does not exist, has no recordings, or contains an unreadable one.
    """
    if not folder.is_dir():
        raise DataError(f"{option}: there is no folder {folder}. Give the path of a folder of recordings.")
    names, _ = list_recordings(folder)
    if not names:
        raise DataError(f"{option}: no recording is in {folder}. Add recordings (.wav, .flac, .ogg ...).")
    for name in sorted(names):
        try:
            yield extractor.wave(*call_isolated(read_audio, str(folder / name), where=str(folder / name)))
        except DataError as error:
            raise DataError(f"{option}: {folder / name} cannot be used: {error}") from error
