"""``normalise: group``: of which clips statistics are, and who gets them. Oracle: z-scores by NumPy over the clips meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tiny_sets import Made, write_folder

from raydfl.attacks import Attack
from raydfl.core import registry
from raydfl.data.build import build_population
from raydfl.data.examples import Examples
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.wave import EPSILON
from raydfl.data.settings import DataSettings
from raydfl.data.steps.split import HoldOutSettings, SplitSettings

Make = Callable[..., DataSettings]
SETS = Path(__file__).parent / "tiny_sets.py"
DECIBELS: dict[str, Any] = {"sample_rate": 8000, "bands": 16, "normalise": "none"}


def by_group(make: Make, dtype: str = "float32", **options: Any) -> DataSettings:
    return make(features={**DECIBELS, "normalise": "group", "dtype": dtype}, uneven=True, **options)


def recorded(root: Path, cache: Path, **features: Any) -> DataSettings:
    """Settings on the files of a folder."""
    wanted = {**DECIBELS, "normalise": "group", **features}
    return DataSettings.model_validate({"name": f"{SETS}:Folder", "root": root, "cache": cache, "features": wanted})


def decibels() -> list[np.ndarray]:
    """Each made-up clip's features before they are normalised."""
    dataset, extractor = Made(uneven=True), FeatureExtractor(FeatureSettings(**DECIBELS))
    return [extractor(*dataset.read(row)) for row in dataset.manifest().to_pylist()]


def scaled(matrix: np.ndarray, by: list[np.ndarray]) -> np.ndarray:
    """z-scores with the statistics of other matrices."""
    frames = np.concatenate(by).astype(np.float64)
    scores: np.ndarray = (matrix - frames.mean(axis=0)) / (frames.std(axis=0) + EPSILON)
    return scores


def test_held_out_clips_change_no_training_feature(tmp_path: Path) -> None:
    """The test clips' content is another; every training feature has the same bits."""
    root = write_folder(tmp_path / "data", takes=4)
    settings = recorded(root, tmp_path / "cache")
    before = build_population(settings, 1)
    for file in root.glob("*_0.wav"):
        soundfile.write(file, np.random.default_rng(0).uniform(-0.9, 0.9, 2400), 8000)
    after = build_population(settings, 1)
    assert before.stores[0].folder != after.stores[0].folder
    for client in range(len(before)):
        mine, theirs = (population.data(client).train for population in (before, after))
        np.testing.assert_array_equal(mine.clips, theirs.clips)
        for number in range(len(mine)):
            index = np.array([number])
            np.testing.assert_array_equal(mine.batch(index).x.numpy(), theirs.batch(index).x.numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_statistics_are_those_of_the_groups_training_clips(made: Make, dtype: str) -> None:
    """All clips of a group with those of its training clips; a group without any with those of all training clips."""
    settings = by_group(made, dtype, split={"test": {"by": "group", "values": ["g5"]}, "validation": 0.25})
    population = build_population(settings, 1)
    raw, store = decibels(), population.stores[0]
    assert store.frames.dtype == dtype
    trained: list[np.ndarray] = []
    for client in range(5):
        data = population.data(client)
        own = [raw[clip] for clip in data.train.clips]
        trained += own
        assert len(data.validation)
        for clip in [*data.train.clips, *data.validation.clips]:
            np.testing.assert_allclose(
                store.clip(clip), scaled(raw[clip], own), atol=1e-5, rtol=1e-6 if dtype == "float32" else 1e-3
            )
        statistics = population.statistics(client)
        assert statistics is not None
        np.testing.assert_allclose(statistics[0], np.concatenate(own).mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(statistics[1], np.concatenate(own).std(axis=0), rtol=1e-4)
    for clip in population.test.clips:
        np.testing.assert_allclose(
            store.clip(clip), scaled(raw[clip], trained), atol=1e-5, rtol=1e-6 if dtype == "float32" else 1e-3
        )
    overall = population.statistics()
    assert overall is not None
    np.testing.assert_allclose(overall[0], np.concatenate(trained).mean(axis=0), rtol=1e-5)
    assert population.messages == (
        "1 of 6 groups have no training clip. Their clips are normalised with the statistics of all training clips",
    )


def test_statistics_of_a_client_and_of_the_whole_set(made: Make) -> None:
    """Each client's clips by its own training clips, the server's by all; or every clip by all training clips."""
    partition = {"by": "iid", "clients": 4}
    for normalise in ("client", "part"):
        settings = made(
            uneven=True,
            features={**DECIBELS, "normalise": normalise},
            partition=partition,
            split={"validation": 0.25, "client_test": {"fraction": 0.2}},
        )
        population = build_population(settings, 1)
        raw, store = decibels(), population.stores[0]
        trained = [raw[clip] for i in range(4) for clip in population.data(i).train.clips]
        for i in range(4):
            data = population.data(i)
            by = [raw[clip] for clip in data.train.clips] if normalise == "client" else trained
            for part in (data.train, data.validation, data.test):
                assert len(part)
                for clip in part.clips:
                    np.testing.assert_allclose(store.clip(clip), scaled(raw[clip], by), atol=1e-5, rtol=1e-6)
            statistics = population.statistics(i)
            assert statistics is not None
            np.testing.assert_allclose(statistics[0], np.concatenate(by).mean(axis=0, dtype=np.float64), rtol=1e-5)
        for clip in population.test.clips:
            np.testing.assert_allclose(store.clip(clip), scaled(raw[clip], trained), atol=1e-5, rtol=1e-6)
        assert population.messages == ()


def test_padding_takes_no_part_in_the_statistics_and_features_as_they_are_are_kept_once(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    ragged = build_population(recorded(root, tmp_path / "cache"), 1).stores[0]
    padded = build_population(recorded(root, tmp_path / "cache", seconds=0.5), 1).stores[0]
    for clip, sounding in enumerate(padded.lengths):
        np.testing.assert_allclose(padded.clip(clip)[:sounding], ragged.clip(clip), atol=1e-6)
        assert not padded.clip(clip)[sounding:].any()
    stores = len(list((tmp_path / "cache").glob("*/store.json")))
    other = recorded(root, tmp_path / "cache").model_copy(
        update={"split": SplitSettings(test=HoldOutSettings(by="clip", fraction=0.4))}
    )
    assert build_population(other, 1).stores[0].folder != ragged.folder
    assert len(list((tmp_path / "cache").glob("*/store.json"))) == stores + 1  # not two: decibels were there
    assert build_population(other, 1).stores[0].folder == build_population(other, 1).stores[0].folder


def test_noisy_training_clips_have_statistics_of_their_own_and_triggered_test_clips_the_clean_ones(made: Make) -> None:
    settings = by_group(made, corrupt={"noise": {"snr_db": 5.0, "clients": ["g1"]}})
    options = {"clients": ["g1", "g2"], "target": "w0"}
    attack = registry.build(registry.find("raydfl.attacks", "backdoor", Attack, "attack"), options, "attack")
    population = build_population(settings, 1, attack=attack)
    plain = made(features=DECIBELS, uneven=True, corrupt=settings.corrupt)
    raw = build_population(plain, 1, attack=attack)

    def matrices(examples: Examples) -> list[np.ndarray]:
        return [examples.batch(np.array([i])).x[0].numpy() for i in range(len(examples))]

    noisy, noisy_raw = (matrices(each.data(1).train) for each in (population, raw))
    for mine, theirs in zip(noisy, noisy_raw, strict=True):
        np.testing.assert_allclose(mine, scaled(theirs, noisy_raw), atol=1e-4)
    attacked, attacked_raw = (matrices(each.data(2, attacking=True).train) for each in (population, raw))
    for mine, theirs in zip(attacked, attacked_raw, strict=True):
        np.testing.assert_allclose(mine, scaled(theirs, attacked_raw), atol=1e-4)
    rows = Made(uneven=True).manifest().to_pylist()
    triggered = zip(population.triggered.clips, matrices(population.triggered), matrices(raw.triggered), strict=True)
    for clip, mine, theirs in triggered:
        group = int(rows[clip]["group"][1:])
        clean = [raw.stores[0].clip(each) for each in population.data(group).train.clips]
        np.testing.assert_allclose(mine, scaled(theirs, clean), atol=1e-4)
