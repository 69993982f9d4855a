from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tiny_sets import Folder, Made, write_folder

from raydfl.core.errors import DataError, RaydflError, ResourcesError
from raydfl.core.files import default_cache
from raydfl.core.progress import Silent
from raydfl.core.registry import load_object
from raydfl.data.features import cache as cache_module
from raydfl.data.features import extraction as chunks_module
from raydfl.data.features.alteration import Alterations
from raydfl.data.features.cache import FeatureStore, open_store, prepare
from raydfl.data.features.digests import digest_clips
from raydfl.data.features.extraction import Chunk, ChunkReport, chunk_bounds, run_locally
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.noise import ClipNoise, add_noise
from raydfl.data.sets.manifest import Manifest
from raydfl.data.source import Source

SETS = Path(__file__).parent / "tiny_sets.py"
SETTINGS = FeatureSettings(sample_rate=8000, bands=16)
Run = Callable[[Callable[[Chunk], ChunkReport], Sequence[Chunk]], Iterator[ChunkReport]]


class CountingExecutor:
    """An in-process executor that counts its chunks and can raise KeyboardInterrupt after some."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.chunks = 0
        self.stop_after = stop_after

    def __call__(self, function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
        for chunk in chunks:
            if self.chunks == self.stop_after:
                raise KeyboardInterrupt
            self.chunks += 1
            yield function(chunk)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "_CLIPS", 5)


def prepare_folder(
    root: Path, cache: Path, settings: FeatureSettings = SETTINGS, **options: Any
) -> tuple[FeatureStore, int]:
    """Prepare the feature store of a folder. Also return the number of chunks computed for it."""
    run = options.pop("run_chunks", None) or CountingExecutor()
    source = Source(f"{SETS}:Folder", {"root": str(root)})
    store = prepare(source, Folder(root=root).manifest(), settings, cache=cache, run_chunks=run, **options)
    return store, getattr(run, "chunks", -1)


def extract_features(root: Path, settings: FeatureSettings = SETTINGS) -> list[np.ndarray]:
    """Extract the features of each clip without a cache."""
    dataset, extractor = Folder(root=root), FeatureExtractor(settings)
    return [extractor(*dataset.read(row)) for row in dataset.manifest().to_pylist()]


def test_clips_of_unequal_length_are_concatenated(tmp_path: Path, small_chunks: None) -> None:
    root = write_folder(tmp_path / "data")
    store, _ = prepare_folder(root, tmp_path / "cache")
    clips = extract_features(root)
    assert len(store) == len(clips) == 18
    assert store.length is None
    assert store.frames.dtype == np.float32
    assert len({len(clip) for clip in clips}) > 1
    for index, clip in enumerate(clips):
        np.testing.assert_array_equal(store.clip(index), clip)
        assert store.lengths[index] == len(clip)
    assert not store.frames.flags.writeable


def test_fixed_length_clips_are_a_zero_padded_matrix(tmp_path: Path, small_chunks: None) -> None:
    root = write_folder(tmp_path / "data")
    settings = SETTINGS.model_copy(update={"seconds": 0.25})
    store, _ = prepare_folder(root, tmp_path / "cache", settings)
    assert store.length == 26
    matrix = store.frames.reshape(18, 26, 16)
    lengths = set()
    for index, clip in enumerate(extract_features(root, settings)):
        np.testing.assert_array_equal(matrix[index, : len(clip)], clip)
        assert not matrix[index, len(clip) :].any()
        assert store.lengths[index] == len(clip)
        lengths.add(len(clip))
    assert max(lengths) == 26 > min(lengths)  # some were cut, some padded


def test_float16_features_are_rounded_float32_features(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data", labels=1)
    full, _ = prepare_folder(root, tmp_path / "cache")
    half, computed = prepare_folder(root, tmp_path / "cache", SETTINGS.model_copy(update={"dtype": "float16"}))
    assert half.frames.dtype == np.float16
    assert computed
    np.testing.assert_array_equal(half.frames, full.frames.astype(np.float16))


def test_features_are_found_again_after_moving_or_copying_the_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    store, computed = prepare_folder(root, tmp_path / "cache")
    assert computed == 1
    again, computed = prepare_folder(root, tmp_path / "cache")
    assert (again.folder, computed) == (store.folder, 0)
    shutil.copytree(root, tmp_path / "copy")
    root.rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        other, computed = prepare_folder(tmp_path / name, tmp_path / "cache")
        assert (other.folder, computed) == (store.folder, 0)


def test_only_settings_that_change_the_features_change_the_key(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    store, _ = prepare_folder(root, tmp_path / "cache")
    same, computed = prepare_folder(
        root, tmp_path / "cache", SETTINGS.model_copy(update={"fft": SETTINGS.points, "high_hz": 4000.0})
    )
    assert (same.folder, computed) == (store.folder, 0)
    for change in ({"bands": 17}, {"hop_ms": 8.0}, {"normalise": "none"}, {"channel": "mean"}, {"seconds": 9.0}):
        other, computed = prepare_folder(root, tmp_path / "cache", SETTINGS.model_copy(update=change))
        assert other.folder != store.folder
        assert computed
    soundfile.write(root / "w0_g0_0.wav", np.full(2000, 0.1), 8000)
    other, computed = prepare_folder(root, tmp_path / "cache")
    assert other.folder != store.folder
    assert computed


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path / "data")
    long_ago = time.time() - 100
    for path in root.iterdir():
        os.utime(path, (long_ago, long_ago))
    read: list[Path] = []
    original = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, kind: (read.append(Path(file.name)), original(file, kind))[1]
    )

    def count_wavs_read() -> int:
        count = sum(path.suffix == ".wav" for path in read)
        read.clear()
        return count

    store, _ = prepare_folder(root, tmp_path / "cache")
    assert count_wavs_read() == 18
    prepare_folder(root, tmp_path / "cache")
    assert count_wavs_read() == 0
    os.utime(root / "w0_g0_0.wav", (long_ago + 1, long_ago + 1))
    again, computed = prepare_folder(root, tmp_path / "cache")
    assert count_wavs_read() == 1
    assert (again.folder, computed) == (store.folder, 0)
    (memory,) = (tmp_path / "cache" / "digests").iterdir()
    memory.write_bytes(b"damaged")
    prepare_folder(root, tmp_path / "cache")
    assert count_wavs_read() == 18


def test_recent_modification_times_are_not_trusted(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    store, _ = prepare_folder(root, tmp_path / "cache")
    path = root / "w0_g0_0.wav"
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as within one tick of a coarse clock
    changed, computed = prepare_folder(root, tmp_path / "cache")
    assert changed.folder != store.folder
    assert computed


def test_parts_of_a_file_are_identified_by_its_content_and_their_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).normal(0, 0.1, 8000), 8000)
    reads: list[int] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: (reads.append(1), digest(file, kind))[1])

    def digest_parts(*parts: str) -> list[bytes]:
        reads.clear()
        (tmp_path / "list.csv").write_text("\n".join(["path,label,start,stop", *(f"a.wav,x,{part}" for part in parts)]))
        dataset = Manifest(file=tmp_path / "list.csv")
        result, unreadable = digest_clips(dataset, dataset.manifest(), tmp_path / "cache", Silent())
        assert not unreadable
        return result

    first = digest_parts("0,0.5", "0.5,", ",", "0.5,1")
    assert len(reads) == 1, "the file is read once for all its parts"
    assert len(set(first)) == 4
    assert digest_parts("0.5,1.0", "0.0,0.5", ",") == [first[3], first[0], first[2]]
    whole = hashlib.blake2b((tmp_path / "a.wav").read_bytes(), digest_size=16).digest()
    assert first[2] == whole, "whole files keep the digest of earlier versions"
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(1).normal(0, 0.1, 8000), 8000)
    assert not set(first) & set(digest_parts("0,0.5", "0.5,", ",", "0.5,1"))


def test_an_interrupted_preparation_resumes(tmp_path: Path, small_chunks: None) -> None:
    root = write_folder(tmp_path / "data")
    executor = CountingExecutor(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        prepare_folder(root, tmp_path / "cache", run_chunks=executor)
    assert not list((tmp_path / "cache").glob("*/store.json"))
    (parts,) = (tmp_path / "cache").glob("*.parts")
    parts.with_suffix(".new").mkdir()  # left by a process killed while joining the chunks
    (parts.with_suffix(".new") / "frames.npy").write_bytes(b"half")
    store, computed = prepare_folder(root, tmp_path / "cache")
    assert computed == 1  # of 4
    whole, _ = prepare_folder(root, tmp_path / "elsewhere")
    np.testing.assert_array_equal(store.frames, whole.frames)
    assert not list((tmp_path / "cache").glob("*.parts"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "fewer clips"])
def test_damaged_chunks_are_recomputed(tmp_path: Path, small_chunks: None, damage: str) -> None:
    root = write_folder(tmp_path / "data")
    with pytest.raises(KeyboardInterrupt):
        prepare_folder(root, tmp_path / "cache", run_chunks=CountingExecutor(stop_after=3))
    part = sorted((tmp_path / "cache").glob("*.parts/*.npz"))[1]
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "fewer clips":
        with np.load(part) as arrays:
            np.savez(part, frames=arrays["frames"], counts=arrays["counts"][:-1], failures=arrays["failures"])
    else:
        part.write_bytes({"flipped": content, "truncated": content[: len(content) // 2], "empty": b""}[damage])
    store, computed = prepare_folder(root, tmp_path / "cache")
    assert computed == 2
    for index, clip in enumerate(extract_features(root)):
        np.testing.assert_array_equal(store.clip(index), clip)


@pytest.mark.parametrize(
    "damage",
    ["frames cut", "frames flipped", "offsets gone", "json gone", "json cut", "json of another", "folder empty"],
)
def test_damaged_stores_are_recomputed(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    root = write_folder(tmp_path / "data")
    store, _ = prepare_folder(root, tmp_path / "cache")
    good = np.array(store.frames)
    frames, facts = store.folder / "frames.npy", store.folder / "store.json"
    if damage == "frames cut":
        os.truncate(frames, frames.stat().st_size - 1)
    elif damage == "frames flipped":
        content = bytearray(frames.read_bytes())
        content[-9] ^= 1
        before = frames.stat()
        frames.write_bytes(content)
        os.utime(frames, ns=(before.st_atime_ns, before.st_mtime_ns))  # silent corruption: size and time are unchanged
    elif damage == "offsets gone":
        (store.folder / "offsets.npy").unlink()
    elif damage == "json gone":
        facts.unlink()
    elif damage == "json cut":
        facts.write_text(facts.read_text()[:50])
    elif damage == "json of another":
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "key": "other"}))
    else:
        shutil.rmtree(store.folder)
        store.folder.mkdir()
    # Opening compares only sizes, unless verify=True reads the content.
    with pytest.raises(DataError, match=r"(?s)cached features in .* cannot be used .*raydfl data prepare"):
        open_store(store.folder, verify=damage == "frames flipped")
    again, computed = prepare_folder(root, tmp_path / "cache")
    assert computed == 1
    np.testing.assert_array_equal(again.frames, good)
    assert "They are made again now." in caplog.text


def test_a_copied_cache_is_verified_and_used(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    prepare_folder(root, tmp_path / "cache")
    shutil.copytree(
        tmp_path / "cache", tmp_path / "other", copy_function=shutil.copyfile
    )  # changes the modification times
    _, computed = prepare_folder(root, tmp_path / "other")
    assert computed == 0


def test_concurrent_builders_compute_the_features_once(tmp_path: Path, small_chunks: None) -> None:
    root = write_folder(tmp_path / "data")
    executor, stores = CountingExecutor(), []

    def build() -> None:
        stores.append(prepare_folder(root, tmp_path / "cache", run_chunks=executor)[0])

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({store.folder for store in stores}) == 1
    assert len(stores) == 3
    assert executor.chunks == 4


def test_noise_is_added_to_the_wave_before_the_features(tmp_path: Path, small_chunks: None) -> None:
    root = write_folder(tmp_path / "data")
    clean, _ = prepare_folder(root, tmp_path / "cache")
    seeds = tuple(range(100, 118))
    noisy, _ = prepare_folder(root, tmp_path / "cache", noise=ClipNoise(10.0, seeds))
    assert noisy.folder != clean.folder
    dataset, extractor = Folder(root=root), FeatureExtractor(SETTINGS)
    for index, row in enumerate(dataset.manifest().to_pylist()):
        wave = extractor.wave(*dataset.read(row))
        np.testing.assert_array_equal(noisy.clip(index), extractor.features(add_noise(wave, 10.0, seeds[index])))
    for other in (ClipNoise(11.0, seeds), ClipNoise(10.0, seeds[::-1])):
        assert prepare_folder(root, tmp_path / "cache", noise=other)[0].folder != noisy.folder


def damage_clips(root: Path) -> dict[str, str]:
    """Make four clips unreadable and return a part of the expected reason by file name."""
    (root / "w0_g0_0.wav").write_bytes(b"")
    content = (root / "w0_g0_1.wav").read_bytes()
    (root / "w0_g0_1.wav").write_bytes(content[: len(content) // 2])
    soundfile.write(root / "w0_g0_2.wav", np.zeros(0), 8000)
    samples = np.zeros(100, np.float32)
    samples[3] = np.nan
    soundfile.write(root / "w0_g1_0.wav", samples, 8000, subtype="FLOAT")
    return {"w0_g0_0.wav": "empty", "w0_g0_1.wav": "truncated", "w0_g0_2.wav": "no samples", "w0_g1_0.wav": "NaN"}


def test_unreadable_clips_raise_or_are_skipped(tmp_path: Path, small_chunks: None) -> None:
    root = write_folder(tmp_path / "data")
    reasons = damage_clips(root)
    with pytest.raises(DataError, match=r"4 of 18 clips cannot be read") as caught:
        prepare_folder(root, tmp_path / "cache")
    for name, reason in reasons.items():
        assert name in str(caught.value)
        assert reason in str(caught.value)
    assert "data.unreadable=skip" in str(caught.value)

    store, _ = prepare_folder(root, tmp_path / "cache", unreadable="skip")
    names = Folder(root=root).manifest().column("clip").to_pylist()
    assert {names[index] for index in store.failures} == set(reasons)
    assert all(reasons[names[index]] in reason for index, reason in store.failures.items())
    good = np.flatnonzero(store.lengths)
    assert len(good) == 14
    np.testing.assert_array_equal(
        store.clip(int(good[0])), FeatureExtractor(SETTINGS)(*Folder(root=root).read({"path": root / names[good[0]]}))
    )
    with pytest.raises(DataError, match="Delete this folder to try again"):
        prepare_folder(root, tmp_path / "cache")
    fixed, _ = prepare_folder(root, tmp_path / "cache", SETTINGS.model_copy(update={"seconds": 0.3}), unreadable="skip")
    assert fixed.frames.shape == (18 * 31, 16)
    assert (fixed.lengths == 0).sum() == 4


@pytest.mark.slow
def test_missing_files_raise_or_are_skipped(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    manifest = Folder(root=root).manifest()
    (root / "w1_g1_1.wav").unlink()
    source = Source(f"{SETS}:Folder", {"root": str(root)})
    with pytest.raises(DataError, match=r"1 of 18 clips cannot be read:\n  .*w1_g1_1.wav: .*No such file"):
        prepare(source, manifest, SETTINGS, cache=tmp_path / "cache")
    store = prepare(
        source, manifest, SETTINGS, cache=tmp_path / "cache", unreadable="skip", run_chunks=CountingExecutor()
    )
    assert ["there is no such file" in reason for reason in store.failures.values()] == [True]


def test_long_lists_of_unreadable_clips_are_shortened(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    for path in root.iterdir():
        path.write_bytes(b"not a wav")
    with pytest.raises(DataError, match=r"18 of 18 clips[^z]*and 13 more"):
        prepare_folder(root, tmp_path / "cache")


@pytest.mark.parametrize("trim_db", [None, 40.0])
def test_too_little_disk_space_is_reported_before_the_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trim_db: float | None
) -> None:
    monkeypatch.setattr(cache_module, "free_bytes", lambda folder: 1000)
    source = Source(f"{SETS}:Made", {"seconds": 0.5})
    executor = CountingExecutor()
    settings = SETTINGS.model_copy(update={"trim_db": trim_db})
    with pytest.raises(ResourcesError, match=r"need about 783,360") as caught:
        prepare(source, Made(seconds=0.5).manifest(), settings, cache=tmp_path / "cache", run_chunks=executor)
    assert str(tmp_path / "cache") in str(caught.value)
    assert executor.chunks == 0
    assert 120 * 51 * 16 * (4 + 4) == 783_360  # clips x frames x bands x (chunks and store)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("place", ["chunk", "store"])
def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: int) -> None:
    root = write_folder(tmp_path / "data")

    def raise_disk_full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    if place == "chunk":
        monkeypatch.setattr(np, "savez", raise_disk_full)
    else:
        monkeypatch.setattr(np.lib.format, "write_array_header_1_0", raise_disk_full)
    with pytest.raises(
        ResourcesError, match=r"bytes free and the features need about [\d,]+; .*RAYDFL_CACHE"
    ) as caught:
        prepare_folder(root, tmp_path / "cache")
    assert str(tmp_path / "cache") in str(caught.value)
    monkeypatch.undo()
    store, _ = prepare_folder(root, tmp_path / "cache")
    assert len(store) == 18


def test_an_impossible_cache_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ResourcesError, match=r"the features cannot be written to .*file.*RAYDFL_CACHE"):
            prepare(Source(f"{SETS}:Made"), Made().manifest(), SETTINGS, cache=folder)


def test_a_missing_home_folder_requires_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYDFL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-that-name/cache")
    with pytest.raises(
        ResourcesError, match=r"~nobody-of-that-name/cache/raydfl: .*choose another folder with data.cache"
    ):
        default_cache()


def test_executors_must_share_the_cache_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")

    def run_elsewhere(function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
        for chunk in chunks:
            report = function(chunk)
            Path(chunk.path).unlink()
            yield report

    with pytest.raises(DataError, match="1 of 1 chunks of features were not written.*must share the cache folder"):
        prepare_folder(root, tmp_path / "cache", run_chunks=run_elsewhere)


def test_a_pickled_store_holds_no_features(tmp_path: Path) -> None:
    store, _ = prepare_folder(write_folder(tmp_path / "data"), tmp_path / "cache")
    content = pickle.dumps(store)
    assert len(content) < 1000 < store.frames.nbytes
    np.testing.assert_array_equal(pickle.loads(content).frames, store.frames)


def test_the_environment_sets_the_default_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDFL_CACHE", "/somewhere/else")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache() == Path("/somewhere/else")
    monkeypatch.delenv("RAYDFL_CACHE")
    assert default_cache() == Path("/xdg/raydfl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "raydfl"


def test_chunks_are_limited_by_clips_and_by_seconds() -> None:
    assert chunk_bounds([1.0] * 300) == [(0, 128), (128, 256), (256, 300)]
    assert chunk_bounds([None, 500.0, 200.0, 700.0, None]) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert chunk_bounds([]) == []


@pytest.mark.slow
def test_worker_processes_compute_identical_features(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder(tmp_path / "data")
    local, _ = prepare_folder(root, tmp_path / "alone")
    monkeypatch.setattr(chunks_module, "_START_UP_S", 0.0)
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    processes: list[int] = []

    def run(function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
        for report in run_locally(_ReportProcess(function), chunks):
            processes.append(int(report.failures.pop(-1)))
            yield report

    parallel, _ = prepare_folder(root, tmp_path / "together", run_chunks=run)
    assert processes[0] == os.getpid()
    assert len(processes) == 4
    assert os.getpid() not in processes[1:]
    np.testing.assert_array_equal(parallel.frames, local.frames)


class _ReportProcess:
    """A wrapper that adds the process id to the report of each chunk."""

    def __init__(self, function: Callable[[Chunk], ChunkReport]) -> None:
        self.function = function

    def __call__(self, chunk: Chunk) -> ChunkReport:
        report = self.function(chunk)
        return dataclasses.replace(report, failures={**report.failures, -1: str(os.getpid())})


def _die(chunk: Chunk) -> ChunkReport:
    if chunk.number:
        os._exit(9)
    return ChunkReport(0, 0, {}, 1000.0)


@pytest.mark.slow
def test_a_killed_worker_process_raises_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    chunks = [Chunk(number, Source("fsdd"), [], SETTINGS, "") for number in range(3)]
    with pytest.raises(RaydflError, match=r"killed during its work.*Run the same command again"):
        list(run_locally(_die, chunks))


def _make_report(chunk: Chunk) -> ChunkReport:
    assert chunk.number == 0 or chunk.alterations is not None
    return ChunkReport(chunk.number, 0, {}, 1000.0)


@pytest.mark.slow
def test_worker_processes_can_load_classes_from_user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from raydfl.data.features.alteration import Alteration\n"
        "class Mine(Alteration):\n    def __call__(self, wave, extractor, seed):\n        return wave\n"
    )
    alterations = Alterations(load_object(f"{tmp_path}/mine.py:Mine")(), (1,))
    (tmp_path / "other.py").write_text("class Other:\n    pass\n")
    load_object(f"{tmp_path}/other.py:Other")
    (tmp_path / "other.py").unlink()  # not needed, so the processes do without it
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    chunks = [Chunk(number, Source("fsdd"), [], SETTINGS, "", alterations=alterations) for number in range(3)]
    assert sorted(report.number for report in run_locally(_make_report, chunks)) == [0, 1, 2]
