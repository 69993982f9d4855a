"""Controls of classification.

A clip is described by the mean and the standard deviation of its features in :data:`INTERVALS` time intervals. Both classifiers
standardise these values with the training clips.

- Linear model: ridge regression of the classes on the values, with targets of 1 and -1 and a penalty of 1.
- Nearest neighbour: the class of the training clip with the smallest Euclidean distance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raydfl.controls._clips import LIMIT, TESTS, describe_clips, draw_clips, remove_constants
from raydfl.controls._control import RAW, Control, binomial_error
from raydfl.core.metrics import ranking_metrics
from raydfl.core.types import Scores
from raydfl.data import Examples, Population

INTERVALS = 8
"""Time intervals of a clip. With a single interval, all clips would have equal values with ``normalise: clip``."""
_PENALTY = 1.0
_CHUNK = 1024
"""Test clips in a matrix of distances."""


def measure_classifiers(data: Population, rng: np.random.Generator) -> tuple[list[Control], str]:
    """Measure the controls of a data set with one class, or with a set of classes, per clip.

    Args:
        data: population of one part, with clips.
        rng: generator that draws the training clips.

    Returns:
        The controls, and the reason for missing controls.
    """
    tests = {split: _select_labelled(data.read_role(split)) for split in TESTS}
    train = draw_clips(_select_labelled(data.read_role("train")), LIMIT, rng)
    if not train or not any(tests.values()):
        return [], "Raw features have no score, because the training clips or the test clips have no labels."
    values, targets = _describe(train)
    mean, spread = values.mean(axis=0), remove_constants(values.std(axis=0))
    values = (values - mean) / spread
    frequent = int(data.class_counts().argmax())
    controls = []
    for split, examples in tests.items():
        if not examples:
            continue
        tested, truth = _describe(examples)
        tested = (tested - mean) / spread
        scores = _predict_linear(values, targets, tested)
        if data.sets is not None:
            controls += _rank_classes(split, scores, truth)
            continue
        clips = len(truth)
        shares = {
            "chance": 1 / truth.shape[1],
            "majority": truth[:, frequent].mean(),
            f"{RAW}linear model": truth[np.arange(clips), scores.argmax(axis=1)].mean(),
            f"{RAW}nearest neighbour": (targets[_find_nearest(values, tested)] * truth).sum() / clips,
        }
        controls += [
            Control(name, split, "accuracy", float(share), clips, binomial_error(share, clips))
            for name, share in shares.items()
        ]
    return controls, ""


def _select_labelled(parts: Sequence[Examples]) -> list[Examples]:
    """Select the examples with a label."""
    labelled = [part.take(np.flatnonzero(part.labels >= 0)) for part in parts]
    return [part for part in labelled if len(part)]


def _describe(parts: Sequence[Examples]) -> tuple[np.ndarray, np.ndarray]:
    """Describe clips: values float64 [clips, values] and classes float64 [clips, classes], 0 or 1."""
    values, targets = [], []
    for part in parts:
        mean, deviation, first = describe_clips(part, INTERVALS)
        values.append(np.concatenate([mean, deviation], axis=1))
        classes = np.eye(len(part.classes)) if part.sets is None else part.sets.astype(np.float64)
        targets.append(classes[first.labels])
    return np.concatenate(values), np.concatenate(targets)


def _predict_linear(values: np.ndarray, targets: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """Predict scores of classes with ridge regression in closed form.

    Args:
        values: float64 [clips, values], training values with mean 0.
        targets: float64 [clips, classes], 0 or 1.
        tested: float64 [tested clips, values].

    Returns:
        float64 [tested clips, classes]. A class without training clips has the score -inf.
    """
    signs = 2 * targets - 1
    intercept = signs.mean(axis=0)
    clips, count = values.shape
    if clips < count:  # the smaller of two equivalent systems
        weights = values.T @ np.linalg.solve(values @ values.T + _PENALTY * np.eye(clips), signs - intercept)
    else:
        weights = np.linalg.solve(values.T @ values + _PENALTY * np.eye(count), values.T @ (signs - intercept))
    scores: np.ndarray = np.where(targets.any(axis=0), tested @ weights + intercept, -np.inf)
    return scores


def _find_nearest(values: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """Return the position of the nearest training clip of each tested clip: int64 [tested clips]."""
    squares = np.square(values).sum(axis=1)
    chunks = np.split(tested, range(_CHUNK, len(tested), _CHUNK))
    return np.concatenate([(squares - 2 * chunk @ values.T).argmin(axis=1) for chunk in chunks])


def _rank_classes(split: str, scores: np.ndarray, truth: np.ndarray) -> list[Control]:
    """Return the mean average precision of random scores (the mean frequency of the classes) and of the linear model.

    Classes without training clips have constant scores. Classes without positive or negative test clips are omitted, as in
    :func:`raydfl.core.metrics.ranking_metrics`.
    """
    measured = truth.any(axis=0) & ~truth.all(axis=0)
    ratio = ranking_metrics(Scores(np.maximum(scores, -1e9), truth.astype(bool)), only=("map",))["map"]
    means = {"chance": truth[:, measured].mean(), f"{RAW}linear model": ratio.value}
    return [Control(name, split, "map", float(mean), len(truth)) for name, mean in means.items() if ratio.count]
