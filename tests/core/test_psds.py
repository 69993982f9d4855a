"""PSDS: perfect and simple systems by hand, golden values of sed-scores-eval, and pooling."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from psds_values import FILE, TOKEN, Clip, draw_clips, round_clips

from raydfl.core.metrics import pool, reduce_scores, summarise
from raydfl.core.psds import SCENARIOS, compute_psds, count_detections


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


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_sed_scores_eval(seed: int) -> None:
    counts = count(round_clips(draw_clips(np.random.default_rng(seed), 6)))
    values = {name: compute_psds(counts, name) for name in SCENARIOS}
    assert values == pytest.approx(json.loads(FILE.read_text())[str(seed)], abs=1e-12)


def test_pooled_clients_equal_all_clips_together() -> None:
    clips = draw_clips(np.random.default_rng(3), 6)
    clients = [{"m/detections": count(clips[:2])}, {"m/detections": count(clips[2:])}]
    assert reduce_scores(clients[0]).keys() == {"m/detections"}  # counts leave a client, no score of a clip does
    whole = summarise({"m/detections": count(clips)})
    assert summarise(pool(clients)) == whole
    assert whole["m/psds1"].count == sum(len(events) for _, events in clips)
