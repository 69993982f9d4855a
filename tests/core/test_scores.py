"""Scores of single clips, pooled over shards and reduced. Oracle: scikit-learn over all clips."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference

from raydfl.core.metrics import SCORES, pool, ranking_metrics, reduce_scores, spread, summarise
from raydfl.core.types import Ratio, Scores


def draw_scores(seed: int, clips: int, classes: int = 0, ties: bool = False) -> Scores:
    rng = np.random.default_rng(seed)
    shape = (clips, classes) if classes else (clips,)
    truth = rng.random(shape) < 0.4
    values = truth * 0.7 + rng.random(shape)
    return Scores(np.round(values, 1) if ties else values, truth, 0.6)


def split_scores(scores: Scores, places: list[int]) -> list[dict[str, Scores]]:
    edges = [0, *sorted(place % (len(scores.values) + 1) for place in places), len(scores.values)]
    return [
        {"model/scores": Scores(scores.values[a:b], scores.truth[a:b], scores.threshold)}
        for a, b in itertools.pairwise(edges)
    ]


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(20, 60), st.booleans(), st.lists(st.integers(0, 60), max_size=5))
def test_pooled_scores_match_scikit_learn(seed: int, clips: int, ties: bool, places: list[int]) -> None:
    whole = draw_scores(seed, clips, ties=ties)
    summary = summarise(pool(split_scores(whole, places)))
    if whole.truth.all() or not whole.truth.any():
        assert summary["model/auc"].count == 0
        return
    expected = {
        "auc": reference.roc_auc_score(whole.truth, whole.values),
        "pauc": reference.roc_auc_score(whole.truth, whole.values, max_fpr=0.1),
        "f1": reference.f1_score(whole.truth, whole.values >= 0.6, zero_division=0),
        "precision": reference.precision_score(whole.truth, whole.values >= 0.6, zero_division=0),
        "recall": reference.recall_score(whole.truth, whole.values >= 0.6, zero_division=0),
    }
    for name, value in expected.items():
        assert summary[f"model/{name}"].value == pytest.approx(value, abs=1e-12), name
        assert summary[f"model/{name}"].count == clips


@given(st.integers(0, 10**6), st.integers(20, 60), st.lists(st.integers(0, 60), max_size=5))
def test_pooled_multi_label_scores_match_scikit_learn(seed: int, clips: int, places: list[int]) -> None:
    whole = draw_scores(seed, clips, classes=4)
    whole.truth[:, 3] = False  # a class without clips is excluded
    summary = summarise(pool(split_scores(whole, places)))
    present = [c for c in range(4) if 0 < whole.truth[:, c].sum() < clips]
    mean_precision = np.mean(
        [reference.average_precision_score(whole.truth[:, c], whole.values[:, c]) for c in present]
    )
    assert summary["model/map"].value == pytest.approx(mean_precision, abs=1e-12)
    f1 = np.mean([reference.f1_score(whole.truth[:, c], whole.values[:, c] >= 0.6, zero_division=0) for c in present])
    assert summary["model/macro_f1"].value == pytest.approx(f1, abs=1e-12)


def test_the_equal_error_rate_matches_a_manual_calculation() -> None:
    # Between 0.4 and 0.5, one of four normal clips is above the threshold and one of four anomalies is below it.
    truth = np.array([0, 0, 0, 0, 1, 1, 1, 1], bool)
    scores = Scores(np.array([0.1, 0.2, 0.3, 0.7, 0.35, 0.5, 0.6, 0.8]), truth)
    assert ranking_metrics(scores)["eer"].value == pytest.approx(0.25)
    assert ranking_metrics(Scores(truth.astype(float), truth))["eer"].value == 0.0
    assert ranking_metrics(Scores(1.0 - truth, truth))["eer"].value == 1.0


def test_ranking_metrics_are_undefined_for_normal_clips_only() -> None:
    normal_only = Scores(np.array([0.1, 0.2]), np.array([False, False]), 0.5)
    assert all(ratio.count == 0 and math.isnan(ratio.value) for ratio in ranking_metrics(normal_only).values())
    diverged = Scores(np.array([np.nan, 0.2]), np.array([True, False]))
    assert math.isnan(ranking_metrics(diverged)["auc"].value)
    assert ranking_metrics(diverged)["auc"].count == 2


def test_reduced_scores_contain_no_clip() -> None:
    scores = draw_scores(1, 30)
    report = reduce_scores({"model/scores": scores, "model/loss": Ratio(3.0, 30)})
    assert all(isinstance(value, Ratio) for value in report.values())
    assert report["model/auc"].value == pytest.approx(reference.roc_auc_score(scores.truth, scores.values))
    # Clients without a defined metric are not counted.
    undefined = reduce_scores({"model/scores": Scores(np.zeros(3), np.zeros(3, bool))})
    assert spread([report, undefined])["model/auc_client_mean"].count == 1


def test_mismatched_scores_cannot_be_pooled() -> None:
    with pytest.raises(ValueError, match="cannot be pooled"):
        pool([{"scores": draw_scores(1, 5)}, {"scores": draw_scores(1, 5, classes=2)}])
    with pytest.raises(ValueError, match="cannot be pooled"):
        pool([{"scores": draw_scores(1, 5)}, {"scores": Ratio(1, 2)}])


def test_all_ranking_metrics_are_registered() -> None:
    assert {*ranking_metrics(draw_scores(1, 30)), *ranking_metrics(draw_scores(1, 30, classes=3))} <= set(SCORES)
    assert not SCORES["eer"].higher_is_better


@pytest.mark.parametrize(("seed", "places"), [(0, []), (1, [7, 30]), (2, [59])])
def test_the_dcase_score_matches_its_formula(seed: int, places: list[int]) -> None:
    """Oracle: all pairs of clips are compared individually. The scores come in shards of any size."""
    whole = draw_scores(seed, 60)
    rng = np.random.default_rng(seed + 1)
    whole = dataclasses.replace(whole, groups=np.stack([rng.integers(0, 3, 60), rng.integers(0, 2, 60)], axis=1))
    shards = [
        {
            "model/scores": dataclasses.replace(
                whole, values=whole.values[a:b], truth=whole.truth[a:b], groups=groups[a:b]
            )
        }
        for groups in [whole.groups]
        if groups is not None
        for a, b in itertools.pairwise([0, *sorted(places), 60])
    ]
    assert whole.groups is not None
    terms = []
    for machine in range(3):
        of_machine = whole.groups[:, 0] == machine
        anomalous = whole.values[of_machine & whole.truth]
        if not len(anomalous) or not (of_machine & ~whole.truth).any():
            continue
        terms.append(reference.roc_auc_score(whole.truth[of_machine], whole.values[of_machine], max_fpr=0.1))
        for domain in range(2):
            normal = whole.values[of_machine & ~whole.truth & (whole.groups[:, 1] == domain)]
            if len(normal):
                terms.append(np.mean([a > n for a in anomalous for n in normal]))
    expected = len(terms) / np.sum(1 / np.array(terms)) if min(terms) > 0 else 0.0
    assert summarise(pool(shards))["model/dcase"].value == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("ties", [False, True])
def test_the_oracle_has_the_largest_f1_over_all_thresholds(ties: bool) -> None:
    scores = draw_scores(5, 30, ties=ties)
    decisions = [scores.values >= value for value in np.unique(scores.values)]
    best = max(decisions, key=lambda positive: reference.f1_score(scores.truth, positive))
    metrics = ranking_metrics(scores)
    assert metrics["oracle_f1"].value == pytest.approx(reference.f1_score(scores.truth, best), abs=1e-12)
    assert metrics["oracle_precision"].value == pytest.approx(reference.precision_score(scores.truth, best), abs=1e-12)
    assert metrics["oracle_recall"].value == pytest.approx(reference.recall_score(scores.truth, best), abs=1e-12)


def test_the_harmonic_mean_excludes_clients_without_a_defined_metric() -> None:
    truth = np.array([False, True, False, True])
    clients = [
        {"model/scores": Scores(np.array([0.1, 0.9, 0.2, 0.8]), truth)},  # AUC 1
        {"model/scores": Scores(np.array([0.1, 0.9, 0.2, 0.05]), truth)},  # AUC 0.5
        {"model/scores": Scores(np.array([0.1, 0.9, 0.2, 0.05]), np.zeros(4, bool))},
    ]
    summary = spread(clients)
    assert summary["model/auc_harmonic_mean"] == Ratio(pytest.approx(4 / 3), 2)
    assert summary["model/auc_client_mean"] == Ratio(1.5, 2)


@pytest.mark.parametrize("seed", range(4))
def test_scores_of_pairs_match_a_loop_over_all_thresholds(seed: int) -> None:
    scores = dataclasses.replace(draw_scores(seed, 80, ties=seed % 2 == 0), threshold=None, of_pairs=True)
    found = ranking_metrics(scores)
    assert set(found) == {"eer", "min_dcf"}
    points = []
    for threshold in [*np.unique(scores.values), np.inf]:
        accepted = scores.values >= threshold
        points.append((accepted[~scores.truth].mean(), (~accepted[scores.truth]).mean()))
    costs = [(0.01 * misses + 0.99 * alarms) / min(0.01, 0.99) for alarms, misses in points]
    assert found["min_dcf"].value == pytest.approx(min(costs), abs=1e-12)
    assert found["min_dcf"].value <= 1  # rejecting all pairs costs 1
    # Both rates cross on the segment between two neighbouring thresholds.
    (a, b), (c, d) = next(
        pair for pair in itertools.pairwise(points[::-1]) if pair[0][0] < pair[0][1] and pair[1][0] >= pair[1][1]
    )
    share = (b - a) / ((b - a) + (c - d))
    assert found["eer"].value == pytest.approx(a + share * (c - a), abs=1e-12)
