"""The front end of a run in plain numbers, complete enough to be written again in any language.

``docs/using.md`` has such a reimplementation in NumPy, which a test holds against :mod:`raydfl.data.features.log_mel`.
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
    WaveFeatures,
)
from raydfl.data.transforms import RandomCrop


def describe_front_end(
    view: View, statistics: np.ndarray | None = None, average: str = "probabilities"
) -> dict[str, Any]:
    """Describe how a recording becomes the input of a network: one entry for each step, in the order in which they are done.

    Features from a file begin with the matrices in it; what a model of the user's does is told by its name.

    Args:
        view: that the network reads.
        statistics: of ``normalise: group``, float64 [2, bands]: mean and deviation. ``None``: not known, or not needed.
        average: which of the network's outputs is averaged over the segments of a recording.
    """
    settings = view.features
    if isinstance(settings, FileFeatures):
        first = {
            "file": {"name": settings.path.name, "bands": settings.bands, "frames": settings.frames, "note": _GIVEN}
        }
    elif isinstance(settings, ImageFeatures):
        return {"kind": settings.kind, **_image(settings, view.pipeline.crop)}
    elif isinstance(settings, ModelFeatures):
        first = {**_wave(settings), "model": _model(settings)}
    elif isinstance(settings, PretrainedFeatures):
        first = {**_wave(settings), "encoder": _encoder(settings)}
    elif isinstance(settings, KaldiFeatures):
        first = {**_wave(settings), "filter_bank": _filter_bank(settings)}
    else:
        first = {**_wave(settings), **_log_mel(settings)}
    return {"kind": settings.kind, **first, **_end(view, statistics, average)}


_GIVEN = "features [frames, bands] that were made elsewhere, longer ones cut to frames (null: to nothing)"


def _wave(settings: WaveFeatures) -> dict[str, Any]:
    return {
        "samples": {
            "range": "-1..1: integer samples divided by 2 ** (bits - 1)",
            "channel": settings.channel,
        },
        "resample": {
            "to_hz": settings.sample_rate,
            "method": "sinc interpolation with a Hann window",
            "zero_crossings": 6,
            "rolloff": 0.99,
            "largest_denominator": LARGEST_DENOMINATOR,
            "note": "by the ratio to_hz / rate, reduced; one whose denominator is larger is replaced by the nearest ratio",
        },
        "cut": {"samples": settings.samples, "note": "longer recordings end there; null: they keep their length"},
    }


def _filter_bank(settings: KaldiFeatures) -> dict[str, Any]:
    return {
        "function": "torchaudio.compliance.kaldi.fbank of the samples without their mean",
        "arguments": settings.arguments,
        "least_samples": settings.window,
        "least_samples_note": "shorter recordings are followed by zeros up to there, once the mean is subtracted",
        "frames": settings.frames,
        "frames_note": "longer ones are cut there, shorter ones followed by frames of zeros before they are scaled; null: neither",
        "scale": {"formula": "(x - mean) / (2 deviation)", "mean": settings.mean, "deviation": settings.deviation},
    }


def _model(settings: ModelFeatures) -> dict[str, Any]:
    return {
        "class": settings.title.partition(" ")[0],
        "weights": None if settings.weights is None else settings.weights.name,
        "options": settings.options,
        "input": "float32 [samples]",
        "output": "[frames, bands]",
        "bands": settings.bands,
        "frames": settings.frames,
        "note": "a class in Python that the run named; longer outputs are cut to frames (null: to nothing)",
    }


def _encoder(settings: PretrainedFeatures) -> dict[str, Any]:
    return {
        "folder": settings.folder.name,
        "content": settings.content(),
        "after": settings.after,
        "pooling": settings.pooling,
        "note": "the folder's feature extractor of transformers, of spectra the frames that sound alone; then, unless after is "
        "null, the encoder's stem and so many layers (after the last its norm), and the pooling",
    }


def _log_mel(settings: FeatureSettings) -> dict[str, Any]:
    centred = settings.centred
    return {
        "silence": {
            "least_samples": settings.least_samples,
            "note": "shorter recordings stand in so many zeros, (least_samples - T) // 2 of them before T samples",
        },
        "scale": {
            "unit_norm": settings.wave == "unit_norm",
            "least": LEAST_SQUARES,
            "note": "unit_norm: the samples are divided by sqrt(max(sum of their squares, least))",
        },
        "spectrogram": {
            "least_samples": settings.points // 2 + 1 if centred else settings.window,
            "least_samples_note": "shorter recordings are followed by zeros up to there",
            "window": "periodic Hann: 0.5 - 0.5 cos(2 pi n / window_samples)",
            "window_samples": settings.window,
            "fft": settings.points,
            "window_place": "in the middle of the fft points, (fft - window_samples) // 2 zeros before it",
            "hop_samples": settings.hop,
            "centred": centred,
            "centre": "frame t is centred at sample t * hop_samples; the recording is reflected at both ends by fft // 2 samples"
            if centred
            else "frame t's window begins at sample t * hop_samples; the rest of the fft points are zeros",
            "frames": "1 + samples // hop_samples, of the samples before zeros were put after them"
            if centred
            else "1 + (samples - window_samples) // hop_samples, at least 1",
            "power": 2 if settings.spectrum == "power" else 1,
        },
        "mel": {
            "bands": settings.bands,
            "formula": settings.mel,
            "scale": "htk: mel = 2595 log10(1 + hz / 700)"
            if settings.mel == "htk"
            else "slaney: mel = 3 hz / 200 up to 1000 Hz, from there 15 + 27 log(hz / 1000) / log(6.4)",
            "low_hz": settings.low_hz,
            "high_hz": settings.highest_hz,
            "edges": "bands + 2 points, equally far apart in mel",
            "triangles": "1 at the middle edge, 0 at its neighbours, linear in hz; not normalised by area",
            "highest_bin_hz": settings.sample_rate // 2,
            "bins": "fft // 2 + 1 points from 0 to highest_bin_hz, equally far apart",
        },
        "log": {
            "formula": "factor * log(max(sum, floor)), with the natural logarithm",
            "factor": settings.of_log_power * (1 if settings.spectrum == "power" else 2),
            "floor": settings.least,
        },
    }


def _image(settings: ImageFeatures, crop: RandomCrop | None) -> dict[str, Any]:
    rows, columns = settings.size
    of_each = [(values * settings.channels)[: settings.channels] for values in (settings.mean, settings.deviation)]
    return {
        "convert": {
            "channels": settings.channels,
            "note": "of colours one channel: (299 R + 587 G + 114 B) / 1000, rounded; of grey three channels: three times the same",
        },
        "resize": {
            "rows": rows,
            "columns": columns,
            "note": "images of another size: bilinear, over as many pixels as become one (Pillow's)"
            if settings.resize
            else "images of another size are an error",
        },
        "scale": {
            "formula": "(byte / 255 - mean) / deviation in each channel",
            "mean": of_each[0],
            "deviation": of_each[1],
        },
        "pad": {
            "rows": 0 if crop is None else crop.pad,
            "note": "rows and columns of zeros on each side, after the scale",
        },
        "crop": {
            "rows": rows if crop is None else crop.size,
            "columns": columns if crop is None else crop.size,
            "note": "the middle: from row (R - rows) // 2 of R and column (C - columns) // 2 of C, both with padding",
        },
        "axes": "channels, rows, columns",
    }


def _end(view: View, statistics: np.ndarray | None, average: str) -> dict[str, Any]:
    settings, segment, pipeline = view.features, view.test_segments, view.pipeline
    mean, deviation = (None, None) if statistics is None else statistics.tolist()
    middle = pipeline.cut if pipeline.crop is not None and pipeline.crop.test == "centre" else None
    return {
        "normalise": {
            "over": "example" if pipeline.late is not None and pipeline.late.z_score else settings.normalise,
            "formula": "(x - mean) / (deviation + epsilon) in each band; deviation is the population's",
            "epsilon": EPSILON,
            "mean": mean,
            "deviation": deviation,
            "note": "clip: over the frames of the recording; group, client, part: with the training clips' mean and deviation, "
            "as given here (null: over all frames of the speaker's recordings); example: over the frames of a crop or segment, "
            "once it is cut (frames of zeros are left out); none: not done",
        },
        "pad": {"frames": settings.frames, "note": "frames of zeros after it up to there; null: none"},
        "dtype": settings.dtype,
        "crop": {
            "frames": middle,
            "note": "of longer recordings the middle, from frame (T - frames) // 2 of T, zeros counted; null: all",
        },
        "segments": None
        if segment is None
        else {
            "frames": segment.frames,
            "stride": segment.test_stride or segment.stride,
            "keep_last": segment.keep_last,
            "number": "keep_last: 1 + (T - frames) // stride of T; else max(1, round((T - frames) / stride)), halves to even",
            "average": average,
            "note": "recordings no longer than a segment are one; the mean over its segments is of the output named by average",
        },
    }
