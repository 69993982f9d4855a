"""Sets of machines' sounds: the samples, and small trees in the layouts of which there is none."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from raydfl.core.errors import DataError
from raydfl.core.registry import build
from raydfl.data.dataset import find_dataset
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.sets.dcase2020_task2 import DCASE2020Task2
from raydfl.data.sets.dcase2023_task2 import DCASE2023Task2
from raydfl.data.sets.machines import RATE, Machines
from raydfl.data.sets.mimii import MIMII
from raydfl.data.sets.mimii_due import MIMIIDUE
from raydfl.data.sets.toyadmos import ToyADMOS

WriteAudio = Callable[..., Path]
Rows = list[dict[str, Any]]


def test_mimii_has_eight_channels_and_each_can_be_chosen(recordings: Path) -> None:
    dataset = MIMII(root=recordings / "mimii")
    rows = dataset.manifest().to_pylist()
    assert [(row["label"], row["group"], row["snr"], row["recording"]) for row in rows] == [
        ("anomaly", "fan_00", "unknown", "fan/id_00/abnormal/00000000"),
        ("normal", "fan_00", "unknown", "fan/id_00/normal/00000000"),
    ]
    samples, rate = dataset.read(rows[0])
    assert samples.shape == (160_000, 8)
    for channel, expected in (("first", samples[:, 0]), (7, samples[:, 7]), ("mean", samples.mean(axis=1))):
        settings = FeatureSettings(channel=channel)  # type: ignore[arg-type]
        assert np.array_equal(FeatureExtractor(settings).wave(samples, rate), expected)
    with pytest.raises(DataError, match="has 8 channels, and data.features.channel is 8, where 0 is the first"):
        FeatureExtractor(FeatureSettings(channel=8)).wave(samples, rate)


def test_mimii_with_folders_of_ratios(tmp_path: Path, write_audio: WriteAudio) -> None:
    for name in (
        "-6_dB_fan/fan/id_02/normal/00000003",
        "6_dB_fan/fan/id_02/normal/00000003",
        "0_dB_pump/pump/id_00/abnormal/1",
    ):
        write_audio(f"{name}.wav")
    rows = MIMII(root=tmp_path).manifest().to_pylist()
    assert {(row["snr"], row["group"], row["label"]) for row in rows} == {
        ("-6", "fan_02", "normal"),
        ("6", "fan_02", "normal"),
        ("0", "pump_00", "anomaly"),
    }
    assert len({row["recording"] for row in rows}) == 2
    assert MIMII(root=tmp_path, snr=-6).manifest().num_rows == 1
    with pytest.raises(DataError, match=r"no clip in .* is of 3 dB by its folder's name .*there are -6, 0, 6"):
        MIMII(root=tmp_path, snr=3).manifest()
    with pytest.raises(DataError, match="has no machines of the type 'valve'; there are fan, pump"):
        MIMII(root=tmp_path, machines=("valve",)).manifest()


def test_dcase_2020(recordings: Path) -> None:
    rows = DCASE2020Task2(root=recordings / "dcase2020_task2").manifest().to_pylist()
    counts = Counter((row["machine"], row["split"], row["condition"]) for row in rows)
    assert counts == {
        (machine, split, condition): clips
        for machine in ("fan", "pump", "slider", "valve")
        for split, condition, clips in (("train", "normal", 2), ("test", "normal", 1), ("test", "anomaly", 1))
    }
    assert {row["group"] for row in rows if row["machine"] == "fan"} == {"fan_00", "fan_02"}


def test_dcase_2023(recordings: Path) -> None:
    root = recordings / "dcase2023_task2"
    rows = DCASE2023Task2(root=root).manifest().to_pylist()
    assert Counter(row["machine"] for row in rows) == dict.fromkeys(
        ("ToyCar", "ToyTrain", "bearing", "fan", "valve"), 4
    )
    assert Counter((row["split"], row["label"]) for row in rows) == {
        ("train", "normal"): 10,
        ("test", "normal"): 6,
        ("test", "anomaly"): 4,
    }
    assert "attribute_vel" not in rows[0]  # only bearings have it
    bearings = DCASE2023Task2(root=root, machines=("bearing",)).manifest().to_pylist()
    assert {(row["domain"], row["section"], row["attribute_vel"], row["attribute_loc"]) for row in bearings} == {
        ("source", "00", "16", "A"),
        ("source", "00", "21", "A"),
        ("source", "00", "9", "A"),
        ("target", "00", "8", "G"),
    }
    assert bearings[0]["attributes"].startswith("vel_")


@pytest.mark.parametrize("name", ["mimii_due", "mimii_dg"])
def test_sections_in_other_years_layouts(name: str, tmp_path: Path, write_audio: WriteAudio) -> None:
    test = {"mimii_due": "target_test", "mimii_dg": "test"}[name]
    write_audio("fan/train/section_00_source_train_normal_0000_strength_1_ambient.wav")
    write_audio(f"fan/{test}/section_02_target_test_anomaly_0007.wav")
    write_audio("fan/test/section_03_0000.wav")  # of an evaluation set: nobody says what it is
    rows = build(find_dataset(name), {"root": tmp_path}, "data").manifest().to_pylist()
    found = [
        (row["group"], row["section"], row["domain"], row["split"], row["label"], row["attributes"]) for row in rows
    ]
    assert sorted(found) == [
        ("fan_00", "00", "source", "train", "normal", "strength_1_ambient"),
        ("fan_02", "02", "target", "test", "anomaly", None),
    ]


def test_attributes_that_are_no_pairs_are_no_columns(tmp_path: Path, write_audio: WriteAudio) -> None:
    write_audio("gearbox/train/section_00_source_train_normal_0000_0_g_25_mm_2000_mV_none.wav")
    assert not [name for name in MIMIIDUE(root=tmp_path).manifest().column_names if name.startswith("attribute_")]


def test_toyadmos_takes_one_microphone(tmp_path: Path, write_audio: WriteAudio) -> None:
    for channel in (1, 2):
        write_audio(f"ToyCar/case1/NormalSound_IND/1100010001_ToyCar_case1_normal_IND_ch{channel}_0001.wav")
        write_audio(f"ToyCar/case4/AnomalousSound_IND/1401010001_ToyCar_case4_ab01_IND_ch{channel}_0001.wav")
    write_audio("ToyCar/case1/NormalSound_CNT/1100110001_ToyCar_case1_normal_CNT_ch1_0001.wav")
    rows = ToyADMOS(root=tmp_path, microphone=2).manifest().to_pylist()
    assert sorted((row["group"], row["label"], row["anomaly"], "_ch2_" in row["clip"]) for row in rows) == [
        ("ToyCar_1", "normal", "none", True),
        ("ToyCar_4", "anomaly", "ab01", True),
    ]
    with pytest.raises(DataError, match="has no clips of microphone 3; there are 1, 2"):
        ToyADMOS(root=tmp_path, microphone=3).manifest()


# Generated machines


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
        ({"target_clips": 41}, "target_clips is 41 of 40 clips"),
        ({"snr_db": [10, 0]}, "the lower one first"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        build(Machines, options, "data")
