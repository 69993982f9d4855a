"""Statistics of ``normalise: group``, ``client`` and ``part``. Oracle: z-scores by NumPy over the expected clips."""

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


def normalise_by_group(make: Make, dtype: str = "float32", **options: Any) -> DataSettings:
    return make(features={**DECIBELS, "normalise": "group", "dtype": dtype}, uneven=True, **options)


def make_folder_settings(root: Path, cache: Path, **features: Any) -> DataSettings:
    """Return settings on the files of a folder."""
    features = {**DECIBELS, "normalise": "group", **features}
    return DataSettings.model_validate({"name": f"{SETS}:Folder", "root": root, "cache": cache, "features": features})


def compute_decibels() -> list[np.ndarray]:
    """Compute the features of each synthetic clip before normalisation."""
    dataset, extractor = Made(uneven=True), FeatureExtractor(FeatureSettings(**DECIBELS))
    return [extractor(*dataset.read(row)) for row in dataset.manifest().to_pylist()]


def standardise(matrix: np.ndarray, reference: list[np.ndarray]) -> np.ndarray:
    """Compute z-scores with the statistics of the reference matrices."""
    frames = np.concatenate(reference).astype(np.float64)
    scores: np.ndarray = (matrix - frames.mean(axis=0)) / (frames.std(axis=0) + EPSILON)
    return scores


def test_held_out_clips_do_not_affect_training_features(tmp_path: Path) -> None:
    """Replacing the content of the test clips leaves every training feature bit-identical."""
    root = write_folder(tmp_path / "data", takes=4)
    settings = make_folder_settings(root, tmp_path / "cache")
    before = build_population(settings, 1)
    for file in root.glob("*_0.wav"):
        soundfile.write(file, np.random.default_rng(0).uniform(-0.9, 0.9, 2400), 8000)
    after = build_population(settings, 1)
    assert before.stores[0].folder != after.stores[0].folder
    for client in range(len(before)):
        actual, unscaled = (population.data(client).train for population in (before, after))
        np.testing.assert_array_equal(actual.clips, unscaled.clips)
        for number in range(len(actual)):
            index = np.array([number])
            np.testing.assert_array_equal(actual.batch(index).x.numpy(), unscaled.batch(index).x.numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_groups_are_normalised_by_their_training_clips(make_data: Make, dtype: str) -> None:
    """A group without training clips is normalised by the training clips of all groups."""
    settings = normalise_by_group(
        make_data, dtype, split={"test": {"by": "group", "values": ["g5"]}, "validation": 0.25}
    )
    population = build_population(settings, 1)
    raw, store = compute_decibels(), population.stores[0]
    assert store.frames.dtype == dtype
    trained: list[np.ndarray] = []
    for client in range(5):
        data = population.data(client)
        local = [raw[clip] for clip in data.train.clips]
        trained += local
        assert len(data.validation)
        for clip in [*data.train.clips, *data.validation.clips]:
            np.testing.assert_allclose(
                store.clip(clip), standardise(raw[clip], local), atol=1e-5, rtol=1e-6 if dtype == "float32" else 1e-3
            )
        statistics = population.statistics(client)
        assert statistics is not None
        np.testing.assert_allclose(statistics[0], np.concatenate(local).mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(statistics[1], np.concatenate(local).std(axis=0), rtol=1e-4)
    for clip in population.test.clips:
        np.testing.assert_allclose(
            store.clip(clip), standardise(raw[clip], trained), atol=1e-5, rtol=1e-6 if dtype == "float32" else 1e-3
        )
    overall = population.statistics()
    assert overall is not None
    np.testing.assert_allclose(overall[0], np.concatenate(trained).mean(axis=0), rtol=1e-5)
    assert population.messages == (
        "1 of 6 groups have no training clip. Their clips are normalised with the statistics of all training clips",
    )


def test_statistics_of_a_client_and_of_the_whole_training_set(make_data: Make) -> None:
    """``client`` uses the client's training clips; ``part``, and the server, use all training clips."""
    partition = {"by": "iid", "clients": 4}
    for normalise in ("client", "part"):
        settings = make_data(
            uneven=True,
            features={**DECIBELS, "normalise": normalise},
            partition=partition,
            split={"validation": 0.25, "client_test": {"fraction": 0.2}},
        )
        population = build_population(settings, 1)
        raw, store = compute_decibels(), population.stores[0]
        trained = [raw[clip] for i in range(4) for clip in population.data(i).train.clips]
        for i in range(4):
            data = population.data(i)
            reference = [raw[clip] for clip in data.train.clips] if normalise == "client" else trained
            for part in (data.train, data.validation, data.test):
                assert len(part)
                for clip in part.clips:
                    np.testing.assert_allclose(
                        store.clip(clip), standardise(raw[clip], reference), atol=1e-5, rtol=1e-6
                    )
            statistics = population.statistics(i)
            assert statistics is not None
            np.testing.assert_allclose(
                statistics[0], np.concatenate(reference).mean(axis=0, dtype=np.float64), rtol=1e-5
            )
        for clip in population.test.clips:
            np.testing.assert_allclose(store.clip(clip), standardise(raw[clip], trained), atol=1e-5, rtol=1e-6)
        assert population.messages == ()


def test_statistics_ignore_padding_and_unnormalised_features_are_cached_once(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    ragged = build_population(make_folder_settings(root, tmp_path / "cache"), 1).stores[0]
    padded = build_population(make_folder_settings(root, tmp_path / "cache", seconds=0.5), 1).stores[0]
    for clip, length in enumerate(padded.lengths):
        np.testing.assert_allclose(padded.clip(clip)[:length], ragged.clip(clip), atol=1e-6)
        assert not padded.clip(clip)[length:].any()
    stores = len(list((tmp_path / "cache").glob("*/store.json")))
    other = make_folder_settings(root, tmp_path / "cache").model_copy(
        update={"split": SplitSettings(test=HoldOutSettings(by="clip", fraction=0.4))}
    )
    assert build_population(other, 1).stores[0].folder != ragged.folder
    assert len(list((tmp_path / "cache").glob("*/store.json"))) == stores + 1  # the unnormalised features are reused
    assert build_population(other, 1).stores[0].folder == build_population(other, 1).stores[0].folder


def test_noisy_clips_use_noisy_statistics_and_triggered_test_clips_use_clean_ones(make_data: Make) -> None:
    settings = normalise_by_group(make_data, corrupt={"noise": {"snr_db": 5.0, "clients": ["g1"]}})
    options = {"clients": ["g1", "g2"], "target": "w0"}
    attack = registry.build(registry.find("raydfl.attacks", "backdoor", Attack, "attack"), options, "attack")
    population = build_population(settings, 1, attack=attack)
    plain = make_data(features=DECIBELS, uneven=True, corrupt=settings.corrupt)
    raw = build_population(plain, 1, attack=attack)

    def list_features(examples: Examples) -> list[np.ndarray]:
        return [examples.batch(np.array([i])).x[0].numpy() for i in range(len(examples))]

    noisy, noisy_raw = (list_features(source.data(1).train) for source in (population, raw))
    for actual, unscaled in zip(noisy, noisy_raw, strict=True):
        np.testing.assert_allclose(actual, standardise(unscaled, noisy_raw), atol=1e-4)
    attacked, attacked_raw = (list_features(source.data(2, attacking=True).train) for source in (population, raw))
    for actual, unscaled in zip(attacked, attacked_raw, strict=True):
        np.testing.assert_allclose(actual, standardise(unscaled, attacked_raw), atol=1e-4)
    rows = Made(uneven=True).manifest().to_pylist()
    triggered = zip(
        population.triggered.clips, list_features(population.triggered), list_features(raw.triggered), strict=True
    )
    for clip, actual, unscaled in triggered:
        group = int(rows[clip]["group"][1:])
        clean = [raw.stores[0].clip(index) for index in population.data(group).train.clips]
        np.testing.assert_allclose(actual, standardise(unscaled, clean), atol=1e-4)
