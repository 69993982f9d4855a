"""The verdict on a run: whether it learnt, what limits it, and the next command. Computed from the run's folder.

**Score.** For each part of the data, the headline score of the first model in the order of the report, on the first test set of
:data:`CLIPS`. Its 95 % interval is Wilson's for an accuracy, and inverts the standard error of Hanley and McNeil for an AUC
(:mod:`raydfl.controls`). Both treat clips as independent. A character error rate has Wilson's interval, too, usually too wide, as
if each clip were right or wrong. Other scores have no interval. The run **learnt** if the interval is better than chance and than
the same answer to each clip, and the training did not diverge (diagnosis.py). It did not learn if the score itself is not better.

**Findings.** Their kinds and rules:

- ``rising``: the best value rose in the last :data:`EVALUATIONS` evaluations by :data:`RISE` points and by a standard error
  (:func:`find_plateau`, the rule of studies). The curve is that of at least :data:`HELD_OUT` held-out clips, or of the test clips.
- ``blanks``: not learnt, and the character error rate is at least :data:`EMPTY`: nearly all answers are empty.
- ``plateau``: it did not rise, or the run did not learn and its last value is not above guessing by that rise. ``loss falls``: a
  plateau, but the loss fell by :data:`LOSS_PROGRESS`.
- ``falling``: learnt, it did not rise, and the last three values are below the best by twice that rise.
- ``overfitting``: it did not rise, and the held-out loss is above its minimum by :data:`LOSS_RISE` and :data:`LOSS_LEAST`, while
  the training loss fell.
- ``few evaluations``: fewer than three evaluations, or no rise and fewer than :data:`LEAST`.
- ``rate too high``: not learnt, and the training loss of the first :data:`FIRST` rounds is not finite or rose by
  :data:`LOSS_RISE` (median), or the held-out loss exceeded :data:`GUESSING` times that of guessing and the training loss is
  still as large as that of guessing.
- ``rate too low``: not learnt, and the training loss of the first :data:`FIRST` rounds fell by less than :data:`LOSS_FALL` per
  round.
- ``labels``: not learnt, and the interval of the best raw-feature control is not above guessing by :data:`RAW_GAIN`, with at
  least :data:`FEW_TESTED` test clips. Only for accuracies. It replaces ``rate too low`` and the comparison with raw features.
- ``raw features``: the best raw-feature control is inside the interval. ``below raw features``: above it.
- ``pooled``, ``worse than pooled``, ``local``: the scores of ``run.reference``. Pooled clips are better if their interval is above
  that of the run. A federation has no shown benefit if the score of single clients is not below its interval.
- ``few clips``: fewer than 50 training clips per class (:func:`find_few_clips`). ``few test clips``: fewer than
  :data:`FEW_TESTED` test clips.
- ``never predicted``: a class has test clips, but no prediction.
- ``single clips``: more than half of the clients' held-out sets have a single clip.
- ``single classes``: more than half of the clients have training clips of a single class, and at least two. It replaces the
  rules for the learning rate.
- ``known groups``: clients are groups (speakers), and ``data.split.test`` is by clip, so that test clips are from these groups.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from raydfl.core.errors import RaydflError
from raydfl.core.metrics import SCORES, base_name
from raydfl.core.nested import get_path
from raydfl.core.part_names import qualify
from raydfl.core.types import Problem
from raydfl.data import Population
from raydfl.runs.report.data import Curve, Key, RunRecord, read_run
from raydfl.runs.report.diagnosis import find_problems
from raydfl.runs.report.headline import find_confusion, find_headlines, find_interval, measure_score, name_beside
from raydfl.runs.report.next_command import USUAL_RATES, choose_command
from raydfl.runs.report.plateau import PlateauSettings, find_plateau
from raydfl.runs.verdict import CLIPS, HeadlineScore, Verdict, find_few_clips, find_part, get_title

EVALUATIONS = 5
"""Maximum number of evaluations for the plateau rule. Shorter curves use half of their evaluations, but at least two."""
LEAST = 6
"""Smallest number of evaluations for a plateau."""
RISE = 1.0
"""Smallest relevant rise of a score, in points of per cent."""
FIRST = 10
"""Rounds that judge the learning rate."""
LOSS_FALL = 0.002
"""Smallest relative fall of the training loss per round."""
LOSS_PROGRESS = 0.02
"""Smallest relevant fall of the held-out loss in the last evaluations, relative to its first value."""
LOSS_RISE = 0.1
"""Smallest relative rise of a loss."""
LOSS_LEAST = 0.05
"""Smallest relevant rise of a cross-entropy, as a fraction of the loss of guessing. Near 0, a single clip may raise it by 10 %."""
GUESSING = 2.0
"""Largest plausible loss of an untrained model, relative to the loss of guessing ``ln(classes)``."""
EMPTY = 0.9
"""Smallest character error rate of a model whose answers are nearly all empty."""
RAW_GAIN = 0.02
"""Smallest relevant gain of raw features over guessing. It exceeds the luck of the best of two controls."""
FEW_TESTED = 100
"""Test clips. With 100, the interval of an accuracy of 50 % is 19 points wide."""
HELD_OUT = 30
"""Smallest number of held-out clips for a trend."""
_CLIENTS = 10_000
"""Maximum number of clients whose held-out sets are counted."""
_NAMED = 5


def judge(run: RunRecord, name: str = "") -> Verdict:
    """Judge a run by its recorded rounds.

    Args:
        run: The run.
        name: Folder or URI of the run in commands, quoted for a shell. Defaults to its folder.
    """
    population: Population | None = None
    with contextlib.suppress(RaydflError, OSError):  # The rules that need the list of clips are left out.
        population = Population.load(run.folder / "population", features=False)
    keys = find_headlines(run)
    scores = tuple(measure_score(run, key, population) for key in keys)
    problems = find_problems(run)
    worthless = any(problem.worthless for problem in problems)
    known = [score.learnt for score in scores if score.learnt is not None]
    learnt = False if worthless else all(known) if known else None
    findings = [finding for score in scores for finding in _check_score(run, score)]
    clips = [*_check_clips(run, keys, population)]
    # Losses of cohorts with other classes do not judge the learning rate.
    unclear = any(_doubts_labels(score) for score in scores) or any(clip.kind == "single classes" for clip in clips)
    if keys and not worthless:
        rate = [] if unclear else _check_rate(run, keys[0], learnt)
        findings = [*_judge_trend(run, keys[0], scores[0], learnt), *rate, *findings]
    if scores:
        findings += _compare_references(run, scores[0])
    findings += clips
    command = choose_command(run, learnt, {problem.kind for problem in (*problems, *findings)}, name)
    return Verdict(learnt, scores, tuple(findings), command)


# -- the score ---------------------------------------------------------------------------------------------------------


def _check_score(run: RunRecord, score: HeadlineScore) -> Iterator[Problem]:
    """Compare a score with raw features, and check the test clips."""
    mark = qualify(find_part(score.metric), ": ", "")
    if score.learnt is False and base_name(score.metric) == "cer" and score.value >= EMPTY:
        text = (
            "Nearly all answers are empty or wrong. CTC first learns that most tokens are blank, which can take many rounds. "
            "Train longer, with more local steps, or with momentum."
        )
        yield Problem("blanks", mark + text, worthless=False)
    if _doubts_labels(score):
        text = f"Raw features do not learn either ({score.raw:.3f}). Check that the labels match the recordings."
        yield Problem("labels", mark + text, worthless=False)
    elif score.raw is not None and score.low is not None and score.high is not None and score.raw >= score.low:
        kind, text = "raw features", "The interval includes the score of raw features"
        if score.raw > score.high:
            kind, text = "below raw features", "Raw features without training score higher"
        yield Problem(kind, f"{mark}{text} ({score.raw_name}, {score.raw:.3f}).", worthless=False)
    if score.clips and score.clips < FEW_TESTED and score.low is not None and score.high is not None:
        remedy = "Add test clips." if score.split == "test" else "Hold out more clips."
        text = f"{score.clips} {CLIPS[score.split]} are few: the interval has {100 * (score.high - score.low):.0f} points. {remedy}"
        yield Problem("few test clips", mark + text, worthless=False)
    matrix, names = find_confusion(run, (score.split, score.metric)), run.classes_of(score.metric)
    if matrix is not None and len(names) == len(matrix):
        tested = matrix.sum(axis=1) > 0
        never = [
            name for name, clips, shown in zip(names, tested, matrix.sum(axis=0), strict=True) if clips and not shown
        ]
        if never:
            text = f"{len(never)} of {tested.sum()} tested classes are never predicted: {_list_names(never)}."
            yield Problem("never predicted", mark + text, worthless=False)


def _compare_references(run: RunRecord, score: HeadlineScore) -> Iterator[Problem]:
    """Compare a score with the runs of ``run.reference``."""
    names = {"pooled": "The same clips pooled", "local": "Each client alone"}
    for kind, name in names.items():
        reference = _read_reference(run, kind)
        if reference is None or score.low is None or score.high is None:
            continue
        text, low, high = f"{name}: {get_title(reference.metric)} {reference.value:.3f}", reference.low, reference.high
        text += "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
        sign, worst, best = score.sign, reference.worst, score.best
        if kind == "pooled" and worst is not None and best is not None and sign * worst > sign * best:
            yield Problem("worse than pooled", f"{text}, better than the federation.", worthless=False)
        elif kind == "local" and score.worst is not None and sign * reference.value >= sign * score.worst:
            yield Problem(kind, f"{text}, so a benefit of the federation is not shown.", worthless=False)
        else:
            yield Problem(kind, f"{text}.", worthless=False)


def _read_reference(run: RunRecord, name: str) -> HeadlineScore | None:
    """Read the headline score of a reference run, or ``None`` without one."""
    folder = run.folder / "reference" / name
    if not (folder / "rows").is_dir():
        return None
    reference = read_run(folder)
    keys = find_headlines(reference)
    return measure_score(reference, keys[0], None) if keys else None


def _doubts_labels(score: HeadlineScore) -> bool:
    """Return whether neither the run nor raw features learnt, on enough test clips."""
    if score.learnt is not False or score.raw is None or score.guessing is None or (score.clips or 0) < FEW_TESTED:
        return False
    low, _ = find_interval(base_name(score.metric), score.raw, score.clips, ())
    return low is not None and low <= score.guessing + RAW_GAIN


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
    return ", ".join(map(repr, names[:_NAMED])) + more


# -- the curve ---------------------------------------------------------------------------------------------------------


def _count_last(curve: Curve) -> int:
    """Return the number of last evaluations for the plateau rule."""
    return min(EVALUATIONS, max(2, len(curve.trained) // 2))


def _gain(curve: Curve, rise: float, sign: float = 1.0) -> float | None:
    """Return the gain of the best value in the last evaluations, or ``None`` at a plateau by :func:`find_plateau`.

    Args:
        curve: At least three values after round 0.
        rise: Smallest relevant rise.
        sign: 1 if larger values are better, otherwise -1.
    """
    window = _count_last(curve)
    best = np.maximum.accumulate(np.nan_to_num(sign * curve.trained, nan=-np.inf))[-window - 1 :]
    rounds = curve.rounds[-window - 1 :]
    flat = find_plateau(Curve(rounds, best, best), PlateauSettings(evaluations=window, rise=rise)) is not None
    return None if flat else float(best[-1] - best[0])


def _judge_trend(run: RunRecord, key: Key, score: HeadlineScore, learnt: bool | None) -> Iterator[Problem]:
    """Judge the trend of the held-out score and loss."""
    metric = key[1]
    split = next(
        (name for name in ("validation", "server_validation") if _count_clips(run, (name, metric)) >= HELD_OUT), key[0]
    )
    curve, loss = run.curves[split, metric], run.curves.get((split, name_beside(metric, "loss")))
    shown = SCORES[base_name(metric)]
    count = len(curve.trained)
    if count < 3:
        text = f"Too few evaluations for a trend: {count}. Train for more rounds, or lower evaluate.every."
        yield Problem("few evaluations", text, worthless=False)
        return
    scale, sign = 100.0 if shown.share else 1.0, 1.0 if shown.higher_is_better else -1.0
    values = Curve(curve.rounds, scale * curve.values, curve.totals)
    rise = (
        max(RISE, scale * _estimate_error(run, (split, metric), score))
        if shown.share
        else LOSS_FALL * abs(float(curve.trained[0]))
    )
    where = f"the last {_count_last(curve)} evaluations"
    falling = (
        loss is not None
        and len(loss.trained) > 2
        and _gain(loss, LOSS_PROGRESS * abs(loss.trained[0]), -1.0) is not None
    )
    more = " The loss still falls." * falling
    is_accuracy = base_name(metric) == "accuracy"
    least = LOSS_LEAST * math.log(max(2, len(run.classes_of(metric)))) if is_accuracy else 0.0
    stuck = (
        learnt is False
        and shown.share
        and score.guessing is not None
        and sign * (values.last - scale * score.guessing) < rise
    )
    gain = None if stuck else _gain(values, rise, sign)  # Scores near guessing vary by chance.
    lost = float((sign * values.trained).max() - (sign * values.trained[-3:]).max())
    name = f"The {get_title(metric)} on {CLIPS[split]}"
    if gain is not None:
        amount = f"{gain:.1f} points" if shown.share else f"{gain:.3g}"
        yield Problem("rising", f"{name} still improves, by {amount} in {where}.{more}", worthless=False)
    elif lost >= 2 * rise and learnt is not False:  # Scores of untrained models vary widely.
        best = int(curve.rounds[curve.rounds > 0][(sign * values.trained).argmax()])
        amount = f"{lost:.1f} points" if shown.share else f"{lost:.3g}"
        yield Problem("falling", f"{name} is {amount} worse than in round {best}.", worthless=False)
    elif loss is not None and (low := _find_overfitting(loss, run.curves.get(("train", "loss")), least)) is not None:
        text = (
            f"Overfitting: the loss on {CLIPS[split]} rose from {loss.trained.min():.3f} in round {low} to {loss.last:.3f}, "
            f"while the training loss fell."
        )
        yield Problem("overfitting", text, worthless=False)
    elif count < LEAST:
        text = f"Too few evaluations to see a plateau: {count}. Train for more rounds, or lower evaluate.every."
        yield Problem("few evaluations", text, worthless=False)
    else:
        plateau = f"is at a plateau: less than {rise:.1f} points gained in {where}"
        text = f"{name} {'stays near guessing' if stuck else plateau}.{more}"
        yield Problem("loss falls" if falling else "plateau", text, worthless=False)


def _count_clips(run: RunRecord, key: Key) -> int:
    """Count the clips of the last value of a score. 0 without a confusion matrix."""
    matrix = find_confusion(run, key)
    return 0 if matrix is None or key not in run.curves else int(matrix.sum())


def _estimate_error(run: RunRecord, key: Key, score: HeadlineScore) -> float:
    """Estimate the standard error of the last value of a curve. 0: unknown."""
    clips = _count_clips(run, key) or score.clips
    controls = [control for control in run.controls if control.split == score.split]  # of the score's clips
    low, high = find_interval(base_name(key[1]), run.curves[key].last, clips, controls)
    return 0.0 if low is None or high is None else (high - low) / 3.92


def _find_overfitting(loss: Curve, training: Curve | None, least: float) -> int | None:
    """Return the round of the smallest held-out loss if the loss rose since, by at least ``least``, and the training loss fell."""
    rounds, values = loss.rounds[loss.rounds > 0], loss.trained
    if training is None or not np.isfinite(values).all():
        return None
    low = int(rounds[values.argmin()])
    before = training.values[training.rounds <= low]
    rose = values[-1] > max((1 + LOSS_RISE) * values.min(), values.min() + least)
    return low if rose and len(before) and training.last < before[-1] else None


def _check_rate(run: RunRecord, key: Key, learnt: bool | None) -> Iterator[Problem]:
    """Judge the learning rate by the losses of the first rounds. The scale of a training loss is unknown."""
    training, rate = run.curves.get(("train", "loss")), get_path(run.config, "train.optimiser.lr")
    if learnt is not False or training is None or rate is None:
        return
    losses = training.values[:FIRST]
    held_out = run.curves.get((key[0], name_beside(key[1], "loss")))
    guessing = math.log(max(2, len(run.classes_of(key[1]))))
    untrained = losses[-1] > 0.9 * guessing  # Overfitted models have a large held-out loss, too.
    far = base_name(key[1]) == "accuracy" and held_out is not None and held_out.trained.max() > GUESSING * guessing
    wild = far and untrained
    first, later = losses[0], float(np.median(losses[1:])) if len(losses) > 1 else float(losses[0])
    if wild or not np.isfinite(losses).all() or later > (1 + LOSS_RISE) * first:
        if held_out is not None and wild:
            evidence = f"the loss reached {held_out.trained.max():.3g}, and that of guessing is {guessing:.3g}"
        else:
            evidence = f"the training loss went from {first:.3g} to {later:.3g} in the first {len(losses)} rounds"
        text = f"The learning rate {rate:g} is probably too high: {evidence}."
        yield Problem("rate too high", text, worthless=False)
    elif len(losses) > 2 and (fall := (first - losses[-3:].min()) / abs(first) / (len(losses) - 1)) < LOSS_FALL:
        high = rate > USUAL_RATES.get(str(get_path(run.config, "train.optimiser.name")), math.inf)
        text = (
            f"The training loss fell by only {100 * max(0.0, fall):.2g} % per round in the first {len(losses)} rounds: the "
            f"learning rate {rate:g} is probably too {'high' if high else 'low'}."
        )
        yield Problem("rate too high" if high else "rate too low", text, worthless=False)


# -- the clips ---------------------------------------------------------------------------------------------------------


def _check_clips(run: RunRecord, keys: Sequence[Key], population: Population | None) -> Iterator[Problem]:
    """Count the training clips of classes and the held-out clips of clients."""
    if population is None or not population.has_clips:
        return
    if any(base_name(metric) in ("accuracy", "map") for _, metric in keys):
        kind, name = (get_path(run.config, f"data.{key}") for key in ("features.kind", "name"))
        yield from (Problem("few clips", text, worthless=False) for text in find_few_clips(population, kind, name))
        yield from _check_clients(population)
    if any(split == "test" and base_name(metric) == "accuracy" for split, metric in keys):
        yield from _check_groups(run)
    for split, setting in (("validation", "data.split.validation"), ("client_test", "data.split.client_test")):
        if not any(measured == split for measured, _ in run.scores()):
            continue
        sizes = population.label_counts(split, slice(_CLIENTS)).sum(axis=1)  # type: ignore[arg-type]
        alone, sets = np.count_nonzero(sizes == 1), np.count_nonzero(sizes)
        if 2 * alone > sets:
            text = (
                f"{alone} of {sets} clients have a single held-out clip, so their scores are 0 or 1. Raise {setting}."
            )
            yield Problem("single clips", text, worthless=False)


def _check_clients(population: Population) -> Iterator[Problem]:
    """Count the clients with a single class."""
    counts = population.label_counts("train", slice(_CLIENTS))
    sizes = counts.sum(axis=1)
    alone = np.count_nonzero((np.count_nonzero(counts, axis=1) == 1) & (sizes > 1))
    clients = np.count_nonzero(sizes)
    if np.count_nonzero(counts.sum(axis=0)) > 1 and 2 * alone > clients:
        text = (
            f"{alone} of {clients} clients have clips of a single class, so their updates favour this class. Lower "
            f"train.local_epochs, raise train.cohort, or choose another method (fedlc, scaffold)."
        )
        yield Problem("single classes", text, worthless=False)


def _check_groups(run: RunRecord) -> Iterator[Problem]:
    """Report test clips of the training speakers. The groups of an official split are unknown."""
    partition = get_path(run.config, "data.partition") or {}
    if (
        get_path(run.config, "data.split.test.by") == "clip"
        and partition.get("by") == "group"
        and not partition.get("column")
    ):
        text = (
            "The test clips are from the clients' own groups, so the score does not hold for new speakers or devices. Hold out "
            "groups: data.split.test='{by: group, fraction: 0.2}'."
        )
        yield Problem("known groups", text, worthless=False)
