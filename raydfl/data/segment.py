"""Segments of equal length from long clips. The prediction for a clip is the mean over its segments."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydfl.core.settings import Settings


class SegmentSettings(Settings):
    """Segments of clips. FedAudio's UrbanSound8K: frames 300, stride 50, test_stride 100, keep_last false."""

    frames: int = Field(ge=1, description="Length of a segment in frames. Shorter clips stay whole.")
    stride: int = Field(ge=1, description="Frames between the starts of consecutive training segments.")
    test_stride: int | None = Field(
        None, ge=1, description="Stride of validation and test segments in frames. null: the training stride."
    )
    keep_last: bool = Field(
        True,
        description="Segments of a clip of T frames. true: all complete ones, 1 + floor((T - frames) / stride). false: "
        "round((T - frames) / stride), at least 1, as in FedAudio.",
    )


def segments(lengths: np.ndarray, settings: SegmentSettings | None, stride: int | None) -> tuple[np.ndarray, ...]:
    """Compute the segments of clips.

    Args:
        lengths: int [clips], frames of each clip.
        settings: ``None``: each clip is an example.
        stride: stride in frames; ``None``: the training stride of ``settings``.

    Returns:
        clip: int64 [examples], position in ``lengths``;
        start: int64 [examples], first frame within the clip;
        frames: int64 [examples].
    """
    lengths = np.asarray(lengths, np.int64)
    if settings is None:
        return np.arange(len(lengths)), np.zeros(len(lengths), np.int64), lengths
    stride = stride or settings.stride
    beyond = np.maximum(lengths - settings.frames, 0)
    # round() of the protocol rounds halves to even, as np.rint does.
    counts = 1 + beyond // stride if settings.keep_last else np.maximum(np.rint(beyond / stride).astype(np.int64), 1)
    clip = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(clip)) - np.repeat(np.cumsum(counts) - counts, counts)
    return clip, number * stride, np.minimum(lengths[clip], settings.frames)
