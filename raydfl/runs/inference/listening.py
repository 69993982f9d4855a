"""Predictions for the last seconds of a microphone or of a recording, at regular intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from raydfl.core.errors import InputError
from raydfl.core.isolation import call_isolated
from raydfl.data import read_audio
from raydfl.data.features import WaveFeatures
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.recordings import Prediction, Recording, predictions

_WINDOW = 1.0
"""Seconds of a prediction if the run's features have no fixed length."""


def listen(
    model: RunModel, source: Path | None, step: float, window: float | None = None
) -> Iterator[tuple[float, Prediction]]:
    """Yield the time in seconds and the prediction for the preceding window, after every step.

    Args:
        model: Model of a run.
        source: Recording to read instead of the microphone.
        step: Seconds between predictions, above 0.
        window: Seconds of sound per prediction. ``None``: the length of the run's clips, or 1 s.

    Raises:
        InputError: The model does not read recordings, or the microphone cannot be used.
        DataError: The recording cannot be read.
    """
    features = model.view.features
    if not isinstance(features, WaveFeatures):
        raise InputError(
            f"model {model.name!r} of {model.run_dir} does not read recordings. Choose a model of recordings."
        )
    seconds = window or features.seconds or _WINDOW
    chunks = _record(step) if source is None else _read(source, step)
    kept, heard, answered = None, 0, False
    for chunk, rate in chunks:
        heard += len(chunk)
        kept = chunk if kept is None else np.concatenate([kept, chunk])[-max(1, round(seconds * rate)) :]
        if heard >= round(seconds * rate):
            answered = True
            yield heard / rate, _predict(model, kept, rate)
    if kept is not None and not answered:  # The recording is shorter than the window.
        yield heard / rate, _predict(model, kept, rate)


def _predict(model: RunModel, samples: np.ndarray, rate: int) -> Prediction:
    (prediction,) = predictions(model, [Recording(Path("microphone"), samples, rate)])
    return prediction


def _list_sizes(step: float, rate: int) -> Iterator[int]:
    """Yield the sizes of chunks that end at the samples nearest to multiples of a step, at least 1."""
    last = 0
    for number in itertools.count(1):
        end = max(last + 1, round(number * step * rate))
        yield end - last
        last = end


def _read(path: Path, step: float) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the chunks of a recording, float32 [samples, channels], with its rate in Hz."""
    samples, rate = call_isolated(read_audio, str(path), where=str(path))
    start = 0
    for size in _list_sizes(step, rate):
        if start >= len(samples):
            return
        yield samples[start : start + size], rate
        start += size


def _record(step: float) -> Iterable[tuple[np.ndarray, int]]:
    """Yield chunks of the default microphone, float32 [samples, 1], with its rate in Hz."""
    try:
        import sounddevice
    except (ImportError, OSError) as error:  # OSError: the library PortAudio is missing
        raise InputError(
            f"The microphone needs the package sounddevice ({error}). Install it with pip install 'raydfl[microphone]', or "
            f"read a recording: --source FILE"
        ) from error
    try:
        rate = int(sounddevice.query_devices(kind="input")["default_samplerate"])
        with sounddevice.InputStream(samplerate=rate, channels=1, dtype="float32") as stream:
            for size in _list_sizes(step, rate):
                chunk, _ = stream.read(size)
                yield chunk, rate
    except (sounddevice.PortAudioError, ValueError) as error:
        raise InputError(
            f"The microphone cannot be used: {error}. Connect one and allow access to it, or read a recording: --source FILE"
        ) from error
