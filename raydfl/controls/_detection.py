"""Controls of anomaly detection.

A clip is described by its mean frame of features, and by its modulation spectrum. Its score is a distance from the normal
training clips of its machine, or of all machines without a column of machines in ``data.columns``:

- Mahalanobis distance of the mean frame from their mean, with a shrunk covariance;
- Euclidean distance of the mean frame from the nearest clip;
- loudness: difference between the levels (means over all features) of the clip and of their mean;
- rhythm: Mahalanobis distance of the modulation spectrum from their mean.

A client's own test uses the client's training clips, and the server's test those of all clients. Ranking metrics of several
clients are averaged with their numbers of clips, as in the metrics table of the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from raydfl.controls._clips import LIMIT, describe_clips, describe_rhythm, draw_clips
from raydfl.controls._control import RAW, Control, auc_error
from raydfl.core.metrics import ranking_metrics
from raydfl.core.types import Ratio, Scores, join_scores
from raydfl.data import Examples, Population
from raydfl.objectives import AnomalyObjective, distances

_WINDOW = 64
"""Maximum window of a modulation spectrum in frames."""
_CONSTANT = 1e-3
"""Spread of equal mean frames, relative to the spread of frames in a clip. It exceeds rounding errors of float16."""


def measure_detectors(
    data: Population, objective: AnomalyObjective, rng: np.random.Generator
) -> tuple[list[Control], str]:
    """Measure the controls of a data set with normal and anomalous test clips.

    Args:
        data: population of one part, with clips.
        objective: objective of the run.
        rng: generator that draws the training clips.

    Returns:
        The controls, and the reason for missing controls.
    """
    metric = objective.headline
    measured: dict[tuple[str, str], list[tuple[Ratio, float, int]]] = {}
    for split, normal, test in _list_tests(data, objective, rng) if objective.normal else ():
        window = min(_WINDOW, *(int(part.cut_for_test().first_view.counts.min()) for part in [*normal, *test]))
        reference, of_reference, deviation = _describe(normal, objective, window)
        tested, clips, _ = _describe(test, objective, window)
        if float(reference[0].std(dim=0, correction=0).max()) <= _CONSTANT * deviation:
            return [], (
                "Raw features have no score, because the mean frames of all clips are equal. Set data.features.normalise to "
                "client, group, part or none."
            )
        anomalous = int(clips.truth.sum())
        for name, values in _score(reference, _find_machines(of_reference), tested, _find_machines(clips)).items():
            scores = dataclasses.replace(clips, values=values.numpy())
            ratio = ranking_metrics(scores, only=(metric,)).get(metric)
            if ratio and ratio.count:
                error = auc_error(anomalous, len(values) - anomalous)
                measured.setdefault((name, split), []).append((ratio, error, anomalous))
    controls = [_average(*key, metric, results) for key, results in measured.items()]
    return controls, "" if controls else "Raw features have no score, because no test has known anomalous clips."


def _list_tests(
    data: Population, objective: AnomalyObjective, rng: np.random.Generator
) -> Iterator[tuple[str, list[Examples], list[Examples]]]:
    """Yield the split, the normal training clips and the test clips of each test with anomalies, first the server's."""

    def draw(parts: Sequence[Examples], limit: int) -> list[Examples]:
        return draw_clips([objective.normal_examples(part) for part in parts], limit, rng)

    def has_anomalies(parts: Sequence[Examples]) -> bool:
        return any(len(objective.normal_examples(part)) < len(part) for part in parts)

    normal = draw(data.read_role("train"), LIMIT)
    tests = [(split, normal, data.read_role(split)) for split in ("test", "server_validation")]
    own_splits = [split for split in ("client_test", "validation") if has_anomalies(data.read_role(split))]
    for client in range(len(data)) if own_splits else ():
        own = data.data(client)
        normal = draw([*own.pools.values()], max(2, LIMIT // len(data)))
        own_tests = {"client_test": own.test, "validation": own.validation}
        tests += [(split, normal, [own_tests[split]]) for split in own_splits]
    return (test for test in tests if test[1] and has_anomalies(test[2]))


def _describe(
    parts: Sequence[Examples], objective: AnomalyObjective, window: int
) -> tuple[tuple[Tensor, Tensor], Scores, float]:
    """Describe clips.

    Returns:
        Mean frames, float64 [clips, features], and modulation spectra, float64 [clips, ``window`` // 2]; scores of 0 with truth
        and machines of the clips; and the mean standard deviation of the features over the frames of a clip.
    """
    frames, rhythms, scores, deviations = [], [], [], []
    for part in parts:
        mean, deviation, first = describe_clips(part, 1)
        zeros = objective.metrics(torch.zeros(len(first), 1), first).get("scores")
        frames.append(mean)
        rhythms.append(describe_rhythm(part, window) if window > 1 else np.empty((len(mean), 0)))
        scores += [zeros] if isinstance(zeros, Scores) else []
        deviations.append(float(deviation.mean()))
    described = torch.from_numpy(np.concatenate(frames)), torch.from_numpy(np.concatenate(rhythms))
    return described, join_scores(scores), max(deviations)


def _find_machines(scores: Scores) -> np.ndarray:
    """Return the machine of each clip, int64 [clips]. 0 if unknown."""
    return np.zeros(len(scores.values), np.int64) if scores.groups is None else scores.groups[:, 0]


def _score(
    reference: tuple[Tensor, Tensor], machines: np.ndarray, tested: tuple[Tensor, Tensor], of_tested: np.ndarray
) -> dict[str, Tensor]:
    """Compute the scores of test clips by control, float64 [test clips]. Higher scores are more anomalous.

    Args:
        reference: mean frames and modulation spectra of the training clips, as of :func:`_describe`.
        machines: int64 [training clips]. A machine without training clips is compared with all of them.
        tested: mean frames and modulation spectra of the test clips.
        of_tested: int64 [test clips], machines.
    """
    names = ("chance", *(RAW + name for name in ("Mahalanobis distance", "nearest neighbour", "loudness", "rhythm")))
    scores = {name: torch.zeros(len(of_tested), dtype=torch.float64) for name in names}
    for machine in np.unique(of_tested):
        own, same = torch.from_numpy(machines == machine), torch.from_numpy(of_tested == machine)
        normal, rhythms = (rows[own] if own.any() else rows for rows in reference)
        clips, rhythms_of_clips = (rows[same] for rows in tested)
        scores[names[1]][same] = distances("mahalanobis", clips, normal)
        scores[names[2]][same] = distances("nearest", clips, normal)
        scores[names[3]][same] = distances("own_centre", *(x.mean(dim=1, keepdim=True) for x in (clips, normal)))
        if rhythms.shape[1]:
            scores[names[4]][same] = distances("mahalanobis", rhythms_of_clips, rhythms)
    return scores if tested[1].shape[1] else {name: scores[name] for name in names[:4]}


def _average(name: str, split: str, metric: str, results: Sequence[tuple[Ratio, float, int]]) -> Control:
    """Average the ratios and standard errors of several tests, weighted by their clips, and add their anomalous clips."""
    count = sum(int(ratio.count) for ratio, *_ in results)
    value = sum(ratio.total for ratio, *_ in results) / count
    if metric != "auc":
        return Control(name, split, metric, value, count)
    error = math.sqrt(sum((ratio.count * error) ** 2 for ratio, error, _ in results)) / count
    return Control(name, split, metric, value, count, error, sum(anomalous for *_, anomalous in results))
