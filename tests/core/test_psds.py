"""PSDS: perfect and simple systems by hand, an independent implementation by loops, and pooling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from raydfl.core.metrics import pool, reduce_scores, summarise
from raydfl.core.psds import SCENARIOS, THRESHOLDS, compute_psds, count_detections

TOKEN = 0.1
Clip = tuple[np.ndarray, np.ndarray]
"""Probabilities float64 [tokens, classes], and events float64 [events, 3]."""


def count(clips: Sequence[Clip]) -> np.ndarray:
    return sum(count_detections(p, TOKEN, events) for p, events in clips)  # type: ignore[return-value]


def make_probabilities(tokens: int, classes: int, *runs: tuple[int, int, int, float]) -> np.ndarray:
    p = np.zeros((tokens, classes))
    for first, end, label, value in runs:
        p[first:end, label] = value
    return p


def test_a_perfect_system_scores_1() -> None:
    events = np.array([[1.0, 2.0, 0], [3.0, 3.5, 0], [1.5, 4.0, 1]])
    p = make_probabilities(50, 2, (10, 20, 0, 1.0), (30, 35, 0, 1.0), (15, 40, 1, 1.0))
    assert [compute_psds(count([(p, events)]), name) for name in SCENARIOS] == [1.0, 1.0]


def test_silence_scores_0_and_clips_without_events_have_no_score() -> None:
    silent = count([(np.zeros((50, 2)), np.array([[1.0, 2.0, 0]]))])
    assert [compute_psds(silent, name) for name in SCENARIOS] == [0.0, 0.0]
    without = count_detections(np.zeros((50, 2)), TOKEN, np.zeros((0, 3)))
    assert {ratio.count for ratio in summarise({"m/detections": without}).values()} == {0}


def test_a_false_positive_costs_its_share_of_the_rates() -> None:
    """An event, found at all thresholds, and a false positive at thresholds up to 0.5, in a clip of 72 s: 50 an hour."""
    p = make_probabilities(720, 1, (10, 20, 0, 1.0), (100, 110, 0, 0.5))
    assert compute_psds(count([(p, np.array([[1.0, 2.0, 0]]))]), "psds1") == 1.0  # found at a rate of 0
    p = make_probabilities(720, 1, (10, 20, 0, 0.5), (100, 110, 0, 0.9))
    assert compute_psds(count([(p, np.array([[1.0, 2.0, 0]]))]), "psds1") == pytest.approx(0.5)


def test_the_share_of_an_event_decides_by_scenario() -> None:
    """A detection of 0.2 s within an event of 1 s."""
    counts = count([(make_probabilities(50, 1, (12, 14, 0, 1.0)), np.array([[1.0, 2.0, 0]]))])
    assert compute_psds(counts, "psds1") == 0.0
    assert compute_psds(counts, "psds2") == 1.0


def test_the_deviation_over_classes_is_subtracted() -> None:
    """Recalls 1 and 0: mean 0.5, deviation 0.5. Recalls 1 and 0.5: mean 0.75, deviation 0.25."""
    events = np.array([[1.0, 2.0, 0], [1.0, 2.0, 1], [3.0, 4.0, 1]])
    p = make_probabilities(50, 2, (10, 20, 0, 1.0))
    assert compute_psds(count([(p, events)]), "psds1") == 0.0
    p[10:20, 1] = 1.0
    assert compute_psds(count([(p, events)]), "psds1") == pytest.approx(0.5)


def test_confusions_count_for_psds2() -> None:
    """At thresholds up to 0.5, class 1 has a false positive in an event of class 0, in 1 s of it and 360 s of clips.

    Its rate there is 10 an hour + 0.5 * 3600 an hour: beyond 100. Class 1 is found only at these thresholds.
    """
    events = np.array([[1.0, 2.0, 0], [5.0, 6.0, 1]])
    p = make_probabilities(3600, 2, (10, 20, 0, 1.0), (10, 20, 1, 0.9), (50, 60, 1, 0.5))
    counts = count([(p, events)])
    assert compute_psds(counts, "psds2") == 0.0
    # Without confusions: from 10 an hour on, both are found.
    assert compute_psds(counts, "psds1") == pytest.approx(0.9)


def compute_by_loops(clips: Sequence[Clip], name: str) -> float:
    """Compute PSDS by its definition, with loops over thresholds, detections and events."""
    scenario = SCENARIOS[name]
    classes = clips[0][0].shape[1]
    every = [event for _, events in clips for event in events.tolist()]
    present = [label for label in range(classes) if any(event[2] == label for event in every)]
    hours = sum(len(p) for p, _ in clips) * TOKEN / 3600
    points: dict[int, list[tuple[float, float]]] = {label: [] for label in present}
    for threshold in THRESHOLDS:
        for label in present:
            found, false, cross = 0, 0, dict.fromkeys(present, 0)
            for p, events in clips:
                truth, relevant, place = events.tolist(), [], 0
                for active, run in itertools.groupby(p[:, label] >= threshold):
                    first, place = place, place + len([*run])
                    if not active:
                        continue
                    start, end = first * TOKEN, place * TOKEN

                    def share(
                        other: int, start: float = start, end: float = end, truth: list[list[float]] = truth
                    ) -> float:
                        inside = [max(0.0, min(end, b) - max(start, a)) for a, b, kind in truth if kind == other]
                        return sum(inside) / (end - start)

                    if share(label) >= scenario.detection - 1e-9:
                        relevant.append((start, end))
                        continue
                    false += 1
                    for other in present:
                        if other != label and scenario.confusion is not None:
                            cross[other] += share(other) >= scenario.confusion - 1e-9
                for a, b, kind in truth:
                    covered = sum(max(0.0, min(end, b) - max(start, a)) for start, end in relevant)
                    found += kind == label and covered > 0 and covered >= scenario.truth * (b - a) - 1e-9
            confusions = 0.0
            for other, number in cross.items():
                confusions += number / (sum(b - a for a, b, kind in every if kind == other) / 3600)
            rate = false / hours + scenario.alpha * confusions / max(1, len(present) - 1)
            points[label].append((rate, found / sum(event[2] == label for event in every)))
    edges = sorted({0.0, 100.0, *(rate for curve in points.values() for rate, _ in curve if rate < 100)})
    area = 0.0
    for left, right in itertools.pairwise(edges):
        recalls = [max([recall for rate, recall in curve if rate <= left], default=0.0) for curve in points.values()]
        area += max(0.0, float(np.mean(recalls) - scenario.spread * np.std(recalls))) * (right - left)
    return area / 100


def draw_clips(random: np.random.Generator, number: int) -> list[Clip]:
    """Draw clips of 60 to 90 s with events, and probabilities that find most of them."""
    clips = []
    for _ in range(number):
        tokens, events = int(random.integers(600, 900)), []
        p = 0.2 * random.random((tokens, 3))
        for label in range(3):
            for slot in random.choice(5, random.integers(0, 4), replace=False).tolist():
                onset = 10 * slot + 5 * random.random()
                offset = onset + 0.5 + 4 * random.random()
                events.append((onset, offset, label))
                shift = int(random.integers(-3, 4))
                kind = label if random.random() < 0.9 else (label + 1) % 3
                p[max(0, int(onset / TOKEN) + shift) : int(offset / TOKEN) + shift, kind] += 0.8 * random.random()
        clips.append((p, np.array(events).reshape(-1, 3)))
    return clips


@pytest.mark.parametrize("seed", range(3))
def test_scores_equal_loops_over_detections(seed: int) -> None:
    clips = draw_clips(np.random.default_rng(seed), 6)
    counts = count(clips)
    values = {name: compute_psds(counts, name) for name in SCENARIOS}
    assert values == pytest.approx({name: compute_by_loops(clips, name) for name in SCENARIOS}, abs=1e-12)
    assert 0 < values["psds1"] < 1


def test_pooled_clients_equal_all_clips_together() -> None:
    clips = draw_clips(np.random.default_rng(3), 6)
    clients = [{"m/detections": count(clips[:2])}, {"m/detections": count(clips[2:])}]
    assert reduce_scores(clients[0]).keys() == {"m/detections"}  # counts leave a client, no score of a clip does
    whole = summarise({"m/detections": count(clips)})
    assert summarise(pool(clients)) == whole
    assert whole["m/psds1"].count == sum(len(events) for _, events in clips)
