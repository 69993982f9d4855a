"""Description of a run's front end, complete enough to reimplement it in any language.

``docs/using.md`` has a reimplementation in NumPy. A test compares it with :mod:`raydfl.data.features`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from raydfl.data import View
from raydfl.data.features import (
    EPSILON,
    LARGEST_DENOMINATOR,
    LEAST_SQUARES,
    FeatureSettings,
    FileFeatures,
    ImageFeatures,
    KaldiFeatures,
    ModelFeatures,
    PretrainedFeatures,
    SpeechEmbeddingFeatures,
    WaveFeatures,
)
from raydfl.data.transforms import RandomCrop


def describe_front_end(
    view: View, statistics: np.ndarray | None = None, average: str = "probabilities"
) -> dict[str, Any]:
    """Describe the steps from a recording to the network's input, one entry per step, in order.

    Args:
        view: The view that the network reads.
        statistics: Mean and standard deviation for ``normalise: group``, float64 [2, bands]. ``None``: unknown or unused.
        average: Name of the output to average over the segments of a recording.

    Returns:
        Values for JSON.
    """
    settings = view.features
    if isinstance(settings, ImageFeatures):
        return {"kind": settings.kind, **_describe_image(settings, view.pipeline.crop)}
    if isinstance(settings, FileFeatures):
        first = {"file": {"name": settings.path.name, "bands": settings.bands, "frames": settings.frames}}
    else:
        first = {**_describe_wave(settings), **_describe_features(settings)}
    segment, pipeline = view.test_segments, view.pipeline
    mean, deviation = (None, None) if statistics is None else statistics.tolist()
    late = pipeline.late is not None and pipeline.late.z_score
    return {
        "kind": settings.kind,
        **first,
        "normalise": {
            "over": "example" if late else settings.normalise,
            "epsilon": EPSILON,
            "mean": mean,
            "deviation": deviation,
        },
        "pad": {"frames": settings.frames},
        "dtype": settings.dtype,
        "crop": {"frames": pipeline.cut if pipeline.crop is not None and pipeline.crop.test == "centre" else None},
        "segments": None
        if segment is None
        else {
            "frames": segment.frames,
            "stride": segment.test_stride or segment.stride,
            "keep_last": segment.keep_last,
            "average": average,
        },
    }


def _describe_wave(settings: WaveFeatures) -> dict[str, Any]:
    trim = {}
    if isinstance(settings, FeatureSettings):
        trim["trim"] = {"db": settings.trim_db, "block_samples": settings.trim_block}
    return {
        "samples": {"range": "-1..1", "channel": settings.channel},
        "resample": {
            "to_hz": settings.sample_rate,
            "method": "sinc interpolation with a Hann window",
            "zero_crossings": 6,
            "rolloff": 0.99,
            "largest_denominator": LARGEST_DENOMINATOR,
        },
        **trim,
        "cut": {"samples": settings.samples},
    }


def _describe_features(settings: WaveFeatures) -> dict[str, Any]:
    if isinstance(settings, KaldiFeatures):
        bank = {
            "function": "torchaudio.compliance.kaldi.fbank of the samples without their mean",
            "arguments": settings.arguments,
            "least_samples": settings.window,
            "frames": settings.frames,
            "scale": {"formula": "(x - mean) / (2 deviation)", "mean": settings.mean, "deviation": settings.deviation},
        }
        return {"filter_bank": bank}
    if isinstance(settings, ModelFeatures):
        weights = None if settings.weights is None else settings.weights.name
        names = {"class": settings.title.partition(" ")[0], "weights": weights, "options": settings.options}
        return {"model": {**names, "bands": settings.bands, "frames": settings.frames}}
    if isinstance(settings, PretrainedFeatures):
        encoder = {"folder": settings.folder.name, "content": settings.content(), "after": settings.after}
        return {"encoder": {**encoder, "pooling": settings.pooling}}
    if isinstance(settings, SpeechEmbeddingFeatures):
        return {"speech_embedding": settings.describe()}
    return {
        "silence": {"least_samples": settings.least_samples},
        "scale": {"unit_norm": settings.wave == "unit_norm", "least": LEAST_SQUARES},
        "spectrogram": {
            "least_samples": settings.points // 2 + 1 if settings.centred else settings.window,
            "window": "periodic Hann",
            "window_samples": settings.window,
            "fft": settings.points,
            "hop_samples": settings.hop,
            "centred": settings.centred,
            "power": 2 if settings.spectrum == "power" else 1,
        },
        "mel": {
            "bands": settings.bands,
            "formula": settings.mel,
            "low_hz": settings.low_hz,
            "high_hz": settings.highest_hz,
            "highest_bin_hz": settings.sample_rate // 2,
        },
        "log": {
            "formula": "factor * log(max(sum, floor)), with the natural logarithm",
            "factor": settings.log_power_factor * (1 if settings.spectrum == "power" else 2),
            "floor": settings.least,
        },
    }


def _describe_image(settings: ImageFeatures, crop: RandomCrop | None) -> dict[str, Any]:
    rows, columns = settings.size
    mean, deviation = (
        (values * settings.channels)[: settings.channels] for values in (settings.mean, settings.deviation)
    )
    return {
        "convert": {"channels": settings.channels},
        "resize": {
            "rows": rows,
            "columns": columns,
            "method": "bilinear, as Pillow does it" if settings.resize else None,
        },
        "scale": {"formula": "(byte / 255 - mean) / deviation", "mean": mean, "deviation": deviation},
        "pad": {"rows": 0 if crop is None else crop.pad},
        "crop": {"rows": rows if crop is None else crop.size, "columns": columns if crop is None else crop.size},
        "axes": "channels, rows, columns",
    }
