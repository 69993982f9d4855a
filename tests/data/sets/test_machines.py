"""The generated data set of machines."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

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
    for changed in ({"seed": 1}, {"snr_db": (3.0, 3.0)}, {"strength_db": 0.0}, {"seconds": 0.25}):
        other = dataclasses.replace(SMALL, **changed)  # type: ignore[arg-type]
        assert not np.array_equal(other.read(row)[0], samples[: len(other.read(row)[0])])
        assert other.identity(row) != SMALL.identity(row)


def test_normal_clips_do_not_depend_on_the_strength_of_anomalies() -> None:
    row = select_rows(SMALL, split="test", condition="normal")[0]
    assert dataclasses.replace(SMALL, strength_db=0.0).identity(row) == SMALL.identity(row)


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
    ],
)
def test_impossible_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        build(Machines, options, "data")
