"""Metrics. Oracles: closed forms, scikit-learn, and pooling of parts, which must equal measuring the whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, log_loss, top_k_accuracy_score

from raydfl.core.errors import DataError
from raydfl.core.metrics import base_name, classification_metrics, model_name, pool, spread, summarise, worst_decile
from raydfl.core.types import Ratio


def as_ratio(value: object) -> Ratio:
    assert isinstance(value, Ratio)
    return value


def as_array(value: object) -> np.ndarray:
    assert isinstance(value, np.ndarray)
    return value


def draw_predictions(seed: int, rows: int = 60, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (3 * rng.normal(size=(rows, classes))).astype(np.float32), rng.integers(classes, size=rows)


def test_metrics_match_a_closed_form() -> None:
    logits = np.log([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    measured = classification_metrics(logits, np.array([0, 1]), None, 3)
    assert as_ratio(measured["loss"]).total == pytest.approx(-np.log(0.7) - np.log(0.3))
    assert measured["accuracy"] == Ratio(1.0, 2)
    assert as_array(measured["confusion"]).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert as_array(measured["confusion"]).dtype == np.int64


def test_metrics_match_torch_and_scikit_learn() -> None:
    logits, labels = draw_predictions(0)
    measured = classification_metrics(torch.tensor(logits, requires_grad=True), torch.tensor(labels), None, 5)
    probabilities = torch.softmax(torch.tensor(logits, dtype=torch.float64), 1).numpy()
    assert as_ratio(measured["loss"]).value == pytest.approx(log_loss(labels, probabilities, labels=range(5)))
    torch_loss = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(labels), reduction="sum")
    assert as_ratio(measured["loss"]).total == pytest.approx(torch_loss.item(), rel=1e-5)
    assert (
        as_array(measured["confusion"]).tolist() == confusion_matrix(labels, logits.argmax(1), labels=range(5)).tolist()
    )
    for top_k in (1, 3):
        top_k_accuracy = as_ratio(classification_metrics(logits, labels, None, 5, top_k=top_k)["top_k_accuracy"])
        assert top_k_accuracy.value == pytest.approx(top_k_accuracy_score(labels, logits, k=top_k, labels=range(5)))


@pytest.mark.parametrize("size", [0.0, 1.0, 1e17, -1e17, 3e38, 1e300])
@pytest.mark.parametrize("clips", [None, [0, 0, 1]])
def test_equal_logits_of_any_size_have_the_loss_of_a_uniform_guess(size: float, clips: list[int] | None) -> None:
    labels = np.array([3, 3, 1])
    measured = classification_metrics(np.full((3, 5), size), labels, None if clips is None else np.array(clips), 5)
    assert as_ratio(measured["loss"]).value == pytest.approx(np.log(5))
    if abs(size) < 1e38:
        logits = torch.full((3, 5), size)
        assert torch.nn.functional.cross_entropy(logits, torch.tensor(labels)).item() == pytest.approx(np.log(5))


def test_a_loss_of_zero_is_not_negative() -> None:
    measured = classification_metrics(np.array([[1e9, 0.0]]), np.array([0]), None, 2)
    assert f"{as_ratio(measured['loss']).value}" == "0.0"
    assert f"{as_ratio(classification_metrics(np.zeros((0, 2)), np.zeros(0), None, 2)['loss']).total}" == "0.0"


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 40), classes=st.integers(2, 9))
def test_the_summary_matches_scikit_learn(seed: int, rows: int, classes: int) -> None:
    """Classes may be absent from the labels, from the predictions, or from both."""
    logits, labels = draw_predictions(seed, rows, classes)
    labels = labels % max(1, classes - seed % classes)
    predicted = logits.argmax(1)
    summary = summarise({"m/confusion": as_array(classification_metrics(logits, labels, None, classes)["confusion"])})
    assert summary["m/macro_f1"].value == pytest.approx(f1_score(labels, predicted, average="macro"))
    recalls = [np.mean(predicted[labels == label] == label) for label in np.unique(labels)]
    assert summary["m/average_recall"].value == pytest.approx(np.mean(recalls))
    if set(predicted) <= set(labels) and len(set(labels)) > 1:
        assert summary["m/average_recall"].value == pytest.approx(balanced_accuracy_score(labels, predicted))


def test_the_summary_keeps_ratios_and_drops_unknown_arrays() -> None:
    summary = summarise({"loss": Ratio(3.0, 2), "histogram": np.ones(3), "confusion": np.eye(2, dtype=np.int64)})
    assert summary == {"loss": Ratio(3.0, 2), "macro_f1": Ratio(2.0, 2), "average_recall": Ratio(2.0, 2)}


@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_pooling_parts_equals_measuring_the_whole(seed: int, cuts: list[int]) -> None:
    logits, labels = draw_predictions(seed)
    whole = classification_metrics(logits, labels, None, 5)
    edges = [0, *sorted(cuts), 60]
    parts = [classification_metrics(logits[a:b], labels[a:b], None, 5) for a, b in itertools.pairwise(edges)]
    pooled = pool(parts)
    assert as_ratio(pooled["loss"]).total == pytest.approx(as_ratio(whole["loss"]).total)
    assert pooled["accuracy"] == whole["accuracy"]
    assert as_array(pooled["confusion"]).tolist() == as_array(whole["confusion"]).tolist()


def test_pool_accepts_metrics_that_some_parts_lack() -> None:
    assert pool([{"a": Ratio(1, 2)}, {"b": Ratio(3, 4)}, {"a": Ratio(5, 6)}]) == {"a": Ratio(6, 8), "b": Ratio(3, 4)}
    assert pool([]) == {}


def test_pool_does_not_modify_its_arguments() -> None:
    first = np.eye(2, dtype=np.int64)
    pool([{"confusion": first}, {"confusion": np.eye(2, dtype=np.int64)}])
    assert first.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("other", [Ratio(1, 1), np.zeros((3, 3))])
def test_pool_rejects_mismatched_metrics(other: Ratio | np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"metric 'x' cannot be pooled: an array \[2, 2\] here"):
        pool([{"x": np.zeros((2, 2))}, {"x": other}])


def test_segments_of_a_clip_vote_by_mean_probability() -> None:
    """Two segments slightly favour class 1, the third strongly favours class 0. Oracle: the mean probability."""
    probabilities = np.array([[0.4, 0.6], [0.98, 0.02], [0.4, 0.6], [0.3, 0.7]])
    clips = np.array([7, 7, 7, 3])
    measured = classification_metrics(np.log(probabilities), np.array([0, 0, 0, 1]), clips, 2)
    mean = probabilities[:3].mean(0)[0]
    assert measured["accuracy"] == Ratio(2.0, 2)
    assert as_ratio(measured["loss"]).total == pytest.approx(-np.log(mean) - np.log(0.7))
    assert as_ratio(measured["loss"]).count == 2
    assert as_array(measured["confusion"]).tolist() == [[1, 0], [0, 1]]


def test_segments_of_a_clip_can_vote_by_mean_logits() -> None:
    """The logits of the third segment outweigh two segments for class 1. Its probability would not."""
    logits = np.array([[10.0, 10.8], [-3.0, -2.2], [9.0, 7.3], [5.0, 6.0]])
    labels, clips = np.array([0, 0, 0, 1]), np.array([7, 7, 7, 3])
    measured = classification_metrics(logits, labels, clips, 2, "logits")
    gap = (1.7 - 0.8 - 0.8) / 3
    assert measured["accuracy"] == Ratio(2.0, 2)
    assert as_ratio(measured["loss"]).total == pytest.approx(np.log1p(np.exp(-gap)) + np.log1p(np.exp(-1.0)))
    assert as_ratio(classification_metrics(logits, labels, clips, 2)["accuracy"]).total == 1.0


@given(seed=st.integers(0, 1000))
def test_single_segments_and_their_order_do_not_change_metrics(seed: int) -> None:
    logits, labels = draw_predictions(seed, 20)
    plain = classification_metrics(logits, labels, None, 5)
    single = classification_metrics(logits, labels, np.arange(20)[::-1], 5)
    assert as_ratio(single["loss"]).total == pytest.approx(as_ratio(plain["loss"]).total)
    assert as_array(single["confusion"]).tolist() == as_array(plain["confusion"]).tolist()
    clips = np.arange(20) // 3
    labels = labels[clips]
    order = np.random.default_rng(seed).permutation(20)
    ordered = classification_metrics(logits, labels, clips, 5)
    shuffled = classification_metrics(logits[order], labels[order], clips[order], 5)
    assert as_ratio(shuffled["loss"]).total == pytest.approx(as_ratio(ordered["loss"]).total)
    assert as_array(shuffled["confusion"]).tolist() == as_array(ordered["confusion"]).tolist()


def test_a_confident_error_has_a_large_finite_loss() -> None:
    logits = np.array([[1000.0, 0.0], [1000.0, 0.0]])
    for clips in (None, np.array([0, 0])):
        loss = as_ratio(classification_metrics(logits, np.array([1, 1]), clips, 2)["loss"])
        assert loss.value == pytest.approx(1000.0)


def test_a_diverged_model_has_the_loss_nan() -> None:
    measured = classification_metrics(np.full((2, 3), np.nan, np.float32), np.array([0, 2]), None, 3)
    assert np.isnan(as_ratio(measured["loss"]).value)
    assert as_array(measured["confusion"]).sum() == 2


def test_no_examples_give_empty_metrics() -> None:
    for clips in (None, np.zeros(0, np.int64)):
        measured = classification_metrics(np.zeros((0, 3), np.float32), np.zeros(0, np.int64), clips, 3)
        assert measured["accuracy"] == Ratio(0.0, 0)
        assert as_array(measured["confusion"]).shape == (3, 3)
        assert np.isnan(summarise({"confusion": as_array(measured["confusion"])})["macro_f1"].value)


@pytest.mark.parametrize(
    ("logits", "labels", "clips", "message"),
    [
        (np.zeros((2, 4)), [0, 1], None, r"predictions of shape \[2, 4\] do not fit 2 labels and 3 classes"),
        (np.zeros((3, 3)), [0, 1], None, r"predictions of shape \[3, 3\] do not fit 2 labels"),
        (np.zeros((2, 3)), [0, 3], None, "labels go from 0 to 3, but the model has 3 classes"),
        (np.zeros((2, 3)), [-1, 0], None, "labels go from -1 to 0"),
        (np.zeros((2, 3)), [0, 1], [5, 5], "clip 5 has segments with different labels"),
        (np.zeros((2, 3)), [0, 1], [5], "1 clip numbers for 2 labels"),
    ],
)
def test_mismatched_arguments_are_rejected(
    logits: np.ndarray, labels: list[int], clips: list[int] | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        classification_metrics(logits, np.array(labels), None if clips is None else np.array(clips), 3)


@pytest.mark.parametrize(
    ("values", "higher", "expected"),
    [
        ([0.5], True, 0.5),
        ([0.9, 0.1, 0.5], True, 0.1),
        ([float(v) for v in range(20)], True, 0.5),  # the two lowest of twenty
        ([float(v) for v in range(20)], False, 18.5),
        ([float(v) for v in range(21)], True, 1.0),  # a tenth of 21 is rounded up to three
        ([], True, float("nan")),
        ([0.1, float("nan")], True, float("nan")),
    ],
)
def test_worst_decile_is_the_mean_of_the_worst_tenth(values: list[float], higher: bool, expected: float) -> None:
    assert worst_decile(values, higher) == pytest.approx(expected, nan_ok=True)


def test_spread_counts_each_client_once() -> None:
    clients = [{"m/accuracy": Ratio(90.0, 100)}, {"m/accuracy": Ratio(1.0, 10)}, {"m/accuracy": Ratio(0.0, 0)}]
    result = spread(clients)
    assert result["m/accuracy_client_mean"].value == pytest.approx(0.5)
    assert result["m/accuracy_client_std"].value == pytest.approx(0.4)
    assert result["m/accuracy_worst_decile"].value == pytest.approx(0.1)
    assert {value.count for value in result.values()} == {2}  # the client without examples is excluded


def test_spread_covers_losses_and_derived_scores_only() -> None:
    confusions = [np.array([[3, 1], [0, 4]]), np.array([[1, 3], [4, 0]])]
    clients = [{"loss": Ratio(float(k), 1), "bytes_up": Ratio(1, 1), "confusion": c} for k, c in enumerate(confusions)]
    result = spread(clients)
    assert result["loss_worst_decile"].value == 1.0
    assert not [name for name in result if name.startswith("bytes")]
    scores = [summarise({"confusion": c})["macro_f1"].value for c in confusions]
    assert result["macro_f1_client_mean"].value == pytest.approx(np.mean(scores))


def test_metric_names_split_into_model_and_base() -> None:
    assert (model_name("plugin/accuracy"), base_name("plugin/accuracy")) == ("plugin", "accuracy")
    assert (model_name("loss"), base_name("loss")) == ("", "loss")
