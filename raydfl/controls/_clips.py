"""Description of clips by the mean and the standard deviation of their features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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
    view = examples.first_view
    _, first, clip = np.unique(examples.clips, return_index=True, return_inverse=True)
    intervals = max(1, min(intervals, _MEANS // view.store.bands))
    size = max(1, _BATCH // (int(view.counts.max(initial=1)) * max(view.store.bands, intervals)))
    moments = []
    for index in examples.order(size, None):
        x, lengths = view.batch(index)
        x = (x.transpose(1, 2).flatten(2) if x.ndim == 4 else x).double()
        moments.append(torch.cat([average_bins(power, lengths, intervals).flatten(1) for power in (x, x * x)], dim=1))
    sums = torch.zeros(len(first), moments[0].shape[1], dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(clip), torch.cat(moments))
    mean, square = (sums / torch.from_numpy(np.bincount(clip)).unsqueeze(1)).numpy().T.reshape(2, -1, len(first))
    return mean.T, np.sqrt(np.maximum(square - mean * mean, 0)).T, examples.take(first)
