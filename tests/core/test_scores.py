"""Scores of single clips, joined from shards and reduced: scikit-learn over all of them is the reference."""

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


def drawn(seed: int, clips: int, classes: int = 0, ties: bool = False) -> Scores:
    rng = np.random.default_rng(seed)
    shape = (clips, classes) if classes else (clips,)
    truth = rng.random(shape) < 0.4
    values = truth * 0.7 + rng.random(shape)
    return Scores(np.round(values, 1) if ties else values, truth, 0.6)


def cut(scores: Scores, places: list[int]) -> list[dict[str, Scores]]:
    edges = [0, *sorted(place % (len(scores.values) + 1) for place in places), len(scores.values)]
    return [
        {"model/scores": Scores(scores.values[a:b], scores.truth[a:b], scores.threshold)}
        for a, b in itertools.pairwise(edges)
    ]


@given(st.integers(0, 10**6), st.integers(20, 60), st.booleans(), st.lists(st.integers(0, 60), max_size=5))
def test_scores_over_shards_are_scikit_learns_over_all(seed: int, clips: int, ties: bool, places: list[int]) -> None:
    whole = drawn(seed, clips, ties=ties)
    found = summarise(pool(cut(whole, places)))
    if whole.truth.all() or not whole.truth.any():
        assert found["model/auc"].count == 0
        return
    expected = {
        "auc": reference.roc_auc_score(whole.truth, whole.values),
        "pauc": reference.roc_auc_score(whole.truth, whole.values, max_fpr=0.1),
        "f1": reference.f1_score(whole.truth, whole.values >= 0.6, zero_division=0),
    }
    for name, value in expected.items():
        assert found[f"model/{name}"].value == pytest.approx(value, abs=1e-12), name
        assert found[f"model/{name}"].count == clips


@given(st.integers(0, 10**6), st.integers(20, 60), st.lists(st.integers(0, 60), max_size=5))
def test_scores_of_several_classes_are_scikit_learns_means_over_the_classes(
    seed: int, clips: int, places: list[int]
) -> None:
    whole = drawn(seed, clips, classes=4)
    whole.truth[:, 3] = False  # a class that no clip has is left out
    found = summarise(pool(cut(whole, places)))
    some = [c for c in range(4) if 0 < whole.truth[:, c].sum() < clips]
    mean_precision = np.mean([reference.average_precision_score(whole.truth[:, c], whole.values[:, c]) for c in some])
    assert found["model/map"].value == pytest.approx(mean_precision, abs=1e-12)
    f1 = np.mean([reference.f1_score(whole.truth[:, c], whole.values[:, c] >= 0.6, zero_division=0) for c in some])
    assert found["model/macro_f1"].value == pytest.approx(f1, abs=1e-12)


def test_the_equal_error_rate_by_hand() -> None:
    # Threshold between 0.4 and 0.5: one of four normal clips above, one of four anomalous ones below.
    truth = np.array([0, 0, 0, 0, 1, 1, 1, 1], bool)
    scores = Scores(np.array([0.1, 0.2, 0.3, 0.7, 0.35, 0.5, 0.6, 0.8]), truth)
    assert ranking_metrics(scores)["eer"].value == pytest.approx(0.25)
    assert ranking_metrics(Scores(truth.astype(float), truth))["eer"].value == 0.0
    assert ranking_metrics(Scores(1.0 - truth, truth))["eer"].value == 1.0


def test_of_clips_that_are_all_normal_nothing_is_said() -> None:
    one_kind = Scores(np.array([0.1, 0.2]), np.array([False, False]), 0.5)
    assert all(ratio.count == 0 and math.isnan(ratio.value) for ratio in ranking_metrics(one_kind).values())
    diverged = Scores(np.array([np.nan, 0.2]), np.array([True, False]))
    assert math.isnan(ranking_metrics(diverged)["auc"].value)
    assert ranking_metrics(diverged)["auc"].count == 2


def test_what_a_client_reports_holds_no_clip() -> None:
    scores = drawn(1, 30)
    report = reduce_scores({"model/scores": scores, "model/loss": Ratio(3.0, 30)})
    assert all(isinstance(value, Ratio) for value in report.values())
    assert report["model/auc"].value == pytest.approx(reference.roc_auc_score(scores.truth, scores.values))
    # Clients of which nothing can be said do not count as clients.
    nothing = reduce_scores({"model/scores": Scores(np.zeros(3), np.zeros(3, bool))})
    assert spread([report, nothing])["model/auc_client_mean"].count == 1


def test_scores_of_several_kinds_are_not_joined() -> None:
    with pytest.raises(ValueError, match="cannot be pooled"):
        pool([{"scores": drawn(1, 5)}, {"scores": drawn(1, 5, classes=2)}])
    with pytest.raises(ValueError, match="cannot be pooled"):
        pool([{"scores": drawn(1, 5)}, {"scores": Ratio(1, 2)}])


def test_every_score_of_a_ranking_has_a_line_in_the_table() -> None:
    assert {*ranking_metrics(drawn(1, 30)), *ranking_metrics(drawn(1, 30, classes=3))} <= set(SCORES)
    assert not SCORES["eer"].higher_is_better


@pytest.mark.parametrize(("seed", "places"), [(0, []), (1, [7, 30]), (2, [59])])
def test_dcases_score_is_that_of_its_formula(seed: int, places: list[int]) -> None:
    """Pairs of clips counted one by one, over shards of any size."""
    whole = drawn(seed, 60)
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
        mine = whole.groups[:, 0] == machine
        anomalous = whole.values[mine & whole.truth]
        if not len(anomalous) or not (mine & ~whole.truth).any():
            continue
        terms.append(reference.roc_auc_score(whole.truth[mine], whole.values[mine], max_fpr=0.1))
        for domain in range(2):
            normal = whole.values[mine & ~whole.truth & (whole.groups[:, 1] == domain)]
            if len(normal):
                terms.append(np.mean([a > n for a in anomalous for n in normal]))
    expected = len(terms) / np.sum(1 / np.array(terms)) if min(terms) > 0 else 0.0
    assert summarise(pool(shards))["model/dcase"].value == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("ties", [False, True])
def test_the_oracles_f1_is_the_largest_of_all_thresholds(ties: bool) -> None:
    scores = drawn(5, 30, ties=ties)
    best = max(reference.f1_score(scores.truth, scores.values >= value) for value in scores.values)
    assert ranking_metrics(scores)["oracle_f1"].value == pytest.approx(best, abs=1e-12)


def test_the_harmonic_mean_over_clients_leaves_out_those_of_whom_nothing_is_said() -> None:
    truth = np.array([False, True, False, True])
    clients = [
        {"model/scores": Scores(np.array([0.1, 0.9, 0.2, 0.8]), truth)},  # AUC 1
        {"model/scores": Scores(np.array([0.1, 0.9, 0.2, 0.05]), truth)},  # AUC 0.5
        {"model/scores": Scores(np.array([0.1, 0.9, 0.2, 0.05]), np.zeros(4, bool))},
    ]
    found = spread(clients)
    assert found["model/auc_harmonic_mean"] == Ratio(pytest.approx(4 / 3), 2)
    assert found["model/auc_client_mean"] == Ratio(1.5, 2)
