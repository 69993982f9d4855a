"""Golden values of PSDS, by sed-scores-eval 0.0.4, and the clips they were computed from.

In an environment of its own, because the package needs numba, librosa, dcase_util and a backport of pathlib:

    pip install sed-scores-eval==0.0.4 'pandas<3'
    python tests/core/psds_values.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

TOKEN = 0.1
"""Seconds of a token."""
FILE = Path(__file__).with_suffix(".json")
SCENARIOS = {
    "psds1": {"dtc_threshold": 0.7, "gtc_threshold": 0.7, "cttc_threshold": None, "alpha_ct": 0.0, "alpha_st": 1.0},
    "psds2": {"dtc_threshold": 0.1, "gtc_threshold": 0.1, "cttc_threshold": 0.3, "alpha_ct": 0.5, "alpha_st": 1.0},
}
"""The scenarios of DCASE's task 4 (DESED)."""

Clip = tuple[np.ndarray, np.ndarray]
"""Probabilities float64 [tokens, classes], and events float64 [events, 3]."""


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


def round_clips(clips: list[Clip]) -> list[Clip]:
    """Round probabilities to 0.02, 0.04 ... 1, halfway between raydfl's thresholds 0.01, 0.03 ... 0.99.

    sed-scores-eval takes each probability as a threshold. Both then compare the same detections.
    """
    return [(np.maximum(np.round(p * 50), 1) / 50, events) for p, events in clips]


def compute(clips: list[Clip]) -> dict[str, float]:
    """Compute both scores with sed-scores-eval."""
    from sed_scores_eval.base_modules.scores import create_score_dataframe
    from sed_scores_eval.intersection_based import psds

    scores, truth, lengths = {}, {}, {}
    for number, (p, events) in enumerate(clips):
        name, times = f"clip{number}", np.arange(len(p) + 1) * TOKEN
        scores[name] = create_score_dataframe(p, times, ["a", "b", "c"])
        truth[name] = [(onset, offset, "abc"[int(label)]) for onset, offset, label in events]
        lengths[name] = float(times[-1])
    return {
        name: float(psds(scores, truth, lengths, unit_of_time="hour", max_efpr=100.0, **options)[0])
        for name, options in SCENARIOS.items()
    }


if __name__ == "__main__":
    values = {seed: compute(round_clips(draw_clips(np.random.default_rng(seed), 6))) for seed in range(5)}
    FILE.write_text(json.dumps(values, indent=2) + "\n")
