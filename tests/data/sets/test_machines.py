"""The generated machines."""

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


def rows_of(dataset: Machines, **wanted: str) -> Rows:
    rows: Rows = dataset.manifest().to_pylist()
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def test_only_tests_have_anomalies_and_every_machine_has_all_kinds_of_them() -> None:
    corpus = dataclasses.replace(SMALL, validation_clips=4, target_clips=2)
    rows = rows_of(corpus)
    assert {row["condition"] for row in rows if row["split"] == "train"} == {"normal"}
    for group in ("fan_00", "fan_01", "pump_00", "pump_01"):
        own = [row for row in rows if row["group"] == group]
        assert Counter((row["split"], row["label"]) for row in own) == {
            ("train", "normal"): 8,
            **{("validation", label): 4 for label in ("normal", "anomaly")},
            **{("test", label): 8 for label in ("normal", "anomaly")},
        }
        found = Counter(
            (row["anomaly"], row["domain"]) for row in own if row["split"] == "test" and row["anomaly"] != "none"
        )
        assert found == {(a, d): 1 for a in ("imbalance", "bearing", "rub", "clogging") for d in ("source", "target")}
        assert Counter(row["domain"] for row in own if row["split"] == "train") == {"target": 2, "source": 6}


@pytest.mark.parametrize("anomaly", ["imbalance", "bearing", "rub", "clogging"])
def test_the_strength_is_the_anomalys_power_over_the_machines(anomaly: str) -> None:
    """And nothing else of a clip depends on it."""
    for row in rows_of(SMALL, anomaly=anomaly):
        plain = dataclasses.replace(SMALL, strength_db=None).read(row)[0].astype(np.float64)
        for strength in (-20.0, 0.0):
            strange = dataclasses.replace(SMALL, strength_db=strength).read(row)[0] - plain
            assert 10 * np.log10(np.mean(strange**2) / np.mean(plain**2)) == pytest.approx(strength, abs=0.01)


def test_without_strength_nothing_tells_an_anomaly_and_with_it_something_does() -> None:
    """AUC of the distance from the training clips' mean log-mel frame, by machine: half of 80 pairs lie within 0.5 +- 0.2."""
    extract = FeatureExtractor(FeatureSettings(bands=32, window_ms=64, hop_ms=32, normalise="none"))

    def auc(strength: float | None) -> float:
        corpus = dataclasses.replace(SMALL, strength_db=strength, test_clips=12, ids=1)
        rows = rows_of(corpus)
        frames = np.array([extract(*corpus.read(row)).mean(axis=0) for row in rows])
        found = []
        for group in ("fan_00", "pump_00"):
            own = np.array([row["group"] == group for row in rows])
            train = own & np.array([row["split"] == "train" for row in rows])
            spread = (frames - frames[train].mean(axis=0)) / (frames[train].std(axis=0) + 0.1)
            truth = np.array([row["condition"] == "anomaly" for row in rows])
            test = own & ~train
            found.append(roc_auc_score(truth[test], np.square(spread[test]).mean(axis=1)))
        return float(np.mean(found))

    assert abs(auc(None) - 0.5) < 0.2  # its deviation is 0.12 / sqrt(2)
    assert auc(0.0) > 0.9


def test_a_clip_does_not_depend_on_what_else_is_in_the_corpus() -> None:
    row = rows_of(SMALL, group="pump_00", split="test")[-1]
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


def test_a_normal_clip_keeps_its_features_when_anomalies_get_stronger() -> None:
    row = rows_of(SMALL, split="test", condition="normal")[0]
    assert dataclasses.replace(SMALL, strength_db=0.0).identity(row) == SMALL.identity(row)


def test_the_background_lies_as_far_below_as_it_should() -> None:
    row = rows_of(SMALL, split="train")[0]
    own, with_room = (dataclasses.replace(SMALL, snr_db=snr).read(row)[0] for snr in (None, (6.0, 6.0)))
    room = with_room.astype(np.float64) - own
    assert 10 * np.log10(np.mean(own.astype(np.float64) ** 2) / np.mean(room**2)) == pytest.approx(6.0, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["fan", "fan"]}, "kinds names 'fan' more than once"),
        ({"kinds": ["lathe"]}, "lathe"),
        ({"target_clips": 41}, "target_clips 41 is more than clips 40"),
        ({"snr_db": [10, 0]}, "the lower one first"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        build(Machines, options, "data")
