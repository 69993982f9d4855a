"""The generated data set of machines."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from trivial_detectors import measure_aucs

from raydfl.core.registry import build
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.sets.machines import RATE, Machines

Rows = list[dict[str, Any]]


SMALL = Machines(clips=8, test_clips=8, seconds=0.5, snr_db=None, strength_db=-10.0)


def select_rows(dataset: Machines, **values: str) -> Rows:
    rows: Rows = dataset.manifest().to_pylist()
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def test_training_clips_are_normal_and_each_machine_has_all_anomalies() -> None:
    corpus = dataclasses.replace(SMALL, validation_clips=4, target_clips=2)
    rows = select_rows(corpus)
    assert {row["condition"] for row in rows if row["split"] == "train"} == {"normal"}
    for group in ("fan_00", "fan_01", "pump_00", "pump_01"):
        local = [row for row in rows if row["group"] == group]
        assert Counter((row["split"], row["label"]) for row in local) == {
            ("train", "normal"): 8,
            **{("validation", label): 4 for label in ("normal", "anomaly")},
            **{("test", label): 8 for label in ("normal", "anomaly")},
        }
        anomalies = Counter(
            (row["anomaly"], row["domain"]) for row in local if row["split"] == "test" and row["anomaly"] != "none"
        )
        assert anomalies == {
            (a, d): 1 for a in ("imbalance", "bearing", "rub", "clogging") for d in ("source", "target")
        }
        assert Counter(row["domain"] for row in local if row["split"] == "train") == {"target": 2, "source": 6}


@pytest.mark.parametrize("anomaly", ["imbalance", "bearing", "rub", "clogging"])
def test_the_strength_is_the_power_of_the_anomaly_relative_to_the_machine(anomaly: str) -> None:
    """The remaining signal of a clip does not depend on the strength."""
    for row in select_rows(SMALL, anomaly=anomaly):
        plain = dataclasses.replace(SMALL, strength_db=None).read(row)[0].astype(np.float64)
        for strength in (-20.0, 0.0):
            anomalous = dataclasses.replace(SMALL, strength_db=strength).read(row)[0] - plain
            assert 10 * np.log10(np.mean(anomalous**2) / np.mean(plain**2)) == pytest.approx(strength, abs=0.01)


def test_anomalies_are_detectable_only_with_strength() -> None:
    """Score: AUC of the distance from the mean log-mel frame of a machine's training clips."""
    extract = FeatureExtractor(FeatureSettings(bands=32, window_ms=64, hop_ms=32, normalise="none"))

    def measure_auc(strength: float | None) -> float:
        corpus = dataclasses.replace(SMALL, strength_db=strength, test_clips=12, ids=1)
        rows = select_rows(corpus)
        frames = np.array([extract(*corpus.read(row)).mean(axis=0) for row in rows])
        scores = []
        for group in ("fan_00", "pump_00"):
            of_machine = np.array([row["group"] == group for row in rows])
            train = of_machine & np.array([row["split"] == "train" for row in rows])
            spread = (frames - frames[train].mean(axis=0)) / (frames[train].std(axis=0) + 0.1)
            truth = np.array([row["condition"] == "anomaly" for row in rows])
            test = of_machine & ~train
            scores.append(roc_auc_score(truth[test], np.square(spread[test]).mean(axis=1)))
        return float(np.mean(scores))

    assert abs(measure_auc(None) - 0.5) < 0.2  # the standard deviation is 0.12 / sqrt(2)
    assert measure_auc(0.0) > 0.9


RHYTHM = dataclasses.replace(SMALL, anomalies=("disorder", "hunting"), seconds=2.0, strength_db=0.0)


@pytest.mark.slow
def test_rhythms_are_detectable_by_modulation_but_not_by_loudness_or_mean_frames() -> None:
    """The standard error of an AUC of 0.5 is 0.04."""
    corpus = dataclasses.replace(
        RHYTHM, kinds=("fan", "gearbox"), ids=1, clips=40, test_clips=100, seconds=1.5, snr_db=(0.0, 12.0), level="clip"
    )
    aucs = measure_aucs(corpus)
    assert np.max(np.abs(np.array(aucs["loudness"]) - 0.5)) < 0.15
    assert max(aucs["mean frame, Mahalanobis"] + aucs["mean frame, nearest neighbour"]) < 0.65
    assert min(aucs["modulation spectrum, Mahalanobis"]) > 0.95


@pytest.mark.parametrize("anomaly", ["disorder", "hunting"])
@pytest.mark.parametrize(("strength", "fraction"), [(-3.0, 10**-0.3), (0.0, 1.0)])
def test_the_strength_is_the_changed_fraction_of_a_rhythm(anomaly: str, strength: float, fraction: float) -> None:
    """An anomalous clip is the normal clip times a constant, except for successive strokes."""
    changed = []
    for row in select_rows(RHYTHM, anomaly=anomaly):
        plain, clip = (
            dataclasses.replace(RHYTHM, strength_db=each).read(row)[0][:, 0].astype(np.float64)
            for each in (None, strength)
        )
        audible = np.flatnonzero(np.abs(plain) > 1e-3)
        ratio = clip[audible] / plain[audible]
        ends = np.concatenate([ratio[:50], ratio[-50:]])
        different = audible[np.abs(ratio / np.median(ends) - 1) > 1e-3]
        changed.append((different[-1] - different[0]) / len(plain))
    assert np.mean(changed) == pytest.approx(fraction, abs=0.08)


def test_all_clips_have_the_chosen_level_apart_from_the_gain() -> None:
    corpus = dataclasses.replace(SMALL, snr_db=(0.0, 6.0), strength_db=0.0, level="clip")
    for row in select_rows(corpus, split="test", group="fan_00"):
        powers = [
            np.mean(np.square(dataclasses.replace(corpus, strength_db=strength).read(row)[0], dtype=np.float64))
            for strength in (None, 0.0)
        ]
        assert powers[0] == pytest.approx(powers[1], rel=1e-5)
        assert abs(10 * np.log10(powers[0] / 0.02**2)) < 4  # the gain has a standard deviation of 1 dB


def test_a_clip_does_not_depend_on_the_rest_of_the_corpus() -> None:
    row = select_rows(SMALL, group="pump_00", split="test")[-1]
    samples, rate = SMALL.read(row)
    assert samples.shape == (RATE // 2, 1)
    assert samples.dtype == np.float32
    assert rate == RATE
    assert np.abs(samples).max() < 1
    larger = Machines(kinds=("gearbox", "pump"), ids=5, clips=9, test_clips=30, seconds=0.5, snr_db=None)
    assert np.array_equal(larger.read(row)[0], samples)
    assert larger.identity(row) == SMALL.identity(row)
    options = [{"seed": 1}, {"snr_db": (3.0, 3.0)}, {"strength_db": 0.0}, {"seconds": 0.25}, {"level": "clip"}]
    for changed in options:
        other = dataclasses.replace(SMALL, **changed)  # type: ignore[arg-type]
        assert not np.array_equal(other.read(row)[0], samples[: len(other.read(row)[0])])
        assert other.identity(row) != SMALL.identity(row)


def test_normal_clips_do_not_depend_on_the_strength_of_anomalies() -> None:
    row = select_rows(SMALL, split="test", condition="normal")[0]
    assert dataclasses.replace(SMALL, strength_db=0.0).identity(row) == SMALL.identity(row)
    # With a rhythm, machines have strokes in normal clips too.
    assert RHYTHM.identity(row) != dataclasses.replace(SMALL, seconds=2.0).identity(row)
    assert not np.allclose(RHYTHM.read(row)[0], dataclasses.replace(SMALL, seconds=2.0).read(row)[0])


def test_the_background_has_the_chosen_level() -> None:
    row = select_rows(SMALL, split="train")[0]
    clean, noisy = (dataclasses.replace(SMALL, snr_db=snr).read(row)[0] for snr in (None, (6.0, 6.0)))
    room = noisy.astype(np.float64) - clean
    assert 10 * np.log10(np.mean(clean.astype(np.float64) ** 2) / np.mean(room**2)) == pytest.approx(6.0, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["fan", "fan"]}, "kinds names 'fan' more than once"),
        ({"kinds": ["lathe"]}, "lathe"),
        ({"target_clips": 41}, "target_clips 41 is more than clips 40"),
        ({"snr_db": [10, 0]}, "the lower one first"),
        ({"seconds": 0.5, "anomalies": ["hunting"]}, "seconds 0.5 is too short for a rhythm. Set at least 1"),
    ],
)
def test_impossible_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        build(Machines, options, "data")
