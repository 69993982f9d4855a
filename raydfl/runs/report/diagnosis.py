"""Problems of a run whose rounds are done, judged by its record alone, old runs' too. The one place of these rules.

**Diverged**: every model that was measured at the end (on the test data or on clients' own hold-out; cross-entropy and confusion
matrix are on a known scale, which a method's own training loss need not be, nor that of an objective other than classify) has

- a loss that is not finite or beyond :data:`FAR` times that of guessing, which is ``ln(classes)``; and
- no accuracy above that of always naming the most frequent class, by :data:`DEVIATIONS` standard deviations of that share;

or, whatever the losses, no such accuracy when the updates of more than half of the last round's clients were not finite. The second
condition is why noise, label noise, overconfident or personal models raise no alarm: what has learnt something has not diverged.
With a configured attack it is said, but the run is not worthless: that nothing is learnt may be what the experiment shows. Where
nothing was evaluated, a training loss that is as large, and no smaller than in the first round, is a warning.

**One class**: every prediction is right, and nothing could be learnt.

**Missing classes**: the test data have no clip of some class, of which the scores then say nothing. A warning.
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

_ADVICE = "lower train.optimiser.lr or set train.optimiser.clip_norm, and start afresh"
_NAMED = 5
"""Classes that are named one by one."""


def problems_of(run: RunRecord) -> list[Problem]:
    """Return what is wrong with a run as far as it is recorded, the worst first."""
    names = run.about.get("classes")
    classes = [str(name) for name in names] if isinstance(names, list) else []
    if len(classes) == 1:
        return _one_class(run, classes[0])
    return [*_diverged(run, len(classes)), *_missing(run)]


def _one_class(run: RunRecord, name: str) -> list[Problem]:
    """Judge a run on data of one class. A method that measures no accuracy (of anomalies, say) may well be trained on one class."""
    if not run.scores("accuracy"):
        return []
    text = f"there is one class only, {name!r}: every prediction is right and nothing was learnt; use data with two labels or more"
    return [Problem("one class", text, worthless=True)]


def _diverged(run: RunRecord, classes: int) -> list[Problem]:
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
        said = _not_finite(run)
        if not said and all(_senseless(loss, guessing) for loss, *_ in measured):
            loss, split, _ = measured[0]
            said = f"the loss on the {SPLITS.get(split, split)} is {loss:.3g}, and that of guessing {guessing:.3g}"
        worthless = not run.config.get("attack")
    else:
        if training is None or (not _classifies(run) and math.isfinite(training.last)):
            return []  # what a loss of another objective should be is not known
        if not _senseless(training.last, guessing) or training.last < training.values[0]:
            return []
        said = f"the training loss is {training.last:.3g}"
        said += f", and that of guessing {guessing:.3g}; nothing was evaluated" if _classifies(run) else ""
        worthless = False
    if not said:
        return []
    attacked = "" if not run.config.get("attack") else "; the configured attack may have done it"
    return [Problem("diverged", f"the training diverged: {said}{attacked}; {_ADVICE}", worthless)]


def _classifies(run: RunRecord) -> bool:
    objective = run.config.get("objective", "classify")
    return (objective.get("name") if isinstance(objective, Mapping) else objective) == "classify"


def _senseless(loss: float, guessing: float) -> bool:
    return not loss <= FAR * guessing  # NaN too


def _has_learnt(confusion: NDArray[np.float64]) -> bool:
    """Return whether the model is right more often than one that always names the most frequent class, beyond chance."""
    examples = confusion.sum()
    share = confusion.sum(axis=1).max() / examples
    return bool(np.trace(confusion) / examples > share + DEVIATIONS * math.sqrt(share * (1 - share) / examples))


def _not_finite(run: RunRecord) -> str:
    """Say in words that most updates of the last round's clients were not finite; empty when they were."""
    clients = run.curves.get(("server", "clients"))
    if clients is None:
        return ""
    last, number = int(clients.rounds[-1]), int(clients.last)
    bad = sum(
        round_index == last and phase == "train" and what == "failed" and why.startswith("not finite")
        for round_index, phase, _, what, why in run.incidents
    )
    return f"the updates of {bad} of {number} clients in round {last} were not finite" if 2 * bad > number else ""


def _missing(run: RunRecord) -> list[Problem]:
    """Judged by models that are shared as a whole: private ones are measured on a sample of the test data."""
    for (split, metric), (_, matrix) in run.confusions.items():
        classes = run.classes_of(metric)
        kinds = run.architectures.get(model_name(metric).rpartition(":")[2], ())
        shared = bool(kinds) and all(kind.get("shared") is True for kind in kinds)
        if split == "test" and len(matrix) == len(classes) and shared:
            absent = [name for name, clips in zip(classes, matrix.sum(axis=1), strict=True) if not clips]
            if not absent:
                continue
            named = ", ".join(repr(name) for name in absent[:_NAMED]) + (" ..." if len(absent) > _NAMED else "")
            text = f"the test data have no clip of {len(absent)} of {len(classes)} classes ({named}): scores say nothing of them"
            return [Problem("missing classes", text, worthless=False)]
    return []
