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
from raydfl.data.features.extraction import Chunk, ChunkReport, Source, chunk_bounds
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.file import FileFeatures
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.wave import EPSILON
from raydfl.data.noise import ClipNoise, seed_noise
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
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


def write_folder_of_npy(place: Path, matrices: Mapping[str, np.ndarray]) -> Path:
    for clip, matrix in matrices.items():
        file = place / f"{clip}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, matrix)
    return place


WRITERS = pytest.mark.parametrize("write", [write_safetensors, write_npz, write_folder_of_npy])


def log_mels(noise: ClipNoise | None = None, **options: Any) -> dict[str, np.ndarray]:
    """The features of all clips, as someone would make them who writes a file."""
    extractor = FeatureExtractor(FeatureSettings(**LOG_MEL, **options))
    found = {}
    for index, row in enumerate(MADE.manifest().to_pylist()):
        wave = extractor.wave(*MADE.read(row))
        if noise is not None:
            power = float(np.mean(np.square(wave, dtype=np.float64)))
            drawn = np.random.default_rng(noise.seeds[index]).standard_normal(wave.size)
            wave = (wave + drawn * np.sqrt(power / 10 ** (noise.snr_db / 10))).astype(np.float32)
        found[row["clip"]] = extractor.features(wave)
    return found


def store_of(features: AnyFeatures, cache: Path, **options: Any) -> FeatureStore:
    return prepare(SOURCE, MADE.manifest(), features, cache=cache, **options)


def equal(a: FeatureStore, b: FeatureStore) -> None:
    """The same bits."""
    assert (a.frames.dtype, a.length) == (b.frames.dtype, b.length)
    for name in ("frames", "offsets", "lengths"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def from_file(path: Path, **options: Any) -> FileFeatures:
    return FileFeatures.model_validate({"kind": "file", "path": path, **options})


def configure(folder: Path, features: Any, **data: Any) -> Config:
    """A federation of two rounds."""
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


# -- from a file -------------------------------------------------------------------------------------------------------


@WRITERS
@pytest.mark.parametrize("seconds", [None, 0.3])
def test_log_mel_from_a_file_is_log_mel_to_the_bit(tmp_path: Path, write: Write, seconds: float | None) -> None:
    settings = FeatureSettings(**LOG_MEL, seconds=seconds)
    path = write(tmp_path / "features", log_mels(seconds=seconds))
    given = from_file(path, frames=settings.frames)
    assert given.bands == 16
    equal(store_of(given, tmp_path / "cache"), store_of(settings, tmp_path / "cache"))


def test_a_run_on_a_file_is_the_run_on_its_recordings(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "features", log_mels(seconds=0.3))
    noisy = seed_noise(MADE.manifest().column("clip").to_pylist(), 10.0, 1)
    noisy_path = write_npz(tmp_path / "noisy", log_mels(noisy, seconds=0.3))
    corrupt = {"noise": {"snr_db": 10.0, "clients": 2}, "labels": {"rate": 0.5, "clients": 1}}
    named = {"kind": "file", "path": str(path), "noisy_path": str(noisy_path), "frames": 16}
    read = configure(tmp_path / "file", named, corrupt=corrupt)
    heard = configure(tmp_path / "waves", {**LOG_MEL, "seconds": 0.3}, corrupt=corrupt)
    populations = [build_population(config.data, 1) for config in (read, heard)]
    clean, noisy_store = populations[0].stores
    assert 0 < len(noisy_store) < len(clean)
    for a, b in zip(populations[0].stores, populations[1].stores, strict=True):
        equal(a, b)
    assert describe_population(populations[0], False) == describe_population(populations[1], False)
    assert_same_bits(train_federation(read), train_federation(heard))


@pytest.mark.parametrize("normalise", ["none", "group"])
def test_a_clip_without_noisy_features_is_left_out_if_it_may_be(tmp_path: Path, normalise: str) -> None:
    """Oracle: features without the clip."""
    noisy, clean = log_mels(), log_mels()
    noise = {"noise": {"snr_db": 10.0, "clients": 3}}

    def build(name: str) -> Population:
        paths = {
            key: str(write_npz(tmp_path / f"{name}-{key}", matrices))
            for key, matrices in {"path": clean, "noisy_path": noisy}.items()
        }
        features = {"kind": "file", **paths, "normalise": normalise}
        return build_population(configure(tmp_path, features, corrupt=noise, unreadable="skip").data, 1)

    lost = int(build("whole").data(0).train.clips[0])
    clip = MADE.manifest().column("clip")[lost].as_py()
    del noisy[clip]
    partial = build("partial")
    del clean[clip]
    assert [name for name, _ in partial.skipped] == [clip]
    without = build("without")
    assert len(partial) == len(without) == 3
    for index in range(3):
        own, same = (each.data(index).train for each in (partial, without))
        np.testing.assert_array_equal(own.clips, same.clips)
        np.testing.assert_array_equal(*(each.batch(np.arange(len(each))).x.numpy() for each in (own, same)))


def by_group(folder: Path, features: dict[str, Any]) -> FeatureStore:
    data = configure(folder, {**features, "normalise": "group"}).data
    return build_population(data, 1).stores[0]


def test_normalise_group_is_that_of_log_mel_and_clip_is_a_z_score(tmp_path: Path) -> None:
    decibels = log_mels(normalise="none")
    path = write_npz(tmp_path / "features", decibels)
    equal(by_group(tmp_path, {"kind": "file", "path": str(path)}), by_group(tmp_path, LOG_MEL))
    by_clip = store_of(from_file(path, normalise="clip"), tmp_path / "cache")
    for index, matrix in enumerate(decibels.values()):
        expected = (matrix - matrix.mean(axis=0)) / (matrix.std(axis=0) + EPSILON)
        np.testing.assert_allclose(by_clip.clip(index), expected, atol=1e-4)
    as_they_are = store_of(from_file(path), tmp_path / "cache")
    for index, matrix in enumerate(decibels.values()):
        np.testing.assert_array_equal(as_they_are.clip(index), matrix)


@WRITERS
def test_frames_cut_and_pad_and_dtypes_are_converted(tmp_path: Path, write: Write) -> None:
    lengths = (2, 5, 9)
    rng = np.random.default_rng(0)
    clips = MADE.manifest().column("clip").to_pylist()
    given = {
        clip: rng.standard_normal((lengths[index % 3], 4)).astype(("float16", "float32", "float64")[index % 3])
        for index, clip in enumerate(clips)
    }
    store = store_of(from_file(write(tmp_path / "given", given), frames=5, dtype="float16"), tmp_path / "cache")
    assert (store.length, store.frames.dtype, store.lengths[:3].tolist()) == (5, np.float16, [2, 5, 5])
    for index, matrix in enumerate(given.values()):
        clip = store.clip(index)
        np.testing.assert_array_equal(clip[: len(matrix)], matrix[:5].astype(np.float32).astype(np.float16))
        assert not clip[len(matrix) :].any()


def test_recordings_are_not_opened(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    manifest = Folder(root=root).manifest()
    for file in root.iterdir():
        file.write_bytes(b"")
    matrices = {clip: np.full((3, 2), index, np.float32) for index, clip in enumerate(manifest["clip"].to_pylist())}
    features = from_file(write_folder_of_npy(tmp_path / "given", matrices))
    store = prepare(Source(f"{SETS}:Folder", {"root": str(root)}), manifest, features, cache=tmp_path / "cache")
    assert store.frames[::3, 0].tolist() == list(range(len(matrices)))


def test_chunks_of_many_bands_are_smaller(tmp_path: Path) -> None:
    assert chunk_bounds([None] * 40, 4) == [(0, 32), (32, 40)]
    assert chunk_bounds([100.0] * 4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    matrices = {clip: np.full((1, 128 * 8), number, np.float32) for number, clip in enumerate(log_mels())}
    sizes = []

    def run(function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
        sizes.extend(len(chunk.rows) for chunk in chunks)
        return map(function, chunks)

    given = from_file(write_npz(tmp_path / "features", matrices))
    store = store_of(given, tmp_path / "cache", run_chunks=run)
    assert sizes == [16, 8]
    assert store.frames[:, 0].tolist() == list(range(24))


@WRITERS
def test_the_content_decides_what_is_found_in_the_cache(tmp_path: Path, write: Write) -> None:
    matrices = log_mels()
    (tmp_path / "elsewhere").mkdir()
    first = store_of(from_file(write(tmp_path / "features", matrices)), tmp_path / "cache")
    moved = write(tmp_path / "elsewhere" / "moved", matrices)
    assert store_of(from_file(moved), tmp_path / "cache").folder == first.folder
    assert store_of(from_file(moved, frames=4), tmp_path / "cache").folder != first.folder
    changed = {clip: matrix + 1 for clip, matrix in matrices.items()}
    shutil.rmtree(moved) if moved.is_dir() else moved.unlink()
    assert write(tmp_path / "elsewhere" / "moved", changed) == moved
    other = store_of(from_file(moved), tmp_path / "cache")
    assert other.folder != first.folder
    np.testing.assert_array_equal(other.frames, np.concatenate(list(changed.values())))


@WRITERS
def test_clips_without_features_stop_or_are_left_out(tmp_path: Path, write: Write) -> None:
    matrices = log_mels()
    for clip in ("w1/g0/3", "w0/g1/2"):
        del matrices[clip]
    given = from_file(write(tmp_path / "features", matrices))
    with pytest.raises(
        DataError, match=r"2 of 24 clips have no features, the first 'w1/g0/3': .*data\.unreadable=skip"
    ):
        store_of(given, tmp_path / "cache")
    store = store_of(given, tmp_path / "cache", unreadable="skip")
    clips = MADE.manifest().column("clip").to_pylist()
    assert [clips[index] for index in store.failures] == ["w1/g0/3", "w0/g1/2"]
    assert np.flatnonzero(store.lengths == 0).tolist() == list(store.failures)
    skipped = build_population(configure(tmp_path, given.model_dump(mode="json"), unreadable="skip").data, 1).skipped
    assert [clip for clip, _ in skipped] == ["w1/g0/3", "w0/g1/2"]


def test_names_that_the_file_has_are_shown(tmp_path: Path) -> None:
    given = from_file(write_npz(tmp_path / "features", {f"{clip}.wav": matrix for clip, matrix in log_mels().items()}))
    with pytest.raises(DataError, match=r"has no array 'w0/g0/0', but 24 others \('w0/g0/0.wav', 'w0/g0/1.wav', 'w0"):
        store_of(given, tmp_path / "cache")


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
def test_matrices_that_cannot_be_used(tmp_path: Path, write: Write, matrix: np.ndarray, message: str) -> None:
    given = from_file(write(tmp_path / "features", log_mels() | {"w1/g2/1": matrix}))
    with pytest.raises(DataError, match=f"(?s)1 of 24 clips cannot be read:.*w1/g2/1: {message}"):
        store_of(given, tmp_path / "cache")
    store = store_of(given, tmp_path / "cache", unreadable="skip")
    assert [MADE.manifest()["clip"][index].as_py() for index in store.failures] == ["w1/g2/1"]


def test_pickled_objects_are_not_opened(tmp_path: Path) -> None:
    path = write_folder_of_npy(tmp_path / "features", log_mels())
    np.save(path / "w0" / "g0" / "1.npy", np.array([{}], object))
    with pytest.raises(DataError, match=r"1\.npy cannot be read: .*Python objects in dtype"):
        store_of(from_file(path), tmp_path / "cache")


def header_only(header: str) -> bytes:
    """An .npy file with any text as its header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def test_a_header_that_python_cannot_parse_is_damage(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "deep.npz", "w") as archive:
        archive.writestr("w0.npy", header_only("[" * 5000))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "w0.npy").write_bytes(header_only("[" * 5000))
    for name in ("deep.npz", "deep"):
        with pytest.raises(DataError, match=f"data.features: .*{name}.*cannot be read"):
            from_file(tmp_path / name)


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
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"data.features: .*{name}.*{message}"):
        from_file(path)
    given = from_file(path, bands=16)  # as a run keeps it: the file is asked for when it is needed
    with pytest.raises(DataError, match=f"data.features: .*{name}.*"):
        store_of(given, tmp_path / "cache")


def test_bands_come_from_a_file_with_matrices(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no features in"):
        from_file(write_npz(tmp_path / "empty", {}))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="there are no features in"):
        from_file(tmp_path / "folder")
    for write in (write_safetensors, write_npz, write_folder_of_npy):
        with pytest.raises(DataError, match=r"the features of 'a' in .* have the shape \[3\]. It must be"):
            from_file(write(tmp_path / "vector", {"a": np.zeros(3, np.float32)}))


def test_a_run_keeps_the_number_of_bands_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz(tmp_path / "features", log_mels())
    monkeypatch.chdir(tmp_path)
    config = configure(tmp_path, {"kind": "file", "path": "features.npz"})
    kept = config.model_dump(mode="json")["data"]["features"]
    assert (kept["bands"], kept["path"]) == (16, str(tmp_path / "features.npz"))
    (tmp_path / "features.npz").unlink()
    assert configure(tmp_path, kept).digest() == config.digest()


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
def test_settings_that_cannot_be(features: Any, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSettings(name=f"{SETS}:Made", features=features, **data)


@pytest.mark.parametrize("attack", [{"name": "backdoor", "target": "w0"}, {"name": "corrupt_recordings"}])
def test_attacks_that_alter_recordings_need_recordings(tmp_path: Path, attack: dict[str, Any]) -> None:
    values = configure(tmp_path, LOG_MEL).model_dump(mode="json")
    made = make_config({**values, "attack": attack})
    features = {"kind": "file", "path": "x.npz", "bands": 16}
    with pytest.raises(ConfigError, match=f"attack '{attack['name']}' needs recordings, but features of the kind"):
        make_config({**values, "attack": attack, "data": {**values["data"], "features": features}})
    path = write_npz(tmp_path / "features", log_mels())
    data = made.data.model_copy(update={"features": from_file(path)})
    with pytest.raises(ConfigError, match="alters recordings"):
        build_population(data, 1, attack=made.components.attack)
    flipped = {**values, "attack": "label_flip", "data": {**values["data"], "features": from_file(path).model_dump()}}
    assert make_config(flipped).components.attack is not None


# -- by a model --------------------------------------------------------------------------------------------------------


def by_model(name: str, **options: Any) -> ModelFeatures:
    return ModelFeatures.model_validate({"kind": "model", "model": f"{OWN}:{name}", "sample_rate": 8000, **options})


@pytest.mark.parametrize("seconds", [None, 0.3])
def test_log_mel_as_a_model_is_log_mel_to_the_bit(tmp_path: Path, seconds: float | None) -> None:
    settings = FeatureSettings(**LOG_MEL, seconds=seconds)
    wrapped = by_model("LogMel", bands=16, options=LOG_MEL, seconds=seconds, frames=settings.frames)
    noise = seed_noise(MADE.manifest().column("clip").to_pylist(), 10.0, 1)
    for of in ({}, {"noise": noise}):
        equal(store_of(wrapped, tmp_path / "cache", **of), store_of(settings, tmp_path / "cache", **of))
    decibels = wrapped.model_copy(update={"options": {**LOG_MEL, "normalise": "none"}})
    equal(by_group(tmp_path, decibels.model_dump(mode="json")), by_group(tmp_path, {**LOG_MEL, "seconds": seconds}))


def test_a_run_with_a_model_is_the_run_with_log_mel_and_predicts_the_same(tmp_path: Path) -> None:
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
    found = {name: classify(Path(config.run.dir) / "run", files) for name, (config, _) in runs.items()}
    assert not any(prediction.error for prediction in found["model"])
    for a, b in zip(found["waves"], found["model"], strict=True):
        np.testing.assert_array_equal(a.probabilities, b.probabilities)


def test_what_a_model_draws_is_the_same_everywhere(tmp_path: Path) -> None:
    first = store_of(by_model("Dithered", bands=5), tmp_path / "a")
    assert first.frames.any()
    equal(store_of(by_model("Dithered", bands=5), tmp_path / "b"), first)
    few = MADE.manifest().slice(7, 3)  # other clips before it, other chunks, and still the same numbers
    alone = prepare(SOURCE, few, by_model("Dithered", bands=5), cache=tmp_path / "c")
    for index in range(3):
        np.testing.assert_array_equal(alone.clip(index), first.clip(7 + index))
    plain = store_of(by_model("Frames", bands=5), tmp_path / "a")
    assert (plain.frames != 0).all()  # half of them would be 0 if dropout were on
    assert not np.array_equal(plain.frames, first.frames)


def test_every_setting_of_a_model_decides_numbers(tmp_path: Path) -> None:
    import torch

    base = by_model("Frames", bands=5)
    first = store_of(base, tmp_path / "cache")
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
    stores = [first, *(store_of(base.model_copy(update=change), tmp_path / "cache") for change in changes)]
    contents = {(store.frames.dtype, store.frames.shape, store.frames.tobytes()) for store in stores}
    assert len(contents) == len({store.folder for store in stores}) == 10
    doubled = stores[1].frames
    np.testing.assert_array_equal(doubled, 2 * first.frames)
    shutil.copy(tmp_path / "1.pt", tmp_path / "0.pt")  # the content counts, not the name
    again = store_of(base.model_copy(update={"weights": tmp_path / "0.pt"}), tmp_path / "cache")
    assert again.folder == stores[3].folder


def test_weights_that_change_within_a_process_are_read_again(tmp_path: Path) -> None:
    import torch

    weights = tmp_path / "weights.pt"
    settings = by_model("Frames", bands=5, weights=weights)
    stores = []
    for value in (0.1, 0.2):
        torch.save({"layer.weight": torch.full((5, 80), value), "layer.bias": torch.zeros(5)}, weights)
        stores.append(store_of(settings, tmp_path / "cache"))
    np.testing.assert_allclose(stores[1].frames, 2 * stores[0].frames, rtol=1e-6)


@pytest.mark.parametrize(
    ("what", "message"),
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
def test_what_a_model_may_not_return(tmp_path: Path, what: str, message: str) -> None:
    where = r"^data\.features: own_features\.py:Returns: "
    with pytest.raises(DataError, match=f"{where}.*{message}.* 24 of 24 clips fail for this reason"):
        store_of(by_model("Returns", bands=5, options={"what": what}), tmp_path / "cache")


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
def test_models_that_cannot_be_used(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    settings = ModelFeatures.model_validate({"kind": "model", "bands": 5, "sample_rate": 8000, **options})
    with pytest.raises(ConfigError, match=message):
        store_of(settings, tmp_path / "cache")


def test_code_that_changes_within_a_process_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    shutil.copy(OWN, file)
    settings = by_model("Frames", bands=5, model=f"{file}:Frames")
    store_of(settings, tmp_path / "cache")
    file.write_text(OWN.read_text() + "\n")
    with pytest.raises(ConfigError, match="mine.py has changed since this process loaded it. Start a new process"):
        store_of(settings, tmp_path / "cache")


# -- what is said of them ----------------------------------------------------------------------------------------------


def test_a_run_on_a_file_cannot_predict_and_says_what_it_takes(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "apc", log_mels())
    config = configure(tmp_path, {"kind": "file", "path": str(path), "frames": 20, "normalise": "group"})
    train_federation(config)
    run = tmp_path / "runs" / "run"
    with pytest.raises(
        InputError, match=r"run was trained on features from a file \(apc.npz\), so .* Use raydfl export"
    ):
        classify(run, [tmp_path / "some.wav"])
    said = describe_front_end(load_model(run).view)
    assert list(said) == ["kind", "file", "normalise", "pad", "dtype", "crop", "segments"]
    assert {key: said["file"][key] for key in ("name", "bands", "frames")} == {
        "name": "apc.npz",
        "bands": 16,
        "frames": 20,
    }
    assert (said["kind"], said["normalise"]["over"], said["pad"]["frames"]) == ("file", "group", 20)
    assert describe_features(config) == "apc.npz, 16 bands, z-score by speaker"


def test_a_model_is_named_in_the_front_end_and_in_tables(tmp_path: Path) -> None:
    options = {"weights": str(tmp_path / "apc.pt"), "options": {"scale": 2.0}, "bands": 5, "frames": 7}
    config = configure(tmp_path, {"kind": "model", "model": f"{OWN}:Frames", "sample_rate": 8000, **options})
    said = describe_front_end(config.data.first_view)
    assert list(said) == [
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
    assert {key: said["model"][key] for key in ("class", "weights", "options", "bands", "frames")} == {
        "class": "own_features.py:Frames",
        "weights": "apc.pt",
        "options": {"scale": 2.0},
        "bands": 5,
        "frames": 7,
    }
    json.dumps(said)
    assert describe_features(config) == "own_features.py:Frames (apc.pt), 5 bands at 8 kHz, not normalised"
