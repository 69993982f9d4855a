"""The headline scores of a run, with their intervals and controls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raydfl.controls import Control, auc_interval, wilson_interval
from raydfl.core.errors import RaydflError
from raydfl.core.metrics import SCORES, base_name
from raydfl.core.part_names import qualify
from raydfl.data import Population
from raydfl.runs.report.data import Key, RunRecord
from raydfl.runs.verdict import CLIPS, HeadlineScore, find_part


def find_headlines(run: RunRecord) -> list[Key]:
    """Return the split and the metric of each part's headline score."""
    keys: dict[str, Key] = {}
    for key in sorted(
        (key for key in run.sort_scores(run.headline) if key[0] in CLIPS), key=lambda key: [*CLIPS].index(key[0])
    ):
        keys.setdefault(find_part(key[1]), key)
    return list(keys.values())


def name_beside(metric: str, base: str) -> str:
    """Return the name of another metric of the same model."""
    return metric.removesuffix(base_name(metric)) + base


def measure_score(run: RunRecord, key: Key, population: Population | None) -> HeadlineScore:
    """Measure the interval and the controls of a score."""
    split, metric = key
    base, value, part = base_name(metric), run.curves[key].last, find_part(metric)
    controls = [c for c in run.controls if (c.split, c.metric) == (split, qualify(part, "/", base))]
    by_name = {control.name: control.value for control in controls}
    sign = 1 if SCORES[base].higher_is_better else -1
    raw = max((control for control in controls if control.raw), key=lambda control: sign * control.value, default=None)
    matrix = find_confusion(run, key)
    # Several personal models may test the same clips, so the smaller number counts.
    counts = [control.count for control in controls] + ([] if matrix is None else [int(matrix.sum())])
    clips = min(counts, default=None)
    chance, majority, frequent = by_name.get("chance"), by_name.get("majority"), ""
    if base == "accuracy" and matrix is not None:
        shares = matrix.sum(axis=1) / matrix.sum()
        chance = 1 / len(matrix) if chance is None else chance
        place = int(shares.argmax())
        with contextlib.suppress(RaydflError, KeyError):
            trained = None if population is None else population.parts[part].class_counts()
            place = place if trained is None or majority is None else int(trained.argmax())
        majority = float(shares[place]) if majority is None else majority
        names = run.classes_of(metric)
        frequent = names[place] if place < len(names) else ""
    low, high = find_interval(base, value, clips, controls)
    return HeadlineScore(
        *(metric, split, value, clips, low, high, chance, majority, frequent),
        None if raw is None else raw.value,
        "" if raw is None else raw.name.partition(": ")[2],
    )


def find_interval(
    base: str, value: float, clips: int | None, controls: Sequence[Control]
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a score.

    Args:
        base: Base name of the score. Accuracies, AUCs and character error rates have intervals.
        value: The score.
        clips: Number of test clips. ``None``: unknown.
        controls: Controls on the same clips. They have the number of anomalous clips.

    Returns:
        Lower and upper end, ``None`` if unknown.
    """
    if not clips or not math.isfinite(value):
        return None, None
    if base == "accuracy":
        return wilson_interval(value, clips)
    if base == "cer" and value <= 1:  # the rates of clips vary at most as much as wrong and correct classes
        return wilson_interval(value, clips)
    positives = next((control.positives for control in controls if control.positives), None)
    if base == "auc" and positives and positives < clips:
        return auc_interval(value, positives, clips - positives)
    return None, None


def find_confusion(run: RunRecord, key: Key) -> NDArray[np.float64] | None:
    """Return the confusion matrix of a score's model and test set, or ``None`` if it is missing or empty."""
    _, matrix = run.confusions.get((key[0], name_beside(key[1], "confusion")), (0, None))
    return None if matrix is None or not matrix.sum() else matrix
