"""Cutting long clips into segments of equal length; the prediction for a clip is then the mean over its segments."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from raydfl.core.settings import Settings


class SegmentSettings(Settings):
    """Segments of clips. FedAudio's UrbanSound8K: frames 300, stride 50, test_stride 100, keep_last false."""

    frames: int = Field(ge=1, description="Frames of a segment; clips no longer than this stay whole.")
    stride: int = Field(ge=1, description="Frames from one training segment's start to the next one's.")
    test_stride: int | None = Field(
        None, ge=1, description="The same for validation and test segments. null: as for training."
    )
    keep_last: bool = Field(
        True,
        description="true: every whole segment, 1 + floor((T - frames) / stride) of a clip of T frames. false: "
        "round((T - frames) / stride) and at least 1, as FedAudio counts.",
    )


def segments(lengths: np.ndarray, settings: SegmentSettings | None, stride: int | None) -> tuple[np.ndarray, ...]:
    """Return where the examples of clips lie.

    Args:
        lengths: int [clips], frames of each clip.
        settings: ``None``: every clip is one example.
        stride: frames from start to start; ``settings``' training stride when ``None``.

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
