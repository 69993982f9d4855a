"""Metrics of predictions: what is measured, how it is pooled over clients, and what is derived from the pooled sums.

Everything that a client reports is a sum with its count, or an array of counts: pooling is addition, and a mean of
means cannot happen. What is not additive (macro-F1, the worst decile of the clients) is derived afterwards, here, from
what was pooled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from raydfl.core.errors import DataError
from raydfl.core.types import Metric, Metrics, Ratio, Scores, joined_scores


@dataclass(frozen=True, slots=True)
class Score:
    """A score: how it is shown and compared."""

    title: str
    """The name in reports."""
    higher_is_better: bool = True
    share: bool = True
    """True of a value from 0 to 1, which is shown in per cent; others are shown as they are, in ``unit``."""
    headline: bool = False
    """True of the score to look at first in a run that has it."""
    drawn: bool = True
    """True where reports draw it over the rounds."""
    unit: str = "%"


SCORES: Mapping[str, Score] = {
    "accuracy": Score("accuracy", headline=True),
    "top_k_accuracy": Score("top-k accuracy"),
    "map": Score("mean average precision", headline=True),
    "auc": Score("AUC", headline=True),
    "pauc": Score("partial AUC"),
    "eer": Score("equal error rate", higher_is_better=False),
    "dcase": Score("DCASE score", drawn=False),
    "f1": Score("F1"),
    "oracle_f1": Score("F1 at the threshold that suits the test best (oracle)", drawn=False),
    "macro_f1": Score("macro F1"),
    "average_recall": Score("average recall", drawn=False),
    "attack_success": Score("attack success", higher_is_better=False),
    "loss": Score("loss", higher_is_better=False, share=False, unit="nats"),
}
"""The scores that are compared between clients and runs, by the last part of their names, in the order in which they are shown."""

HIGHER_IS_BETTER: Mapping[str, bool] = {name: score.higher_is_better for name, score in SCORES.items()}
"""By score, True where the larger of two values is the better one."""

OF_FIT = ("loss", "steps")
"""Names that ``fit`` reports by itself."""

OF_CLIENTS = ("_client_mean", "_client_std", "_worst_decile")
"""Endings of a score's name for its summaries over clients."""

HARMONIC_MEAN = "_harmonic_mean"
"""Ending of the name of a ranking score's harmonic mean over clients."""

_OF_MACHINES = ("auc", "pauc", "dcase")
"""Scores of which it is taken, as DCASE takes it over machines."""

SHOWN = (*(name for name, score in SCORES.items() if score.headline), "attack_success")
"""The scores of a progress line, by the last part of their names."""

Average = Literal["probabilities", "logits"]
"""Outputs that are averaged over the segments of a clip."""

MAX_FALSE_POSITIVES = 0.1
"""The rate of false positives up to which the partial AUC is taken (DCASE's p)."""


def base_name(metric: str) -> str:
    """Return what a metric measures, without the model that it belongs to.

    >>> base_name("plugin/accuracy")
    'accuracy'
    """
    return metric.rpartition("/")[2]


def model_name(metric: str) -> str:
    """Return the model that a metric belongs to; empty when it names none.

    >>> model_name("plugin/accuracy")
    'plugin'
    """
    return metric.rpartition("/")[0]


def _numpy(values: ArrayLike | Tensor) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def classification_metrics(
    logits: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    clips: ArrayLike | Tensor | None,
    classes: int,
    average: Average = "probabilities",
    top_k: int | None = None,
) -> dict[str, Ratio | np.ndarray]:
    """Loss, accuracy and confusion matrix of single-label predictions.

    With ``clips``, several rows are segments of one clip: the clip is one example, its probabilities are the mean of
    the softmax over its segments (FedMLAC's protocol), or the softmax of the mean logits (FedSTAR's), and loss and
    accuracy are those of these probabilities.

    A non-finite logit makes the loss non-finite, which the pooled loss then shows; the predicted class means nothing
    then.

    Args:
        logits: float [rows, classes]: unnormalised log-probabilities.
        labels: int [rows]: class indices, 0 to classes - 1; equal within a clip.
        clips: int [rows]: which clip a row belongs to, any numbers in any order; ``None``: each row is an example.
        classes: number of classes.
        average: what the mean over a clip's segments is taken of.
        top_k: how many of the most probable classes may hold the right one; ``None``: that is not asked.

    Returns:
        ``loss`` and ``accuracy`` (ratios over the examples), with ``top_k`` also ``top_k_accuracy``, and ``confusion`` (int64
        [classes, classes]; row: truth, column: prediction). Equal probabilities are decided for the lower class index.

    Raises:
        DataError: shapes do not fit, a label is out of range, or one clip has two labels.
    """
    scores = _numpy(logits).astype(np.float64)
    truth = _numpy(labels).astype(np.int64)
    if scores.shape != (len(truth), classes):
        raise DataError(
            f"predictions of shape {list(scores.shape)} do not fit {len(truth)} labels and {classes} classes; "
            f"the model's output size must be the data's number of classes"
        )
    if truth.size and not 0 <= truth.min() <= truth.max() < classes:
        raise DataError(
            f"a label is out of range: labels go from {truth.min()} to {truth.max()}, "
            f"but there are {classes} classes (0 to {classes - 1}); check the manifest's labels"
        )
    with np.errstate(invalid="ignore", over="ignore"):  # a diverged model: its loss says so
        # Largest first taken off: beside logits of 1e17 the logarithm of the number of classes would be rounded away.
        scores = scores - scores.max(axis=1, keepdims=True, initial=-np.inf)
        log_probabilities = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        if clips is not None:
            log_probabilities, truth = _mean_over_clips(log_probabilities, truth, _numpy(clips), average)
        loss = 0.0 - log_probabilities[np.arange(len(truth)), truth].sum()  # 0.0 at best: never -0.0
    predicted = log_probabilities.argmax(axis=1)
    confusion = np.bincount(truth * classes + predicted, minlength=classes * classes).reshape(classes, classes)
    found: dict[str, Ratio | np.ndarray] = {
        "loss": Ratio(float(loss), len(truth)),
        "accuracy": Ratio(float(np.trace(confusion)), len(truth)),
    }
    if top_k is not None:
        most_probable = np.argsort(-log_probabilities, axis=1, kind="stable")[:, :top_k]
        found["top_k_accuracy"] = Ratio(float((most_probable == truth[:, None]).any(axis=1).sum()), len(truth))
    return {**found, "confusion": confusion.astype(np.int64)}


def _mean_over_clips(
    log_probabilities: NDArray[np.float64], labels: NDArray[np.int64], clips: NDArray[Any], average: Average
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return one row for each clip, log probabilities of its segments' mean, in the order of the clips' numbers."""
    if clips.shape != labels.shape:
        raise DataError(
            f"{len(clips)} clip numbers for {len(labels)} labels; every segment needs the number of its clip"
        )
    if not clips.size:
        return log_probabilities, labels
    numbers, first, clip_of_row, segments = np.unique(clips, return_index=True, return_inverse=True, return_counts=True)
    truth = labels[first]
    if (truth[clip_of_row] != labels).any():
        wrong = numbers[clip_of_row[(truth[clip_of_row] != labels).argmax()]]
        raise DataError(f"clip {wrong} has segments with different labels; a clip has one label")
    if average == "logits":  # the logarithms differ from them by a number for each row, which the softmax forgets
        sums = np.zeros((len(numbers), log_probabilities.shape[1]))
        np.add.at(sums, clip_of_row, log_probabilities)
        scores = sums / segments[:, None]
        return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True), truth
    mean = np.full((len(numbers), log_probabilities.shape[1]), -np.inf)
    # The sum is taken of logarithms: a clip whose right class got probability 1e-400 has a large loss, not an infinite
    # one.
    np.logaddexp.at(mean, clip_of_row, log_probabilities)
    return mean - np.log(segments)[:, None], truth


def pool(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Add up the metrics of several clients or batches, name by name, and join scores; a name need not be in all of them.

    Raises:
        ValueError: one name is a ratio here and an array there, or arrays of different shapes.
    """
    pooled: dict[str, Metric] = {}
    joined: dict[str, list[Scores]] = {}
    for part in parts:
        for name, value in part.items():
            so_far = pooled.get(name)
            if so_far is None:
                pooled[name] = value
            elif (
                isinstance(so_far, Scores)
                and isinstance(value, Scores)
                and kind_of_metric(so_far) == kind_of_metric(value)
            ):
                joined.setdefault(name, [so_far]).append(value)
            elif (isinstance(so_far, Ratio) and isinstance(value, Ratio)) or (
                isinstance(so_far, np.ndarray) and isinstance(value, np.ndarray) and so_far.shape == value.shape
            ):
                pooled[name] = so_far + value
            else:
                raise ValueError(
                    f"metric {name!r} cannot be pooled: {kind_of_metric(so_far)} here, {kind_of_metric(value)} there"
                )
    return pooled | {name: joined_scores(several) for name, several in joined.items()}


def kind_of_metric(value: Metric) -> str:
    """Return what has to be equal about two metrics for them to be pooled, in words."""
    if isinstance(value, Scores):
        return f"scores of clips {list(value.values.shape[1:])} with the threshold {value.threshold}"
    return f"an array {list(value.shape)}" if isinstance(value, np.ndarray) else "a ratio"


def summarise(metrics: Metrics) -> dict[str, Ratio]:
    """Return the ratios in ``metrics`` and those that its arrays and scores give.

    From ``<model>/confusion`` (int [classes, classes], row: truth) come

    - ``<model>/macro_f1``: the mean of F1 over the classes that occur in the truth or in the predictions;
    - ``<model>/average_recall``: the mean of recall over the classes that occur in the truth (unweighted average
      recall).

    Both are ratios of a sum over classes and the number of these classes: right for the data that the confusion matrix
    is of, and not to be added up over clients (:func:`pool` the confusion matrices instead).

    From :class:`Scores` ``<model>/scores`` come those of :func:`ranking_metrics`, as ``<model>/auc`` and so on.
    """
    summary: dict[str, Ratio] = {}
    for name, value in metrics.items():
        if isinstance(value, Ratio):
            summary[name] = value
        elif isinstance(value, Scores):
            prefix = name.removesuffix(base_name(name))
            summary |= {prefix + score: ratio for score, ratio in ranking_metrics(value).items()}
        elif base_name(name) == "confusion":
            prefix = name.removesuffix("confusion")
            summary[f"{prefix}macro_f1"], summary[f"{prefix}average_recall"] = _from_confusion(value)
    return summary


def reduced(metrics: Metrics) -> dict[str, Metric]:
    """Return metrics with what their scores give in the place of the scores: what a client reports."""
    kept = {name: value for name, value in metrics.items() if not isinstance(value, Scores)}
    return {**kept, **summarise({name: value for name, value in metrics.items() if isinstance(value, Scores)})}


def ranking_metrics(scores: Scores, only: Collection[str] | None = None) -> dict[str, Ratio]:
    """Return what scikit-learn's functions say of scores, each a ratio that counts the clips.

    Of values [clips]: ``auc``; ``pauc``, up to a false positive rate of 0.1, standardised (McClish); ``eer``, where the
    false positive rate equals the false negative rate; ``oracle_f1``, the largest F1 that any threshold gives; with a
    threshold ``f1``, that at it; and with groups ``dcase``, see :func:`dcase_score`. Of values [clips, classes]: ``map`` and
    ``auc``, the mean over the classes of average precision and AUC; and with a threshold ``macro_f1``. Classes of which all or
    no clips are true are left out of the mean. Where nothing can be said, because all clips or none are true, the count is 0;
    with a value that is not finite the score is NaN. ``only``: these and no others, each of which takes milliseconds.
    """
    from sklearn import metrics as sklearn_metrics  # a second that most runs need not spend

    values, truth = scores.values, scores.truth.astype(bool)
    clips = len(values)
    columns = values.reshape(clips, -1).shape[1]
    some = [column for column in range(columns) if 0 < np.count_nonzero(truth.reshape(clips, -1)[:, column]) < clips]
    several = values.ndim > 1
    names = ["map", "auc"] if several else ["auc", "pauc", "eer", "oracle_f1"]
    names += [] if scores.threshold is None else ["macro_f1" if several else "f1"]
    names += [] if scores.groups is None else ["dcase"]
    names = [name for name in names if only is None or name in only]
    if not some or not np.isfinite(values).all():
        return {name: Ratio(float("nan") if some else 0.0, clips if some else 0) for name in names}
    threshold, groups = scores.threshold, scores.groups
    chosen, ranked = (truth[:, some], values[:, some]) if several else (truth, values)
    known: dict[str, Callable[[], float]] = {
        "map": lambda: sklearn_metrics.average_precision_score(chosen, ranked, average="macro"),
        "auc": lambda: sklearn_metrics.roc_auc_score(chosen, ranked, average="macro"),
        "macro_f1": lambda: sklearn_metrics.f1_score(chosen, ranked >= threshold, average="macro", zero_division=0),
        "pauc": lambda: sklearn_metrics.roc_auc_score(chosen, ranked, max_fpr=MAX_FALSE_POSITIVES),
        "eer": lambda: _equal_error_rate(*sklearn_metrics.roc_curve(chosen, ranked, drop_intermediate=False)[:2]),
        "oracle_f1": lambda: _largest_f1(*sklearn_metrics.precision_recall_curve(chosen, ranked)[:2]),
        "f1": lambda: sklearn_metrics.f1_score(chosen, ranked >= threshold, zero_division=0),
        "dcase": lambda: math.nan if groups is None else dcase_score(values, truth, groups),
    }
    found = {name: float(known[name]()) for name in names}
    nothing = Ratio(0.0, 0)  # no machine has clips of both kinds
    return {name: nothing if np.isnan(value) else Ratio(value * clips, clips) for name, value in found.items()}


def dcase_score(values: NDArray[np.float64], truth: NDArray[np.bool_], groups: NDArray[np.int64]) -> float:
    """Return the harmonic mean of all AUCs and partial AUCs of machines, as DCASE's task 2 ranks by it since 2022.

    Of each machine one AUC for each domain, between the normal clips of that domain and all its anomalous ones, and one
    partial AUC over both domains. A machine, or a domain, of which there are no normal or no anomalous clips is left out.

    Args:
        values: [clips], the higher the stranger.
        truth: [clips], True for anomalous clips.
        groups: [clips, 2]: machine and domain, as numbers.

    Returns:
        0 to 1; NaN where no machine has clips of both kinds.
    """
    from sklearn import metrics as sklearn_metrics  # see above

    found: list[float] = []
    for machine in np.unique(groups[:, 0]).tolist():
        mine = groups[:, 0] == machine
        if truth[mine].all() or not truth[mine].any():
            continue
        found.append(sklearn_metrics.roc_auc_score(truth[mine], values[mine], max_fpr=MAX_FALSE_POSITIVES))
        for domain in np.unique(groups[mine & ~truth, 1]).tolist():
            some = mine & (truth | (groups[:, 1] == domain))
            found.append(sklearn_metrics.roc_auc_score(truth[some], values[some]))
    return harmonic_mean(found)


def harmonic_mean(values: Sequence[float]) -> float:
    """Return the harmonic mean of numbers of at least 0; 0 if one of them is, NaN of none.

    >>> harmonic_mean([1.0, 0.5])
    0.6666666666666666
    """
    return statistics.harmonic_mean(values) if values else float("nan")


def _equal_error_rate(false_positives: NDArray[np.float64], true_positives: NDArray[np.float64]) -> float:
    """Return the rate where the line through the points of a ROC curve meets false positives = false negatives."""
    above = false_positives - (1 - true_positives)  # rises from -1 to 1
    stop = int(np.argmax(above >= 0))
    share = -above[stop - 1] / (above[stop] - above[stop - 1])
    return float(false_positives[stop - 1] + share * (false_positives[stop] - false_positives[stop - 1]))


def _largest_f1(precision: NDArray[np.float64], recall: NDArray[np.float64]) -> float:
    """Return the largest F1 on a precision-recall curve."""
    return float((2 * precision * recall / np.maximum(precision + recall, 1e-300)).max())


def _from_confusion(confusion: NDArray[Any]) -> tuple[Ratio, Ratio]:
    right = np.diag(confusion).astype(np.float64)
    truth, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
    occurs = (truth + predicted) > 0
    f1 = 2 * right[occurs] / (truth + predicted)[occurs]
    recall = right[truth > 0] / truth[truth > 0]
    return Ratio(float(f1.sum()), len(f1)), Ratio(float(recall.sum()), len(recall))


def attack_success(metrics: Metrics, target: int | None) -> dict[str, Ratio]:
    """Return ``<model>/attack_success`` from each ``<model>/confusion``: the share of clips taken for the class ``target``.

    Args:
        metrics: of clips with a trigger whose true class is not the target.
    """
    found: dict[str, Ratio] = {}
    for name, value in metrics.items():
        if base_name(name) == "confusion" and target is not None and isinstance(value, np.ndarray):
            hits, clips = float(value[:, target].sum()), float(value.sum())
            found[f"{name.removesuffix('confusion')}attack_success"] = Ratio(hits, clips)
    return found


def worst_decile(values: Sequence[float] | NDArray[np.float64], higher_is_better: bool = True) -> float:
    """Return the mean over the tenth of the clients that fare worst (rounded up, so at least one client); NaN of no clients.

    >>> worst_decile([0.9] * 18 + [0.2, 0.4])
    0.30000000000000004
    """
    if not len(values):
        return float("nan")
    ordered = np.sort(np.asarray(values, np.float64))
    if np.isnan(ordered[-1]):
        return float("nan")  # sorting hides NaN at the end, where the best clients stand
    size = -(-len(ordered) // 10)
    return float((ordered[:size] if higher_is_better else ordered[-size:]).mean())


def spread(clients: Iterable[Metrics]) -> dict[str, Ratio]:
    """Return how the clients differ; each client counts once, however many examples it has.

    For each score of :data:`HIGHER_IS_BETTER` that a client has, given or derived by :func:`summarise`:
    ``<score>_client_mean``, ``<score>_client_std`` (population standard deviation) and ``<score>_worst_decile``; for
    ``auc``, ``pauc`` and ``dcase`` also ``<score>_harmonic_mean``. The count is the number of clients; clients that counted
    nothing are left out.
    """
    values: dict[str, list[float]] = {}
    for metrics in clients:
        for name, ratio in summarise(metrics).items():
            if ratio.count and base_name(name) in HIGHER_IS_BETTER:
                values.setdefault(name, []).append(ratio.value)
    result: dict[str, Ratio] = {}
    for name, numbers in values.items():
        count = len(numbers)
        with np.errstate(invalid="ignore"):  # a diverged client's infinite loss
            summary = {
                "client_mean": float(np.mean(numbers)),
                "client_std": float(np.std(numbers)),
                "worst_decile": worst_decile(numbers, HIGHER_IS_BETTER[base_name(name)]),
            }
        if base_name(name) in _OF_MACHINES:
            summary[HARMONIC_MEAN.removeprefix("_")] = harmonic_mean(numbers)
        for what, value in summary.items():
            result[f"{name}_{what}"] = Ratio(value * count, count)
    return result
