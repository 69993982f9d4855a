from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tiny_sets import Folder, Made, write_folder

from raydfl.core.errors import ConfigError, DataError, InputError
from raydfl.data.build import build_population
from raydfl.data.features.cache import FeatureStore, prepare
from raydfl.data.features.extraction import Chunk, ChunkReport, chunk_bounds
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.file import FileFeatures
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.wave import EPSILON
from raydfl.data.noise import ClipNoise, seed_noise
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
from raydfl.data.source import Source
from raydfl.engine.config import Config, make_config
from raydfl.experiments import describe_features
from raydfl.runs.inference import classify
from raydfl.runs.inference.front_end import describe_front_end
from raydfl.runs.inference.model import load_model
from raydfl.testing import assert_same_bits, describe_population, train_federation

HERE = Path(__file__).parent
SETS, OWN = HERE / "tiny_sets.py", HERE / "own_features.py"
LOG_MEL: dict[str, Any] = {"sample_rate": 8000, "bands": 16, "hop_ms": 20}
MADE = Made(groups=3, labels=2, takes=4, uneven=True)
SOURCE = Source(f"{SETS}:Made", {"groups": 3, "labels": 2, "takes": 4, "uneven": True})
Write = Callable[[Path, Mapping[str, np.ndarray]], Path]


def write_safetensors(place: Path, matrices: Mapping[str, np.ndarray]) -> Path:
    path = place.with_suffix(".safetensors")
    safetensors.numpy.save_file(dict(matrices), path)
    return path


def write_npz(place: Path, matrices: Mapping[str, np.ndarray]) -> Path:
    path = place.with_suffix(".npz")
    np.savez(path, **matrices)  # type: ignore[arg-type]
    return path


def write_npy_folder(place: Path, matrices: Mapping[str, np.ndarray]) -> Path:
    for clip, matrix in matrices.items():
        file = place / f"{clip}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, matrix)
    return place


WRITERS = pytest.mark.parametrize("write", [write_safetensors, write_npz, write_npy_folder])


def compute_log_mels(noise: ClipNoise | None = None, **options: Any) -> dict[str, np.ndarray]:
    """Compute the features of all clips, as a user would before writing a file."""
    extractor = FeatureExtractor(FeatureSettings(**LOG_MEL, **options))
    features = {}
    for index, row in enumerate(MADE.manifest().to_pylist()):
        wave = extractor.wave(*MADE.read(row))
        if noise is not None:
            power = float(np.mean(np.square(wave, dtype=np.float64)))
            samples = np.random.default_rng(noise.seeds[index]).standard_normal(wave.size)
            wave = (wave + samples * np.sqrt(power / 10 ** (noise.snr_db / 10))).astype(np.float32)
        features[row["clip"]] = extractor.features(wave)
    return features


def prepare_store(features: AnyFeatures, cache: Path, **options: Any) -> FeatureStore:
    return prepare(SOURCE, MADE.manifest(), features, cache=cache, **options)


def assert_equal_stores(a: FeatureStore, b: FeatureStore) -> None:
    """Assert that two stores have the same bits."""
    assert (a.frames.dtype, a.length) == (b.frames.dtype, b.length)
    for name in ("frames", "offsets", "lengths"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def make_file_features(path: Path, **options: Any) -> FileFeatures:
    return FileFeatures.model_validate({"kind": "file", "path": path, **options})


def configure(folder: Path, features: Any, **data: Any) -> Config:
    """Return a configuration of a federation with two rounds."""
    return make_config(
        {
            "method": {"name": "fedavg"},
            "models": {"model": {"name": "crnn_tiny", "hidden": 6, "filters": [4]}},
            "data": {
                "name": f"{SETS}:Made",
                "groups": 3,
                "labels": 2,
                "takes": 4,
                "uneven": True,
                "features": features,
                "cache": str(folder / "cache"),
                **data,
            },
            "train": {"rounds": 2, "cohort": 2, "batch_size": 4, "optimiser": {"lr": 0.3}},
            "ray": {"actors": 0},
            "track": {"mlflow": False},
            "run": {"seed": 1, "name": "run", "dir": str(folder / "runs")},
        }
    )


# -- features from a file ----------------------------------------------------------------------------------------------


@WRITERS
@pytest.mark.parametrize("seconds", [None, 0.3])
def test_log_mel_from_a_file_is_bit_identical_to_log_mel(tmp_path: Path, write: Write, seconds: float | None) -> None:
    settings = FeatureSettings(**LOG_MEL, seconds=seconds)
    path = write(tmp_path / "features", compute_log_mels(seconds=seconds))
    settings = make_file_features(path, frames=settings.frames)
    assert settings.bands == 16
    assert_equal_stores(prepare_store(settings, tmp_path / "cache"), prepare_store(settings, tmp_path / "cache"))


def test_a_run_on_a_file_matches_the_run_on_its_recordings(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "features", compute_log_mels(seconds=0.3))
    noisy = seed_noise(MADE.manifest().column("clip").to_pylist(), 10.0, 1)
    noisy_path = write_npz(tmp_path / "noisy", compute_log_mels(noisy, seconds=0.3))
    corrupt = {"noise": {"snr_db": 10.0, "clients": 2}, "labels": {"rate": 0.5, "clients": 1}}
    features = {"kind": "file", "path": str(path), "noisy_path": str(noisy_path), "frames": 16}
    from_file = configure(tmp_path / "file", features, corrupt=corrupt)
    from_waves = configure(tmp_path / "waves", {**LOG_MEL, "seconds": 0.3}, corrupt=corrupt)
    populations = [build_population(config.data, 1) for config in (from_file, from_waves)]
    clean, noisy_store = populations[0].stores
    assert 0 < len(noisy_store) < len(clean)
    for a, b in zip(populations[0].stores, populations[1].stores, strict=True):
        assert_equal_stores(a, b)
    assert describe_population(populations[0], False) == describe_population(populations[1], False)
    assert_same_bits(train_federation(from_file), train_federation(from_waves))


@pytest.mark.parametrize("normalise", ["none", "group"])
def test_a_clip_without_noisy_features_can_be_skipped(tmp_path: Path, normalise: str) -> None:
    """Oracle: features without the clip."""
    noisy, clean = compute_log_mels(), compute_log_mels()
    noise = {"noise": {"snr_db": 10.0, "clients": 3}}

    def build(name: str) -> Population:
        paths = {
            key: str(write_npz(tmp_path / f"{name}-{key}", matrices))
            for key, matrices in {"path": clean, "noisy_path": noisy}.items()
        }
        features = {"kind": "file", **paths, "normalise": normalise}
        return build_population(configure(tmp_path, features, corrupt=noise, unreadable="skip").data, 1)

    missing = int(build("whole").data(0).train.clips[0])
    clip = MADE.manifest().column("clip")[missing].as_py()
    del noisy[clip]
    partial = build("partial")
    del clean[clip]
    assert [name for name, _ in partial.skipped] == [clip]
    expected = build("without")
    assert len(partial) == len(expected) == 3
    for index in range(3):
        actual, reference = (population.data(index).train for population in (partial, expected))
        np.testing.assert_array_equal(actual.clips, reference.clips)
        np.testing.assert_array_equal(*(part.batch(np.arange(len(part))).x.numpy() for part in (actual, reference)))


def normalise_by_group(folder: Path, features: dict[str, Any]) -> FeatureStore:
    data = configure(folder, {**features, "normalise": "group"}).data
    return build_population(data, 1).stores[0]


def test_normalise_group_matches_log_mel_and_normalise_clip_is_a_z_score(tmp_path: Path) -> None:
    decibels = compute_log_mels(normalise="none")
    path = write_npz(tmp_path / "features", decibels)
    assert_equal_stores(
        normalise_by_group(tmp_path, {"kind": "file", "path": str(path)}), normalise_by_group(tmp_path, LOG_MEL)
    )
    by_clip = prepare_store(make_file_features(path, normalise="clip"), tmp_path / "cache")
    for index, matrix in enumerate(decibels.values()):
        expected = (matrix - matrix.mean(axis=0)) / (matrix.std(axis=0) + EPSILON)
        np.testing.assert_allclose(by_clip.clip(index), expected, atol=1e-4)
    unscaled = prepare_store(make_file_features(path), tmp_path / "cache")
    for index, matrix in enumerate(decibels.values()):
        np.testing.assert_array_equal(unscaled.clip(index), matrix)


@WRITERS
def test_clips_are_cut_or_padded_and_converted(tmp_path: Path, write: Write) -> None:
    lengths = (2, 5, 9)
    rng = np.random.default_rng(0)
    clips = MADE.manifest().column("clip").to_pylist()
    settings = {
        clip: rng.standard_normal((lengths[index % 3], 4)).astype(("float16", "float32", "float64")[index % 3])
        for index, clip in enumerate(clips)
    }
    store = prepare_store(
        make_file_features(write(tmp_path / "settings", settings), frames=5, dtype="float16"), tmp_path / "cache"
    )
    assert (store.length, store.frames.dtype, store.lengths[:3].tolist()) == (5, np.float16, [2, 5, 5])
    for index, matrix in enumerate(settings.values()):
        clip = store.clip(index)
        np.testing.assert_array_equal(clip[: len(matrix)], matrix[:5].astype(np.float32).astype(np.float16))
        assert not clip[len(matrix) :].any()


def test_recordings_are_not_opened(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    manifest = Folder(root=root).manifest()
    for file in root.iterdir():
        file.write_bytes(b"")
    matrices = {clip: np.full((3, 2), index, np.float32) for index, clip in enumerate(manifest["clip"].to_pylist())}
    features = make_file_features(write_npy_folder(tmp_path / "settings", matrices))
    store = prepare(Source(f"{SETS}:Folder", {"root": str(root)}), manifest, features, cache=tmp_path / "cache")
    assert store.frames[::3, 0].tolist() == list(range(len(matrices)))


def test_more_bands_give_smaller_chunks(tmp_path: Path) -> None:
    assert chunk_bounds([None] * 40, 4) == [(0, 32), (32, 40)]
    assert chunk_bounds([100.0] * 4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    matrices = {clip: np.full((1, 128 * 8), number, np.float32) for number, clip in enumerate(compute_log_mels())}
    sizes = []

    def run(function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
        sizes.extend(len(chunk.rows) for chunk in chunks)
        return map(function, chunks)

    settings = make_file_features(write_npz(tmp_path / "features", matrices))
    store = prepare_store(settings, tmp_path / "cache", run_chunks=run)
    assert sizes == [16, 8]
    assert store.frames[:, 0].tolist() == list(range(24))


@WRITERS
def test_the_cache_key_depends_on_the_content(tmp_path: Path, write: Write) -> None:
    matrices = compute_log_mels()
    (tmp_path / "elsewhere").mkdir()
    first = prepare_store(make_file_features(write(tmp_path / "features", matrices)), tmp_path / "cache")
    moved = write(tmp_path / "elsewhere" / "moved", matrices)
    assert prepare_store(make_file_features(moved), tmp_path / "cache").folder == first.folder
    assert prepare_store(make_file_features(moved, frames=4), tmp_path / "cache").folder != first.folder
    changed = {clip: matrix + 1 for clip, matrix in matrices.items()}
    shutil.rmtree(moved) if moved.is_dir() else moved.unlink()
    assert write(tmp_path / "elsewhere" / "moved", changed) == moved
    other = prepare_store(make_file_features(moved), tmp_path / "cache")
    assert other.folder != first.folder
    np.testing.assert_array_equal(other.frames, np.concatenate(list(changed.values())))


@WRITERS
def test_clips_without_features_raise_or_are_skipped(tmp_path: Path, write: Write) -> None:
    matrices = compute_log_mels()
    for clip in ("w1/g0/3", "w0/g1/2"):
        del matrices[clip]
    settings = make_file_features(write(tmp_path / "features", matrices))
    with pytest.raises(
        DataError, match=r"2 of 24 clips have no features, the first 'w1/g0/3': .*data\.unreadable=skip"
    ):
        prepare_store(settings, tmp_path / "cache")
    store = prepare_store(settings, tmp_path / "cache", unreadable="skip")
    clips = MADE.manifest().column("clip").to_pylist()
    assert [clips[index] for index in store.failures] == ["w1/g0/3", "w0/g1/2"]
    assert np.flatnonzero(store.lengths == 0).tolist() == list(store.failures)
    skipped = build_population(configure(tmp_path, settings.model_dump(mode="json"), unreadable="skip").data, 1).skipped
    assert [clip for clip, _ in skipped] == ["w1/g0/3", "w0/g1/2"]


def test_the_error_lists_names_in_the_file(tmp_path: Path) -> None:
    settings = make_file_features(
        write_npz(tmp_path / "features", {f"{clip}.wav": matrix for clip, matrix in compute_log_mels().items()})
    )
    with pytest.raises(DataError, match=r"has no array 'w0/g0/0', but 24 others \('w0/g0/0.wav', 'w0/g0/1.wav', 'w0"):
        prepare_store(settings, tmp_path / "cache")


@WRITERS
@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((2, 3, 16), np.float32), r"its features have the shape \[2, 3, 16\] instead of \[frames, bands\]"),
        (np.zeros((3, 15), np.float32), "its frames have 15 features, but data.features.bands is 16"),
        (np.zeros((3, 16), np.int64), "its features have the type (int64|I64), not one of float16, float32, float64"),
        (np.zeros((0, 16), np.float32), "its features have no frames"),
        (np.full((3, 16), np.nan, np.float32), "48 of its 48 features in .* are NaN or infinite"),
        (np.full((3, 16), 1e300), "48 of its 48 features in .* are NaN or infinite"),
    ],
)
def test_unusable_matrices_are_rejected(tmp_path: Path, write: Write, matrix: np.ndarray, message: str) -> None:
    settings = make_file_features(write(tmp_path / "features", compute_log_mels() | {"w1/g2/1": matrix}))
    with pytest.raises(DataError, match=f"(?s)1 of 24 clips cannot be read:.*w1/g2/1: {message}"):
        prepare_store(settings, tmp_path / "cache")
    store = prepare_store(settings, tmp_path / "cache", unreadable="skip")
    assert [MADE.manifest()["clip"][index].as_py() for index in store.failures] == ["w1/g2/1"]


def test_pickled_objects_are_not_opened(tmp_path: Path) -> None:
    path = write_npy_folder(tmp_path / "features", compute_log_mels())
    np.save(path / "w0" / "g0" / "1.npy", np.array([{}], object))
    with pytest.raises(DataError, match=r"1\.npy: cannot be read: .*Python objects in dtype"):
        prepare_store(make_file_features(path), tmp_path / "cache")


def encode_header(header: str) -> bytes:
    """Return the bytes of an .npy file with this text as its header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def test_an_unparsable_header_is_reported_as_damage(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "deep.npz", "w") as archive:
        archive.writestr("w0.npy", encode_header("[" * 5000))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "w0.npy").write_bytes(encode_header("[" * 5000))
    for name in ("deep.npz", "deep"):
        with pytest.raises(DataError, match=f"data.features: .*{name}.*cannot be read"):
            make_file_features(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "absent.npz",
            None,
            "No such file or directory. It must be a .safetensors file, an .npz file, or a folder of CLIP",
        ),
        ("absent", None, "there is no such file or folder. It must be a .safetensors file, an .npz file, or a folder"),
        ("features.csv", b"", "its name has no known ending"),
        ("cut.npz", b"PK\x03\x04", "cannot be read: File is not a zip file"),
        ("cut.safetensors", b"\x09", "cannot be read: .*header"),
    ],
)
def test_unusable_files_are_rejected(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"data.features: .*{name}.*{message}"):
        make_file_features(path)
    settings = make_file_features(path, bands=16)  # a run's settings have the bands, so the file is read later
    with pytest.raises(DataError, match=f"data.features: .*{name}.*"):
        prepare_store(settings, tmp_path / "cache")


def test_the_number_of_bands_needs_a_file_with_matrices(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no features in"):
        make_file_features(write_npz(tmp_path / "empty", {}))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="there are no features in"):
        make_file_features(tmp_path / "folder")
    for write in (write_safetensors, write_npz, write_npy_folder):
        with pytest.raises(DataError, match=r"the features of 'a' in .* have the shape \[3\]. It must be"):
            make_file_features(write(tmp_path / "vector", {"a": np.zeros(3, np.float32)}))


def test_a_run_records_the_number_of_bands_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz(tmp_path / "features", compute_log_mels())
    monkeypatch.chdir(tmp_path)
    config = configure(tmp_path, {"kind": "file", "path": "features.npz"})
    recorded = config.model_dump(mode="json")["data"]["features"]
    assert (recorded["bands"], recorded["path"]) == (16, str(tmp_path / "features.npz"))
    (tmp_path / "features.npz").unlink()
    assert configure(tmp_path, recorded).digest() == config.digest()


@pytest.mark.parametrize(
    ("features", "data", "message"),
    [
        ({"kind": "mfcc"}, {}, r"data.features.kind is 'mfcc'. Choose one of file, image, kaldi, logmel, model"),
        (3, {}, r"data.features is 3. It must be a group of settings"),
        ({"kind": "file"}, {}, r"data.features.path is missing. It must be a .safetensors file"),
        (
            {"kind": "file", "path": "x.npz", "bands": 0},
            {},
            r"data.features.bands: Input should be greater than or equal to 1",
        ),
        (
            {"kind": "file", "path": "x.npz", "bands": 2, "frame": 2},
            {},
            r"unknown key 'frame'. Did you mean 'frames'\?",
        ),
        (
            {"kind": "file", "path": "x.npz", "hop_ms": 10},
            {},
            r"data.features: 'hop_ms' is a setting of the kind logmel, not of file with the settings kind, path, noisy_path, "
            r"bands, frames, normalise, dtype. Set the whole group: data.features='\{kind: file, ...\}'",
        ),
        ({"path": "x.npz"}, {}, "'path' is a setting of the kind file, not of logmel"),
        (
            {"kind": "file", "path": "x.npz", "bands": 2, "frames": 4},
            {"segment": {"frames": 2, "stride": 1}},
            "data.features.frames limits it. Set either",
        ),
        (
            {"kind": "file", "path": "x.npz", "bands": 2},
            {"corrupt": {"noise": {"snr_db": 10}}},
            "data.corrupt.noise: features from a file have no recordings .* data.features.noisy_path",
        ),
        ({"kind": "model", "model": "x.py"}, {}, "data.features.model"),
        ({"kind": "model", "model": "x.py:X"}, {}, "data.features.bands: Field required"),
    ],
)
def test_impossible_settings_are_rejected(features: Any, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSettings(name=f"{SETS}:Made", features=features, **data)


@pytest.mark.parametrize("attack", [{"name": "backdoor", "target": "w0"}, {"name": "corrupt_recordings"}])
def test_recording_attacks_need_recordings(tmp_path: Path, attack: dict[str, Any]) -> None:
    values = configure(tmp_path, LOG_MEL).model_dump(mode="json")
    config = make_config({**values, "attack": attack})
    features = {"kind": "file", "path": "x.npz", "bands": 16}
    with pytest.raises(ConfigError, match=f"attack '{attack['name']}' needs recordings, but features of the kind"):
        make_config({**values, "attack": attack, "data": {**values["data"], "features": features}})
    path = write_npz(tmp_path / "features", compute_log_mels())
    data = config.data.model_copy(update={"features": make_file_features(path)})
    with pytest.raises(ConfigError, match="alters recordings"):
        build_population(data, 1, attack=config.components.attack)
    flipped = {
        **values,
        "attack": "label_flip",
        "data": {**values["data"], "features": make_file_features(path).model_dump()},
    }
    assert make_config(flipped).components.attack is not None


# -- features by a model -----------------------------------------------------------------------------------------------


def make_model_features(name: str, **options: Any) -> ModelFeatures:
    return ModelFeatures.model_validate({"kind": "model", "model": f"{OWN}:{name}", "sample_rate": 8000, **options})


@pytest.mark.parametrize("seconds", [None, 0.3])
def test_log_mel_as_a_model_is_bit_identical_to_log_mel(tmp_path: Path, seconds: float | None) -> None:
    settings = FeatureSettings(**LOG_MEL, seconds=seconds)
    wrapped = make_model_features("LogMel", bands=16, options=LOG_MEL, seconds=seconds, frames=settings.frames)
    noise = seed_noise(MADE.manifest().column("clip").to_pylist(), 10.0, 1)
    for options in ({}, {"noise": noise}):
        assert_equal_stores(
            prepare_store(wrapped, tmp_path / "cache", **options),
            prepare_store(settings, tmp_path / "cache", **options),
        )
    decibels = wrapped.model_copy(update={"options": {**LOG_MEL, "normalise": "none"}})
    assert_equal_stores(
        normalise_by_group(tmp_path, decibels.model_dump(mode="json")),
        normalise_by_group(tmp_path, {**LOG_MEL, "seconds": seconds}),
    )


def test_log_mel_as_a_model_gives_the_same_run_and_predictions(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data", seconds=0.3)
    wrapped = {"kind": "model", "model": f"{OWN}:LogMel", "bands": 16, "options": LOG_MEL, "sample_rate": 8000}
    runs = {}
    for name, features in (("waves", LOG_MEL), ("model", wrapped)):
        values = configure(tmp_path / name, LOG_MEL).model_dump(mode="json")
        data = {"name": f"{SETS}:Folder", "root": str(root), "features": features, "cache": str(tmp_path / "cache")}
        config = make_config({**values, "data": {**data, "segment": {"frames": 8, "stride": 4}}})
        runs[name] = (config, train_federation(config))
    assert_same_bits(runs["waves"][1], runs["model"][1])
    files = sorted(root.glob("*_0.wav"))
    predictions = {name: classify(Path(config.run.dir) / "run", files) for name, (config, _) in runs.items()}
    assert not any(prediction.error for prediction in predictions["model"])
    for a, b in zip(predictions["waves"], predictions["model"], strict=True):
        np.testing.assert_array_equal(a.probabilities, b.probabilities)


def test_random_numbers_of_a_model_depend_only_on_the_clip(tmp_path: Path) -> None:
    first = prepare_store(make_model_features("Dithered", bands=5), tmp_path / "a")
    assert first.frames.any()
    assert_equal_stores(prepare_store(make_model_features("Dithered", bands=5), tmp_path / "b"), first)
    manifest = MADE.manifest().slice(7, 3)  # different preceding clips and chunks must not change the draws
    partial_store = prepare(SOURCE, manifest, make_model_features("Dithered", bands=5), cache=tmp_path / "c")
    for index in range(3):
        np.testing.assert_array_equal(partial_store.clip(index), first.clip(7 + index))
    plain = prepare_store(make_model_features("Frames", bands=5), tmp_path / "a")
    assert (plain.frames != 0).all()  # active dropout would set half of them to 0
    assert not np.array_equal(plain.frames, first.frames)


def test_each_setting_of_a_model_changes_the_features(tmp_path: Path) -> None:
    import torch

    base = make_model_features("Frames", bands=5)
    first = prepare_store(base, tmp_path / "cache")
    for number in (0, 1):
        torch.save(
            {"layer.weight": torch.full((5, 80), 0.1 + number), "layer.bias": torch.zeros(5)}, tmp_path / f"{number}.pt"
        )
    changes: list[dict[str, Any]] = [
        {"options": {"scale": 2.0}},
        {"weights": tmp_path / "0.pt"},
        {"weights": tmp_path / "1.pt"},
        {"sample_rate": 4000},
        {"seconds": 0.1},
        {"frames": 4},
        {"normalise": "clip"},
        {"dtype": "float16"},
        {"model": f"{OWN}:Dithered"},
    ]
    stores = [first, *(prepare_store(base.model_copy(update=change), tmp_path / "cache") for change in changes)]
    contents = {(store.frames.dtype, store.frames.shape, store.frames.tobytes()) for store in stores}
    assert len(contents) == len({store.folder for store in stores}) == 10
    doubled = stores[1].frames
    np.testing.assert_array_equal(doubled, 2 * first.frames)
    shutil.copy(tmp_path / "1.pt", tmp_path / "0.pt")  # the content counts, not the name
    again = prepare_store(base.model_copy(update={"weights": tmp_path / "0.pt"}), tmp_path / "cache")
    assert again.folder == stores[3].folder


def test_changed_weights_are_read_again(tmp_path: Path) -> None:
    import torch

    weights = tmp_path / "weights.pt"
    settings = make_model_features("Frames", bands=5, weights=weights)
    stores = []
    for value in (0.1, 0.2):
        torch.save({"layer.weight": torch.full((5, 80), value), "layer.bias": torch.zeros(5)}, weights)
        stores.append(prepare_store(settings, tmp_path / "cache"))
    np.testing.assert_allclose(stores[1].frames, 2 * stores[0].frames, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("list", r"it returns list instead of a tensor or array \[frames, bands\]"),
        ("vector", r"returns the shape \[5\] instead of \[frames, bands\] with at least one frame"),
        ("empty", r"returns the shape \[0, 5\]"),
        ("wide", r"returns frames of 7 features, but data.features.bands is 5"),
        ("whole", r"returns torch.int64 instead of a floating type"),
        ("nan", r"returns values that are NaN or infinite"),
        ("nothing", r"KeyError: 'nothing'"),
    ],
)
def test_wrong_return_values_of_a_model_are_rejected(tmp_path: Path, kind: str, message: str) -> None:
    place = r"^data\.features: own_features\.py:Returns: "
    with pytest.raises(DataError, match=f"{place}.*{message}.* 24 of 24 clips fail for this reason"):
        prepare_store(make_model_features("Returns", bands=5, options={"kind": kind}), tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nowhere.py:Model"}, r"data.features.model: 'nowhere.py:Model': there is no file"),
        ({"model": f"{OWN}:Logmel"}, r"has no 'Logmel'. Did you mean 'LogMel'\?"),
        ({"model": f"{OWN}:function"}, "function' is not a class"),
        ({"model": "builtins:list"}, "'builtins:list' has no file, so changes cannot be detected"),
        ({"model": f"{OWN}:NoCall"}, "cannot be called. Add a method forward"),
        ({"model": f"{OWN}:Fails"}, "cannot be built: OSError: no such checkpoint"),
        (
            {"model": f"{OWN}:Frames", "options": {"size": 3}},
            r"does not accept the arguments from options and weights \(size\): got an unexpected keyword",
        ),
        (
            {"model": f"{OWN}:Frames", "weights": "nowhere.pt"},
            "data.features.weights: nowhere.pt cannot be read: No such file",
        ),
    ],
)
def test_unusable_models_are_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    settings = ModelFeatures.model_validate({"kind": "model", "bands": 5, "sample_rate": 8000, **options})
    with pytest.raises(ConfigError, match=message):
        prepare_store(settings, tmp_path / "cache")


def test_changed_code_in_the_same_process_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    shutil.copy(OWN, file)
    settings = make_model_features("Frames", bands=5, model=f"{file}:Frames")
    prepare_store(settings, tmp_path / "cache")
    file.write_text(OWN.read_text() + "\n")
    with pytest.raises(ConfigError, match="mine.py has changed since this process loaded it. Start a new process"):
        prepare_store(settings, tmp_path / "cache")


# -- descriptions of features ------------------------------------------------------------------------------------------


def test_a_run_on_a_file_cannot_predict_but_describes_its_front_end(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "apc", compute_log_mels())
    config = configure(tmp_path, {"kind": "file", "path": str(path), "frames": 20, "normalise": "group"})
    train_federation(config)
    run = tmp_path / "runs" / "run"
    with pytest.raises(
        InputError, match=r"run was trained on features from a file \(apc.npz\), so .* Use raydfl export"
    ):
        classify(run, [tmp_path / "some.wav"])
    description = describe_front_end(load_model(run).view)
    assert list(description) == ["kind", "file", "normalise", "pad", "dtype", "crop", "segments"]
    assert {key: description["file"][key] for key in ("name", "bands", "frames")} == {
        "name": "apc.npz",
        "bands": 16,
        "frames": 20,
    }
    assert (description["kind"], description["normalise"]["over"], description["pad"]["frames"]) == (
        "file",
        "group",
        20,
    )
    assert describe_features(config) == "apc.npz, 16 bands, z-score by speaker"


def test_the_front_end_and_tables_name_the_model(tmp_path: Path) -> None:
    options = {"weights": str(tmp_path / "apc.pt"), "options": {"scale": 2.0}, "bands": 5, "frames": 7}
    config = configure(tmp_path, {"kind": "model", "model": f"{OWN}:Frames", "sample_rate": 8000, **options})
    description = describe_front_end(config.data.first_view)
    assert list(description) == [
        "kind",
        "samples",
        "resample",
        "cut",
        "model",
        "normalise",
        "pad",
        "dtype",
        "crop",
        "segments",
    ]
    assert {key: description["model"][key] for key in ("class", "weights", "options", "bands", "frames")} == {
        "class": "own_features.py:Frames",
        "weights": "apc.pt",
        "options": {"scale": 2.0},
        "bands": 5,
        "frames": 7,
    }
    json.dumps(description)
    assert describe_features(config) == "own_features.py:Frames (apc.pt), 5 bands at 8 kHz, not normalised"
