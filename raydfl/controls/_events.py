"""Control of sound event detection: a linear model of single frames with their surroundings.

The values of a frame are the features, and their means and standard deviations over half a second around the frame. The probability
of a class is the ridge regression of the activity, 0 or 1, on the values, standardised with the training frames, with a penalty
of 1, clipped to 0..1. The training uses the times of events, even if the run's training does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.ndimage import uniform_filter1d
from torch import nn

from raydfl.controls._clips import TESTS, draw_clips, remove_constants
from raydfl.controls._control import RAW, Control
from raydfl.core.metrics import summarise
from raydfl.core.psds import COUNTS
from raydfl.data import Examples, Population
from raydfl.objectives import Events, TokenObjective, mark_active_frames

_PENALTY = 1.0
_LIMIT = 2000
"""Maximum number of training clips. A clip has hundreds of frames."""
_BEFORE = 0.25
"""Seconds before and after a frame."""
_CLIPS = 64
"""Clips in memory at once."""


def measure_frame_model(data: Population, objective: Events, rng: np.random.Generator) -> tuple[list[Control], str]:
    """Measure the control of a data set with events.

    Args:
        data: population of one part, with clips.
        objective: objective of the run, whose filter smooths the probabilities.
        rng: generator that draws the training clips.

    Returns:
        The control of each test set, and the reason for a missing control.
    """
    tests = {split: data.read_role(split) for split in TESTS}
    model = _fit(draw_clips(data.read_role("train"), _LIMIT, rng))
    if model is None:
        return [], "Raw features have no score, because no training clip has the times of events."
    controls = []
    for split, parts in tests.items():
        counts = [
            found[COUNTS]
            for part in _divide(parts)
            if COUNTS in (found := objective.compare(model.predict(part, objective), part, nn.Identity()))
        ]
        if counts:
            score = summarise({COUNTS: sum(counts[1:], counts[0])})[objective.headline]
            controls.append(Control(f"{RAW}linear model", split, objective.headline, score.value, int(score.count)))
    return controls, "" if controls else "Raw features have no score, because no test clip has the times of events."


class _FrameModel:
    """Linear model of the values of a frame."""

    def __init__(self, mean: np.ndarray, spread: np.ndarray, weights: np.ndarray, intercept: np.ndarray) -> None:
        self.mean, self.spread, self.weights, self.intercept = mean, spread, weights, intercept

    def predict(self, examples: Examples, objective: TokenObjective) -> torch.Tensor:
        """Predict the probability of each class in each frame: float64 [examples, frames, classes]."""
        parts = [
            torch.from_numpy(np.clip((values - self.mean) / self.spread @ self.weights + self.intercept, 0, 1))[None]
            for values in _describe_frames(examples)
        ]
        return objective.join(parts)


def _fit(parts: Sequence[Examples]) -> _FrameModel | None:
    """Fit the model to the frames of the clips with times. ``None``: no clip has times."""
    sums: list[np.ndarray] = []  # of 1, values, squares, activities, values * activities
    for part in _divide(parts):
        for values, active in zip(_describe_frames(part), mark_active_frames(part), strict=True):
            if len(active):
                added = [np.array(len(values)), values.sum(0), values.T @ values, active.sum(0), values.T @ active]
                sums = [old + new for old, new in zip(sums, added, strict=True)] if sums else added
    if not sums:
        return None
    count, total, squares, activity, products = sums
    mean, intercept = total / count, activity / count
    covariance = squares - count * np.outer(mean, mean)
    spread = remove_constants(np.sqrt(np.maximum(covariance.diagonal() / count, 0)))
    gram = covariance / np.outer(spread, spread) + _PENALTY * np.eye(len(mean))
    weights = np.linalg.solve(gram, (products - np.outer(mean, activity)) / spread[:, None])
    return _FrameModel(mean, spread, weights, intercept)


def _divide(parts: Sequence[Examples]) -> list[Examples]:
    """Divide examples into parts of a few clips, with all segments of a clip in one part."""
    divided = []
    for part in parts:
        examples = part.cut_for_test()
        clips = np.unique(examples.clips)
        for start in range(0, len(clips), _CLIPS):
            chosen = np.isin(examples.clips, clips[start : start + _CLIPS])
            divided.append(examples.take(np.flatnonzero(chosen)))
    return divided


def _describe_frames(examples: Examples) -> list[np.ndarray]:
    """Compute the values of the frames of each example: float64 [frames, 3 * features]."""
    x, lengths = examples.first_view.batch(np.arange(len(examples)))
    counts = [x.shape[1]] * len(x) if lengths is None else lengths.tolist()
    width = 1 + 2 * round(_BEFORE / examples.frame_seconds)
    described = []
    for padded, count in zip(x.double().numpy(), counts, strict=True):
        frames = padded[:count]
        mean, square = (uniform_filter1d(power, width, axis=0, mode="nearest") for power in (frames, frames * frames))
        described.append(np.concatenate([frames, mean, np.sqrt(np.maximum(square - mean * mean, 0))], axis=1))
    return described
