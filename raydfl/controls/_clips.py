"""Description of clips by the mean, the standard deviation and the modulation spectrum of their features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from raydfl.data import Examples
from raydfl.objectives import average_bins

LIMIT = 20_000
"""Maximum number of training clips."""
TESTS = ("test", "client_test", "validation", "server_validation")
"""Splits with scores: the server's test, the clients' tests, and the held-out clips of the clients and the server."""
_BATCH = 1 << 20
"""Approximate number of values in a batch."""
_CONSTANT = 1e-6
"""Spread of a constant value, relative to the largest spread."""
_SILENT = 1e-3
"""Addend of a modulation spectrum. The spectrum of constant features is 0."""
_MEANS = 1024
"""Maximum number of means of a clip. Frames with more than 128 features have fewer time intervals."""


def draw_clips(parts: Sequence[Examples], limit: int, rng: np.random.Generator) -> list[Examples]:
    """Draw at most ``limit`` clips from several sequences of examples. Sequences without clips are omitted."""
    clips = np.unique(np.concatenate([part.clips for part in parts])) if parts else np.empty(0)
    if len(clips) > limit:
        drawn = rng.choice(clips, limit, replace=False)
        parts = [part.take(np.flatnonzero(np.isin(part.clips, drawn))) for part in parts]
    return [part for part in parts if len(part)]


def remove_constants(spread: np.ndarray) -> np.ndarray:
    """Replace the standard deviations of constant values by infinity: float64 [values].

    A division by infinity removes a value. Constant values have the rounding errors of float32.
    """
    return np.where(spread <= _CONSTANT * spread.max(), np.inf, spread)


def describe_clips(examples: Examples, intervals: int) -> tuple[np.ndarray, np.ndarray, Examples]:
    """Compute the mean and the standard deviation of each feature over the frames of each time interval of each clip.

    The features are the inputs of networks in an evaluation. Segments of a clip have equal weights. The rows of an image are
    its frames.

    Args:
        examples: at least one example.
        intervals: number of intervals of equal duration.

    Returns:
        Means and standard deviations, float64 [clips, intervals * features], and the first example of each clip. Clips have
        the order of their numbers.
    """
    examples = examples.cut_for_test()
    intervals = max(1, min(intervals, _MEANS // examples.first_view.store.bands))

    def compute_moments(x: Tensor, lengths: Tensor | None) -> Tensor:
        return torch.cat([average_bins(power, lengths, intervals).flatten(1) for power in (x, x * x)], dim=1)

    moments, first = _average_segments(examples, compute_moments, intervals)
    mean, square = moments.T.reshape(2, -1, len(first))
    return mean.T, np.sqrt(np.maximum(square - mean * mean, 0)).T, first


def describe_rhythm(examples: Examples, frames: int) -> np.ndarray:
    """Compute the modulation spectrum of each clip: how much its features change at each rate.

    The spectrum of a feature is the magnitude of the Fourier transform over Hann windows that overlap by half, without the mean
    of the window. It is averaged over windows, features and the segments of the clip.

    Args:
        examples: at least one example. Each segment has at least ``frames`` frames.
        frames: length of a window, at least 2.

    Returns:
        Natural logarithms of the spectrum, float64 [clips, frames // 2], from the lowest rate.
    """
    hop, window = max(1, frames // 2), torch.hann_window(frames, periodic=False, dtype=torch.float64)

    def compute_spectrum(x: Tensor, lengths: Tensor | None) -> Tensor:
        parts = x.unfold(1, frames, hop)  # [segments, windows, features, frames]
        spectrum = torch.fft.rfft((parts - parts.mean(dim=-1, keepdim=True)) * window).abs()[..., 1:].mean(dim=2)
        counts = torch.full((len(x),), x.shape[1]) if lengths is None else lengths
        valid = torch.arange(parts.shape[1]) * hop + frames <= counts.unsqueeze(1)
        average: Tensor = (spectrum * valid.unsqueeze(2)).sum(dim=1) / valid.sum(dim=1, keepdim=True)
        return average

    spectra, _ = _average_segments(examples.cut_for_test(), compute_spectrum, 1)
    logarithms: np.ndarray = np.log(spectra + _SILENT)
    return logarithms


def _average_segments(
    examples: Examples, describe: Callable[[Tensor, Tensor | None], Tensor], copies: int
) -> tuple[np.ndarray, Examples]:
    """Describe the segments of each clip and average over them.

    Args:
        examples: at least one segment.
        describe: function of features, float64 [segments, frames, features], and numbers of valid frames, int64 [segments] or
            ``None`` for all. It returns float64 [segments, values].
        copies: number of values that ``describe`` keeps for a frame, at least 1.

    Returns:
        float64 [clips, values], and the first example of each clip.
    """
    view = examples.first_view
    _, first, clip = np.unique(examples.clips, return_index=True, return_inverse=True)
    size = max(1, _BATCH // (int(view.counts.max(initial=1)) * max(view.store.bands, copies)))
    values = []
    for index in examples.order(size, None):
        x, lengths = view.batch(index)
        values.append(describe((x.transpose(1, 2).flatten(2) if x.ndim == 4 else x).double(), lengths))
    sums = torch.zeros(len(first), values[0].shape[1], dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(clip), torch.cat(values))
    return (sums / torch.from_numpy(np.bincount(clip)).unsqueeze(1)).numpy(), examples.take(first)
