"""Polyphonic sound detection score (PSDS) from counts of detections, which add up over clips and clients.

C. Bilen, G. Ferroni, F. Tuveri, J. Azcarreta, S. Krstulovic, A Framework for the Robust Evaluation of Sound Event Detection, ICASSP
2020. A detection is a maximal interval with a probability of at least a threshold.

    relevant    at least the share ``detection`` of a detection is within events of its class; all others are false positives
    found       at least the share ``truth`` of an event is within relevant detections of its class
    confused    at least the share ``confusion`` of a false positive is within events of another class
    rate(c)     false positives of class c per hour + alpha * mean over the other classes k of confusions of c with k per hour of k
    score       1 / 100 * integral over rates from 0 to 100 per hour of max(0, mean over classes - spread * deviation over classes)
                of the largest fraction of found events at any threshold with at most this rate

The scenarios are those of DCASE's task 4 (DESED). Thresholds are 0.01, 0.03 ... 0.99. Classes without events do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COUNTS = "detections"
"""Base name of the metric with the counts."""
THRESHOLDS: NDArray[np.float64] = (np.arange(50) + 0.5) / 50
_LARGEST_RATE = 100.0
"""Upper end of the integral, in false positives per hour."""
_ROUNDING = 1e-9
_FOUND, _FALSE, _CONFUSED = 0, 1, 2
"""Columns of the counts. The confusions with each class follow the third."""
_EVENTS, _SECONDS, _ALL_SECONDS = 0, 1, 2
"""Columns of the last row: events and their seconds by class, and the length of all clips in the first class."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Tolerances and penalties of a score."""

    detection: float
    truth: float
    confusion: float | None
    """``None``: confusions are not counted."""
    alpha: float
    spread: float


SCENARIOS: Mapping[str, Scenario] = {
    "psds1": Scenario(0.7, 0.7, None, 0.0, 1.0),
    "psds2": Scenario(0.1, 0.1, 0.3, 0.5, 1.0),
}


def find_detections(active: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the maximal runs of active tokens.

    Args:
        active: bool [rows, tokens].

    Returns:
        Row, first token and end of each run, int64 [runs], sorted by row and time.
    """
    changes = np.diff(np.pad(active.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, firsts = np.nonzero(changes == 1)
    return rows, firsts, np.nonzero(changes == -1)[1]


def count_detections(
    probabilities: NDArray[np.float64], token_seconds: float, events: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Count the detections in a clip.

    Args:
        probabilities: float64 [tokens, classes].
        token_seconds: time from a token to the next.
        events: float64 [events, 3]: onset and offset in seconds, and class. Events of a class do not overlap.

    Returns:
        Counts, float64 [scenarios * thresholds + 1, classes, 2 + classes]. Those of several clips add up.
    """
    tokens, classes = probabilities.shape
    counts = np.zeros((len(SCENARIOS) * len(THRESHOLDS) + 1, classes, 2 + classes))
    onset, offset, kind = events[:, 0], events[:, 1], events[:, 2].astype(np.int64)
    np.add.at(counts[-1, :, _EVENTS], kind, 1)
    np.add.at(counts[-1, :, _SECONDS], kind, offset - onset)
    counts[-1, 0, _ALL_SECONDS] = tokens * token_seconds
    active = THRESHOLDS[:, None, None] <= probabilities.T
    rows, first, end = find_detections(active.reshape(-1, tokens))
    threshold, found = rows // classes, rows % classes
    overlap = np.minimum(end[:, None] * token_seconds, offset) - np.maximum(first[:, None] * token_seconds, onset)
    overlap = np.maximum(overlap, 0.0)
    by_class = overlap @ np.eye(classes)[kind]
    share = by_class / ((end - first) * token_seconds)[:, None]
    own = share[np.arange(len(found)), found]
    for number, scenario in enumerate(SCENARIOS.values()):
        part = counts[number * len(THRESHOLDS) : (number + 1) * len(THRESHOLDS)]
        relevant = own >= scenario.detection - _ROUNDING
        covered = np.zeros((len(THRESHOLDS), len(events)))
        np.add.at(covered, threshold[relevant], (overlap * (found[:, None] == kind))[relevant])
        is_found = (covered >= scenario.truth * (offset - onset) - _ROUNDING) & (covered > 0)
        np.add.at(part[:, :, _FOUND].T, kind, is_found.T)
        np.add.at(part[:, :, _FALSE], (threshold[~relevant], found[~relevant]), 1)
        if scenario.confusion is not None:
            confused = (share >= scenario.confusion - _ROUNDING) & (np.arange(classes) != found[:, None])
            np.add.at(part[:, :, _CONFUSED:], (threshold[~relevant], found[~relevant]), confused[~relevant])
    return counts


def count_events(counts: NDArray[np.float64]) -> int:
    """Return the number of events behind counts."""
    return int(counts[-1, :, _EVENTS].sum())


def compute_psds(counts: NDArray[np.float64], name: str) -> float:
    """Compute a score from the counts of all clips.

    Args:
        counts: sum of :func:`count_detections` over clips with at least one event.
        name: a key of :data:`SCENARIOS`.

    Returns:
        0 to 1.
    """
    scenario, first = SCENARIOS[name], [*SCENARIOS].index(name) * len(THRESHOLDS)
    present = np.flatnonzero(counts[-1, :, _EVENTS])
    part = counts[first : first + len(THRESHOLDS), present]
    hours, hours_of_class = counts[-1, 0, _ALL_SECONDS] / 3600, counts[-1, present, _SECONDS] / 3600
    recall = part[:, :, _FOUND] / counts[-1, present, _EVENTS]
    confusions = (part[:, :, _CONFUSED + present] / hours_of_class).sum(axis=2) / max(1, len(present) - 1)
    rate = part[:, :, _FALSE] / hours + scenario.alpha * confusions
    steps = np.unique(np.concatenate([[0.0], rate[rate < _LARGEST_RATE]]))
    best = np.zeros((len(steps), len(present)))
    for column in range(len(present)):
        order = np.argsort(rate[:, column])
        largest = np.maximum.accumulate(np.append(0.0, recall[order, column]))
        best[:, column] = largest[np.searchsorted(rate[order, column], steps, side="right")]
    height = np.maximum(best.mean(axis=1) - scenario.spread * best.std(axis=1), 0.0)
    return float((height * np.diff(np.append(steps, _LARGEST_RATE))).sum() / _LARGEST_RATE)
