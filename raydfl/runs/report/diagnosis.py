"""Problems of a run's completed rounds, detected from its metrics table. It works for old runs, too.

**Diverged**: every model in the last evaluation (on the test data or on clients' held-out clips) satisfies both conditions:

- Its loss is not finite or above :data:`FAR` times the loss of guessing, ``ln(classes)``.
- Its accuracy is at most :data:`DEVIATIONS` standard deviations above always predicting the most frequent class.

If more than half of the last round's clients had updates that were not finite, the second condition is enough. Because of it,
noise, label noise, and overconfident or personal models raise no alarm. Only cross-entropy and confusion matrices of classification
are judged, because a method's training loss has an unknown scale. With a configured attack, divergence is only a warning, because
it may be the experiment's result. A run without evaluation gets a warning if its training loss is that large and has not fallen
since the first round.

**One class**: the data have one class, so every prediction is correct.

**Missing classes**: the test data have no clip of some class, so the scores do not cover it. A warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from raydfl.core.metrics import model_name
from raydfl.core.types import Problem
from raydfl.runs.report.data import SPLITS, RunRecord

FAR = 10.0
DEVIATIONS = 3.0

_ADVICE = "Lower train.optimiser.lr or set train.optimiser.clip_norm, then start a new run"
_NAMED = 5
"""Maximum number of classes named in a message."""


def find_problems(run: RunRecord) -> list[Problem]:
    """Return the problems of a run's recorded rounds, the worst first."""
    names = run.about.get("classes")
    classes = [str(name) for name in names] if isinstance(names, list) else []
    if len(classes) == 1:
        return _check_single_class(run, classes[0])
    return [*_check_divergence(run, len(classes)), *_check_missing_classes(run)]


def _check_single_class(run: RunRecord, name: str) -> list[Problem]:
    """Check a run on data of one class. Only methods with an accuracy need several: an anomaly detector may train on one."""
    if not run.scores("accuracy"):
        return []
    text = f"the data have a single class, {name!r}, so every prediction is correct. Use data with at least two labels"
    return [Problem("one class", text, worthless=True)]


def _check_divergence(run: RunRecord, classes: int) -> list[Problem]:
    guessing = math.log(max(2, classes))
    measured = [
        (curve.last, split, matrix)
        for (split, metric), (_, matrix) in run.confusions.items()
        if matrix.sum() and (curve := run.curves.get((split, metric.removesuffix("confusion") + "loss"))) is not None
    ]
    training = run.curves.get(("train", "loss"))
    if measured:
        if any(_has_learnt(matrix) for *_, matrix in measured):
            return []
        evidence = _describe_non_finite(run)
        if not evidence and all(_is_excessive(loss, guessing) for loss, *_ in measured):
            loss, split, _ = measured[0]
            evidence = f"the loss on the {SPLITS.get(split, split)} is {loss:.3g}, the loss of guessing {guessing:.3g}"
        worthless = not run.config.get("attack")
    else:
        if training is None or (not _is_classification(run) and math.isfinite(training.last)):
            return []  # The scale of another objective's loss is unknown.
        if not _is_excessive(training.last, guessing) or training.last < training.values[0]:
            return []
        evidence = f"the training loss is {training.last:.3g}"
        evidence += f", the loss of guessing {guessing:.3g}; no model was evaluated" if _is_classification(run) else ""
        worthless = False
    if not evidence:
        return []
    attack = ". The configured attack may be the cause" if run.config.get("attack") else ""
    return [Problem("diverged", f"the training diverged: {evidence}{attack}. {_ADVICE}", worthless)]


def _is_classification(run: RunRecord) -> bool:
    objective = run.config.get("objective", "classify")
    return (objective.get("name") if isinstance(objective, Mapping) else objective) == "classify"


def _is_excessive(loss: float, guessing: float) -> bool:
    return not loss <= FAR * guessing  # True for NaN, too.


def _has_learnt(confusion: NDArray[np.float64]) -> bool:
    """Return whether a model is significantly better than always predicting the most frequent class."""
    examples = confusion.sum()
    share = confusion.sum(axis=1).max() / examples
    return bool(np.trace(confusion) / examples > share + DEVIATIONS * math.sqrt(share * (1 - share) / examples))


def _describe_non_finite(run: RunRecord) -> str:
    """Describe the non-finite updates of the last round, if they are more than half. Otherwise return an empty string."""
    clients = run.curves.get(("server", "clients"))
    if clients is None:
        return ""
    last, number = int(clients.rounds[-1]), int(clients.last)
    bad = sum(
        round_index == last and phase == "train" and incident == "failed" and reason.startswith("not finite")
        for round_index, phase, _, incident, reason in run.incidents
    )
    return f"the updates of {bad} of {number} clients in round {last} were not finite" if 2 * bad > number else ""


def _check_missing_classes(run: RunRecord) -> list[Problem]:
    """Check that the test data have all classes. Only scores of fully shared models use all test clips, so only these count."""
    for (split, metric), (_, matrix) in run.confusions.items():
        classes = run.classes_of(metric)
        kinds = run.architectures.get(model_name(metric).rpartition(":")[2], ())
        shared = bool(kinds) and all(kind.get("shared") is True for kind in kinds)
        if split == "test" and len(matrix) == len(classes) and shared:
            absent = [name for name, clips in zip(classes, matrix.sum(axis=1), strict=True) if not clips]
            if not absent:
                continue
            named = ", ".join(repr(name) for name in absent[:_NAMED]) + (" ..." if len(absent) > _NAMED else "")
            text = f"the test data have no clip of {len(absent)} of {len(classes)} classes ({named}), so scores do not cover them"
            return [Problem("missing classes", text, worthless=False)]
    return []
