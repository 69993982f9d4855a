"""Metrics of predictions, their pooling over clients, and scores derived from pooled values.

Clients report sums with counts, or arrays of counts. Pooling adds them, so no result is a mean of means. Scores that are not
additive (macro-F1, the worst decile of the clients) are derived from the pooled values.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from raydfl.core.errors import DataError
from raydfl.core.psds import COUNTS, SCENARIOS, compute_psds, count_events
from raydfl.core.types import Metric, Metrics, Ratio, Scores, join_scores


@dataclass(frozen=True, slots=True)
class Score:
    """Display and comparison of a score."""

    title: str
    """The name in reports."""
    higher_is_better: bool = True
    share: bool = True
    """Whether the value is from 0 to 1 and shown in per cent. False: shown unscaled, in ``unit``."""
    headline: bool = False
    """Whether it is the main score of a run."""
    drawn: bool = True
    """Whether reports plot it over the rounds."""
    unit: str = "%"


SCORES: Mapping[str, Score] = {
    "accuracy": Score("accuracy", headline=True),
    "top_k_accuracy": Score("top-k accuracy"),
    "map": Score("mean average precision", headline=True),
    "auc": Score("AUC", headline=True),
    "pauc": Score("partial AUC"),
    "eer": Score("equal error rate", higher_is_better=False, headline=True),
    "min_dcf": Score("minimum detection cost", higher_is_better=False, share=False, unit="relative"),
    "dcase": Score("DCASE score", drawn=False),
    "f1": Score("F1"),
    "precision": Score("precision", drawn=False),
    "recall": Score("recall", drawn=False),
    "oracle_f1": Score("F1 at the threshold that suits the test best (oracle)", drawn=False),
    "oracle_precision": Score("precision at the threshold with the largest F1 on the test (oracle)", drawn=False),
    "oracle_recall": Score("recall at the threshold with the largest F1 on the test (oracle)", drawn=False),
    "macro_f1": Score("macro F1"),
    "average_recall": Score("average recall", drawn=False),
    "psds1": Score("PSDS 1 (exact times)", headline=True),
    "psds2": Score("PSDS 2 (few confusions)"),
    "segment_f1": Score("F1 of segments of 1 s"),
    "cer": Score("character error rate", higher_is_better=False, headline=True),
    "wer": Score("word error rate", higher_is_better=False),
    "attack_success": Score("attack success", higher_is_better=False),
    "loss": Score("loss", higher_is_better=False, share=False, unit="nats"),
}
"""Scores for comparisons between clients and runs, by base name, in display order."""

HIGHER_IS_BETTER: Mapping[str, bool] = {name: score.higher_is_better for name, score in SCORES.items()}
"""Whether larger values are better, by the score's base name."""

OF_FIT = ("loss", "steps")
"""Names of the metrics that ``fit`` adds."""

OF_CLIENTS = ("_client_mean", "_client_std", "_worst_decile")
"""Suffixes of a score's summaries over clients."""

HARMONIC_MEAN = "_harmonic_mean"
"""Suffix of a ranking score's harmonic mean over clients."""

_OF_MACHINES = ("auc", "pauc", "dcase")
"""Scores with a harmonic mean, as in DCASE over machines."""

SHOWN = (*(name for name, score in SCORES.items() if score.headline and name != "eer"), "attack_success")
"""Scores of the progress line, by base name, in addition to the objective's headline. Runs with an AUC need no ``eer`` there."""

Average = Literal["probabilities", "logits"]
"""The outputs to average over the segments of a clip."""

SAME_SPEAKER = 0.01
"""Prior probability of a positive pair in the detection cost (NIST's speaker recognition evaluations)."""

MAX_FALSE_POSITIVES = 0.1
"""Upper limit of the false positive rate in the partial AUC (DCASE's p)."""


def base_name(metric: str) -> str:
    """Return a metric's name without its model.

    >>> base_name("plugin/accuracy")
    'accuracy'
    """
    return metric.rpartition("/")[2]


def model_name(metric: str) -> str:
    """Return the model in a metric's name, or an empty string.

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
    """Compute loss, accuracy and confusion matrix of single-label predictions.

    With ``clips``, rows are segments, and each clip is one example. Its probabilities are the mean of the softmax over its segments
    (FedMLAC's protocol), or the softmax of the mean logits (FedSTAR's).

    A non-finite logit makes the loss non-finite. The predicted class is then meaningless.

    Args:
        logits: float [rows, classes]: unnormalised log-probabilities.
        labels: int [rows]: class indices, 0 to classes - 1, equal within a clip.
        clips: int [rows]: the clip of each row, any integers in any order. ``None``: each row is an example.
        classes: number of classes.
        average: outputs to average over a clip's segments.
        top_k: number of classes for the top-k accuracy. ``None``: omit it.

    Returns:
        ``loss`` and ``accuracy`` (ratios over the examples), with ``top_k`` also ``top_k_accuracy``, and ``confusion`` (int64
        [classes, classes]; row: truth, column: prediction). Ties go to the lower class index.

    Raises:
        DataError: shapes do not match, a label is out of range, or a clip has two labels.
    """
    scores = _numpy(logits).astype(np.float64)
    truth = _numpy(labels).astype(np.int64)
    if scores.shape != (len(truth), classes):
        raise DataError(
            f"predictions of shape {list(scores.shape)} do not fit {len(truth)} labels and {classes} classes. "
            f"The model's output size must be the data's number of classes."
        )
    if truth.size and not 0 <= truth.min() <= truth.max() < classes:
        raise DataError(
            f"a label is out of range: labels go from {truth.min()} to {truth.max()}, "
            f"but the model has {classes} classes (0 to {classes - 1}). Check the manifest's labels."
        )
    with np.errstate(invalid="ignore", over="ignore"):  # a diverged model shows in the loss
        # Subtract the largest first: next to logits of 1e17 the logarithm of the number of classes would round to nothing.
        scores = scores - scores.max(axis=1, keepdims=True, initial=-np.inf)
        log_probabilities = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        if clips is not None:
            log_probabilities, truth = _mean_over_clips(log_probabilities, truth, _numpy(clips), average)
        loss = 0.0 - log_probabilities[np.arange(len(truth)), truth].sum()  # 0.0 minus the sum: never -0.0
    predicted = log_probabilities.argmax(axis=1)
    confusion = np.bincount(truth * classes + predicted, minlength=classes * classes).reshape(classes, classes)
    metrics: dict[str, Ratio | np.ndarray] = {
        "loss": Ratio(float(loss), len(truth)),
        "accuracy": Ratio(float(np.trace(confusion)), len(truth)),
    }
    if top_k is not None:
        # A stable sort prefers the lower class index in ties, as argmax does.
        most_probable = np.argsort(-log_probabilities, axis=1, kind="stable")[:, :top_k]
        metrics["top_k_accuracy"] = Ratio(float((most_probable == truth[:, None]).any(axis=1).sum()), len(truth))
    return {**metrics, "confusion": confusion.astype(np.int64)}


def _mean_over_clips(
    log_probabilities: NDArray[np.float64], labels: NDArray[np.int64], clips: NDArray[Any], average: Average
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Average log-probabilities over the segments of each clip: float64 [clips, classes] and int64 [clips], by clip number."""
    if clips.shape != labels.shape:
        raise DataError(
            f"{len(clips)} clip numbers for {len(labels)} labels. Every segment needs the number of its clip."
        )
    if not clips.size:
        return log_probabilities, labels
    numbers, first, clip_of_row, segments = np.unique(clips, return_index=True, return_inverse=True, return_counts=True)
    truth = labels[first]
    if (truth[clip_of_row] != labels).any():
        wrong = numbers[clip_of_row[(truth[clip_of_row] != labels).argmax()]]
        raise DataError(f"clip {wrong} has segments with different labels. Give all segments of a clip the same label.")
    if average == "logits":  # log-probabilities are logits less a constant for each row, and the softmax ignores it
        sums = np.zeros((len(numbers), log_probabilities.shape[1]))
        np.add.at(sums, clip_of_row, log_probabilities)
        scores = sums / segments[:, None]
        return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True), truth
    mean = np.full((len(numbers), log_probabilities.shape[1]), -np.inf)
    # Sum logarithms: a clip with probability 1e-400 for its true class has a large loss, not an infinite one.
    np.logaddexp.at(mean, clip_of_row, log_probabilities)
    return mean - np.log(segments)[:, None], truth


def count_edits(truth: Sequence[object], answer: Sequence[object]) -> int:
    """Count the substitutions, deletions and insertions from a sequence to an answer (Levenshtein distance)."""
    row: list[int] = [*range(len(answer) + 1)]
    for number, unit in enumerate(truth, 1):
        diagonal, row[0] = row[0], number
        for place, other in enumerate(answer, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (unit != other))
    return row[-1]


def pool(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Pool metrics of several clients or batches by name: add ratios and arrays, join scores. Each may lack some names.

    Raises:
        ValueError: a name's values differ in kind, or in the shape of their arrays.
    """
    pooled: dict[str, Metric] = {}
    several: dict[str, list[Scores]] = {}
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
                several.setdefault(name, [so_far]).append(value)
            elif (isinstance(so_far, Ratio) and isinstance(value, Ratio)) or (
                isinstance(so_far, np.ndarray) and isinstance(value, np.ndarray) and so_far.shape == value.shape
            ):
                pooled[name] = so_far + value
            else:
                raise ValueError(
                    f"metric {name!r} cannot be pooled: {kind_of_metric(so_far)} here, {kind_of_metric(value)} there. "
                    f"Report the same kind from every client."
                )
    return pooled | {name: join_scores(parts) for name, parts in several.items()}


def kind_of_metric(value: Metric) -> str:
    """Describe a metric's kind. Metrics of equal kinds can be pooled."""
    if isinstance(value, Scores):
        return f"scores of clips {list(value.values.shape[1:])} with the threshold {value.threshold}"
    return f"an array {list(value.shape)}" if isinstance(value, np.ndarray) else "a ratio"


def summarise(metrics: Metrics) -> dict[str, Ratio]:
    """Reduce metrics to ratios: keep ratios, and derive scores from confusion matrices and :class:`Scores`.

    ``<model>/confusion`` (int [classes, classes], row: truth) gives

    - ``<model>/macro_f1``: the mean F1 over the classes in the truth or in the predictions;
    - ``<model>/average_recall``: the mean recall over the classes in the truth (unweighted average recall).

    Both are ratios of a sum over classes to the number of classes. Do not add them up over clients: :func:`pool` the confusion
    matrices instead.

    ``<model>/detections`` (:func:`raydfl.core.psds.count_detections`) gives ``<model>/psds1`` and ``<model>/psds2``, as ratios
    whose count is the number of events.

    ``<model>/scores`` gives the results of :func:`ranking_metrics`, such as ``<model>/auc``.
    """
    summary: dict[str, Ratio] = {}
    for name, value in metrics.items():
        if isinstance(value, Ratio):
            summary[name] = value
        elif isinstance(value, Scores):
            prefix = name.removesuffix(base_name(name))
            summary |= {prefix + score: ratio for score, ratio in ranking_metrics(value).items()}
        elif base_name(name) == COUNTS:
            count = count_events(value)
            for score in SCENARIOS:
                psds = compute_psds(value, score) if count else 0.0
                summary[name.removesuffix(COUNTS) + score] = Ratio(psds * count, count)
        elif base_name(name) == "confusion":
            prefix = name.removesuffix("confusion")
            summary[f"{prefix}macro_f1"], summary[f"{prefix}average_recall"] = _score_confusion(value)
    return summary


def reduce_scores(metrics: Metrics) -> dict[str, Metric]:
    """Replace :class:`Scores` by their ranking metrics, because scores of single clips never leave a client."""
    additive = {name: value for name, value in metrics.items() if not isinstance(value, Scores)}
    return {**additive, **summarise({name: value for name, value in metrics.items() if isinstance(value, Scores)})}


def ranking_metrics(scores: Scores, only: Collection[str] | None = None) -> dict[str, Ratio]:
    """Compute ranking metrics with scikit-learn, as ratios over the clips.

    Values [clips] give

    - ``auc``, and ``pauc`` up to a false positive rate of 0.1, standardised (McClish);
    - ``eer``, the false positive rate where it equals the false negative rate;
    - ``oracle_f1``, the largest F1 over all thresholds, with ``oracle_precision`` and ``oracle_recall`` at the lowest of its
      thresholds;
    - ``f1``, ``precision`` and ``recall`` if the scores have a threshold;
    - ``dcase`` if the scores have groups (:func:`dcase_score`).

    Values of pairs give only ``eer`` and ``min_dcf`` (:func:`_compute_detection_cost`).

    Values [clips, classes] give ``map`` and ``auc``, the means over the classes of average precision and AUC, and with a threshold
    ``macro_f1``. The means omit classes without positive or without negative clips. Scores without both kinds of clips have the
    count 0. A non-finite value makes the score NaN.

    Args:
        scores: of one kind.
        only: names to compute, to save milliseconds for each of the rest. ``None``: all.
    """
    from sklearn import metrics as sklearn_metrics  # the import takes a second, and most runs do not need it

    values, truth = scores.values, scores.truth.astype(bool)
    clips = len(values)
    columns = values.reshape(clips, -1).shape[1]
    mixed = [column for column in range(columns) if 0 < np.count_nonzero(truth.reshape(clips, -1)[:, column]) < clips]
    several = values.ndim > 1
    names = ["map", "auc"] if several else ["auc", "pauc", "eer", "oracle_f1", "oracle_precision", "oracle_recall"]
    if scores.threshold is not None:
        names += ["macro_f1"] if several else ["f1", "precision", "recall"]
    names += [] if scores.groups is None else ["dcase"]
    if scores.of_pairs:
        names = ["eer", "min_dcf"]
    names = [name for name in names if only is None or name in only]
    if not mixed or not np.isfinite(values).all():
        return {name: Ratio(float("nan") if mixed else 0.0, clips if mixed else 0) for name in names}
    threshold, groups = scores.threshold, scores.groups
    targets, ranked = (truth[:, mixed], values[:, mixed]) if several else (truth, values)

    @functools.cache
    def find_rates() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        false_positives, true_positives, _ = sklearn_metrics.roc_curve(targets, ranked, drop_intermediate=False)
        return false_positives, true_positives

    @functools.cache
    def find_oracle() -> tuple[float, float, float]:
        return _find_largest_f1(*sklearn_metrics.precision_recall_curve(targets, ranked)[:2])

    functions: dict[str, Callable[[], float]] = {
        "map": lambda: sklearn_metrics.average_precision_score(targets, ranked, average="macro"),
        "auc": lambda: sklearn_metrics.roc_auc_score(targets, ranked, average="macro"),
        "macro_f1": lambda: sklearn_metrics.f1_score(targets, ranked >= threshold, average="macro", zero_division=0),
        "pauc": lambda: sklearn_metrics.roc_auc_score(targets, ranked, max_fpr=MAX_FALSE_POSITIVES),
        "eer": lambda: _compute_equal_error_rate(*find_rates()),
        "min_dcf": lambda: _compute_detection_cost(*find_rates()),
        "oracle_f1": lambda: find_oracle()[0],
        "oracle_precision": lambda: find_oracle()[1],
        "oracle_recall": lambda: find_oracle()[2],
        "f1": lambda: sklearn_metrics.f1_score(targets, ranked >= threshold, zero_division=0),
        "precision": lambda: sklearn_metrics.precision_score(targets, ranked >= threshold, zero_division=0),
        "recall": lambda: sklearn_metrics.recall_score(targets, ranked >= threshold, zero_division=0),
        "dcase": lambda: math.nan if groups is None else dcase_score(values, truth, groups),
    }
    results = {name: float(functions[name]()) for name in names}
    undefined = Ratio(0.0, 0)  # no machine has clips of both kinds
    return {name: undefined if np.isnan(value) else Ratio(value * clips, clips) for name, value in results.items()}


def dcase_score(values: NDArray[np.float64], truth: NDArray[np.bool_], groups: NDArray[np.int64]) -> float:
    """Return the harmonic mean of the machines' AUCs and partial AUCs, the ranking of DCASE's task 2 since 2022.

    Each machine has an AUC for each domain, between the domain's normal clips and all anomalous clips of the machine, and a
    partial AUC over both domains. Machines and domains without normal or without anomalous clips are omitted.

    Args:
        values: float64 [clips]: anomaly scores.
        truth: bool [clips]: True for anomalous clips.
        groups: int64 [clips, 2]: indices of machine and domain.

    Returns:
        0 to 1; NaN if no machine has both kinds of clips.
    """
    from sklearn import metrics as sklearn_metrics  # see above

    areas: list[float] = []
    for machine in np.unique(groups[:, 0]).tolist():
        same = groups[:, 0] == machine
        if truth[same].all() or not truth[same].any():
            continue
        areas.append(sklearn_metrics.roc_auc_score(truth[same], values[same], max_fpr=MAX_FALSE_POSITIVES))
        for domain in np.unique(groups[same & ~truth, 1]).tolist():
            chosen = same & (truth | (groups[:, 1] == domain))
            areas.append(sklearn_metrics.roc_auc_score(truth[chosen], values[chosen]))
    return harmonic_mean(areas)


def harmonic_mean(values: Sequence[float]) -> float:
    """Return the harmonic mean of non-negative values. It is 0 if a value is 0, and NaN without values.

    >>> harmonic_mean([1.0, 0.5])
    0.6666666666666666
    """
    return statistics.harmonic_mean(values) if values else float("nan")


def _compute_equal_error_rate(false_positives: NDArray[np.float64], true_positives: NDArray[np.float64]) -> float:
    """Return the false positive rate where it equals the false negative rate, by linear interpolation of a ROC curve."""
    above = false_positives - (1 - true_positives)  # rises from -1 to 1
    stop = int(np.argmax(above >= 0))
    share = -above[stop - 1] / (above[stop] - above[stop - 1])
    return float(false_positives[stop - 1] + share * (false_positives[stop] - false_positives[stop - 1]))


def _compute_detection_cost(false_positives: NDArray[np.float64], true_positives: NDArray[np.float64]) -> float:
    """Return NIST's minimum detection cost of a ROC curve, with costs of 1, relative to accepting or rejecting all pairs.

    With the prior p = :data:`SAME_SPEAKER`: min over thresholds of (p miss + (1 - p) false alarm) / min(p, 1 - p).
    """
    prior = SAME_SPEAKER
    costs = prior * (1 - true_positives) + (1 - prior) * false_positives
    return float(costs.min()) / min(prior, 1 - prior)


def _find_largest_f1(precision: NDArray[np.float64], recall: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the largest F1 on a precision-recall curve, with its precision and recall."""
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    best = int(f1.argmax())
    return float(f1[best]), float(precision[best]), float(recall[best])


def _score_confusion(confusion: NDArray[Any]) -> tuple[Ratio, Ratio]:
    """Compute macro-F1 and average recall from a confusion matrix."""
    right = np.diag(confusion).astype(np.float64)
    truth, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
    occurs = (truth + predicted) > 0
    f1 = 2 * right[occurs] / (truth + predicted)[occurs]
    recall = right[truth > 0] / truth[truth > 0]
    return Ratio(float(f1.sum()), len(f1)), Ratio(float(recall.sum()), len(recall))


def attack_success(metrics: Metrics, target: int | None) -> dict[str, Ratio]:
    """Return ``<model>/attack_success`` for each ``<model>/confusion``: the fraction of clips predicted as ``target``.

    Args:
        metrics: metrics of clips with a trigger and with a true class other than the target.
        target: index of the attacker's class. ``None``: no results.
    """
    successes: dict[str, Ratio] = {}
    for name, value in metrics.items():
        if base_name(name) == "confusion" and target is not None and isinstance(value, np.ndarray):
            hits, clips = float(value[:, target].sum()), float(value.sum())
            successes[f"{name.removesuffix('confusion')}attack_success"] = Ratio(hits, clips)
    return successes


def worst_decile(values: Sequence[float] | NDArray[np.float64], higher_is_better: bool = True) -> float:
    """Return the mean over the worst tenth of the clients, rounded up to at least one client. NaN without clients.

    >>> worst_decile([0.9] * 18 + [0.2, 0.4])
    0.30000000000000004
    """
    if not len(values):
        return float("nan")
    ordered = np.sort(np.asarray(values, np.float64))
    if np.isnan(ordered[-1]):
        return float("nan")  # sorting puts NaN last, among the best clients
    size = -(-len(ordered) // 10)
    return float((ordered[:size] if higher_is_better else ordered[-size:]).mean())


def spread(clients: Iterable[Metrics]) -> dict[str, Ratio]:
    """Summarise the spread of scores over clients. All clients have equal weight.

    Each score of :data:`HIGHER_IS_BETTER`, reported or derived by :func:`summarise`, gives ``<score>_client_mean``,
    ``<score>_client_std`` (population standard deviation) and ``<score>_worst_decile``; ``auc``, ``pauc`` and ``dcase`` also give
    ``<score>_harmonic_mean``. The count is the number of clients with a count above 0.
    """
    values: dict[str, list[float]] = {}
    for metrics in clients:
        for name, ratio in summarise(metrics).items():
            if ratio.count and base_name(name) in HIGHER_IS_BETTER:
                values.setdefault(name, []).append(ratio.value)
    result: dict[str, Ratio] = {}
    for name, scores in values.items():
        count = len(scores)
        with np.errstate(invalid="ignore"):  # a diverged client's infinite loss
            summary = {
                "client_mean": float(np.mean(scores)),
                "client_std": float(np.std(scores)),
                "worst_decile": worst_decile(scores, HIGHER_IS_BETTER[base_name(name)]),
            }
        if base_name(name) in _OF_MACHINES:
            summary[HARMONIC_MEAN.removeprefix("_")] = harmonic_mean(scores)
        for suffix, value in summary.items():
            result[f"{name}_{suffix}"] = Ratio(value * count, count)
    return result
