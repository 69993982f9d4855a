"""The feature cache: a memory-mapped array for (clips, settings), found by content and shared by all processes of a node.

A feature store is a folder ``KEY`` in the cache folder:

- ``frames.npy``: float32 or float16 [all frames, bands];
- ``offsets.npy``: int64 [clips + 1], clip ``i`` owns the rows ``offsets[i]`` to ``offsets[i + 1] - 1``;
- ``lengths.npy``: int32 [clips], the number of these rows without padding (0: the clip is unreadable);
- ``store.json``: settings, sizes and digests of the files, and the reasons why clips are unreadable.

``KEY`` is a digest of every clip's content in order, and of all settings that change a value. During the preparation, chunks are in
``KEY.parts`` under the lock ``KEY.lock``. An interrupted preparation continues from them. A complete store is renamed to ``KEY``.

``normalise: group`` needs the training clips, and the cache does not know them. :mod:`raydfl.data.features.statistics` makes a
second store from the store of unnormalised values.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raydfl.core.errors import DataError, translate_failures
from raydfl.core.files import (
    CHOOSE_CACHE,
    content_digest,
    default_cache,
    file_digest,
    free_bytes,
    full_disk,
    plain_name,
    write_atomically,
    writing,
)
from raydfl.core.lock import hold_lock
from raydfl.core.memory import read_memory_limit
from raydfl.core.progress import ProgressReporter, Silent
from raydfl.data.features.alteration import Alterations
from raydfl.data.features.digests import digest_clips, iterate_rows
from raydfl.data.features.extraction import (
    Chunk,
    RunChunks,
    chunk_bounds,
    compute_chunk,
    read_report,
    run_locally,
)
from raydfl.data.features.file import FileFeatures, digest_features, explain_missing, needs_waves
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.features.wave import BY_TRAINING_CLIPS
from raydfl.data.noise import ClipNoise
from raydfl.data.source import Source

FORMAT = 1
"""Version of the computation and the files, part of every key."""

_log = logging.getLogger(__name__)

_WHAT = "the features"
_USUAL_BANDS = 128
"""Number of bands of full-sized chunks. Features with more bands get smaller chunks."""


@dataclass(frozen=True)
class FeatureStore:
    """Features of some clips, in read-only memory maps shared by all processes."""

    folder: Path
    frames: np.ndarray
    """float32 or float16 [all frames, bands]."""
    offsets: np.ndarray
    """int64 [clips + 1]."""
    lengths: np.ndarray
    """int32 [clips]: frames without padding, 0 for unreadable clips."""
    length: int | None
    """Number of frames of every clip, or None if clips have different lengths."""
    failures: Mapping[int, str]
    """The reasons why clips are unreadable, by clip number."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def bands(self) -> int:
        """Number of features of a frame."""
        return int(self.frames.shape[1])

    def clip(self, index: int) -> np.ndarray:
        """Return a view of a clip's frames with padding, [frames, bands]."""
        view: np.ndarray = self.frames[self.offsets[index] : self.offsets[index + 1]]
        return view

    @functools.cached_property
    def fits_in_memory(self) -> bool:
        """True if the page cache can hold all frames, so reading ahead helps only once."""
        return self.frames.nbytes < read_memory_limit() / 2

    @functools.cached_property
    def device_copies(self) -> dict[Any, Any]:
        """Copies of the frames by device, filled by raydfl.training.together.batches."""
        return {}

    def read_ahead(self, starts: np.ndarray, counts: np.ndarray) -> None:
        """Ask the kernel to fetch frames from the disk, without waiting.

        Args:
            starts: First rows in ``frames``, int [ranges].
            counts: Numbers of rows, int [ranges].
        """
        if not hasattr(os, "posix_fadvise"):  # macOS has no such call.
            return
        row = self.frames.strides[0]
        with (self.folder / "frames.npy").open("rb") as file:
            begin = os.fstat(file.fileno()).st_size - self.frames.nbytes
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
                if count:  # The kernel reads 0 as "to the end of the file".
                    os.posix_fadvise(file.fileno(), begin + start * row, count * row, os.POSIX_FADV_WILLNEED)

    def windows(self, count: int) -> np.ndarray:
        """Return a view of all windows of ``count`` consecutive frames, [all frames - count + 1, count * bands]."""
        row, item = self.frames.strides
        shape = len(self.frames) - count + 1, count * self.bands
        return np.ndarray(shape, self.frames.dtype, self.frames, strides=(row, item))

    def __reduce__(self) -> tuple[Any, ...]:
        return open_store, (self.folder,)  # A pickle of the arrays would copy all frames.


def open_store(folder: Path, verify: bool = False) -> FeatureStore:
    """Open a feature store, in about a millisecond.

    Args:
        folder: The store's folder.
        verify: Compare the files with their digests, once per process, at about a second per GB.

    Raises:
        DataError: The folder or a file is missing or damaged, or belongs to another store.
    """
    with translate_failures(
        lambda reason: DataError(
            f"The cached features in {folder} cannot be used ({reason}). Make them again with `raydfl data prepare FILE`, where "
            "FILE is the configuration (of a run: its config.yaml)."
        )
    ):
        facts = json.loads((folder / "store.json").read_bytes())
        if (facts["format"], facts["key"]) != (FORMAT, folder.name):
            raise ValueError(f"store.json has format {facts['format']} and key {facts['key']}")
        for name, (size, _, digest) in facts["files"].items():
            status = (folder / plain_name(name)).stat()
            if status.st_size != size:
                raise ValueError(f"{name} has {status.st_size} bytes instead of {size}")
            if verify and content_digest(folder / name) != digest:
                raise ValueError(f"the content of {name} has changed")
        frames, offsets, lengths = (
            np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("frames", "offsets", "lengths")
        )
        if len(offsets) != len(lengths) + 1 or offsets[-1] != len(frames):
            raise ValueError("offsets.npy, lengths.npy and frames.npy do not belong together")
        failures = {int(index): reason for index, reason in facts["failures"].items()}
        return FeatureStore(folder, frames, offsets, lengths, facts["length"], failures)


def prepare(
    source: Source,
    manifest: pa.Table,
    features: AnyFeatures,
    *,
    cache: Path | None = None,
    unreadable: Literal["stop", "skip"] = "stop",
    noise: ClipNoise | None = None,
    alterations: Alterations | None = None,
    progress: ProgressReporter | None = None,
    run_chunks: RunChunks | None = None,
) -> FeatureStore:
    """Return the features of a manifest's clips from the cache, and compute missing ones.

    Several processes may call this at once: the first computes the features, and the rest wait. An interrupted call continues at
    the next call. For ``normalise: group`` the features are unnormalised and float32.

    Args:
        source: The data set with the clips.
        manifest: Table with the columns ``clip``, ``path`` and ``seconds``. Row ``i`` is clip ``i`` of the store.
        features: The features' settings.
        cache: The cache folder. None: :func:`default_cache`.
        unreadable: Whether unreadable clips raise an error, or are listed in ``failures``.
        noise: Noise to add to the waves, with a seed for each row. Features from a file are read from ``noisy_path`` instead.
        alterations: An attacker's alterations, applied after the noise, with a seed for each row.
        progress: Shows the progress of digests and features.
        run_chunks: An executor. Its workers must see the recordings and the cache folder. None: local processes.

    Raises:
        ConfigError: Noise or alterations for features without waves, or a missing model.
        DataError: Clips are unreadable (``unreadable="stop"``), or the executor left no result.
        ResourcesError: The disk is full or the cache folder is not writable.
    """
    if alterations is not None and features.kind in ("file", "image"):
        raise needs_waves("the attack")
    progress = progress or Silent()
    cache = (default_cache() if cache is None else cache).expanduser().absolute()
    if not isinstance(features, ImageFeatures) and features.normalise in BY_TRAINING_CLIPS:
        features = features.model_copy(update={"normalise": "none", "dtype": "float32"})
    needed = _estimate_bytes(manifest, features)
    with writing(cache, needed, _WHAT, CHOOSE_CACHE):
        cache.mkdir(parents=True, exist_ok=True)
        if isinstance(features, FileFeatures):
            clips = manifest.column("clip").to_pylist()
            digests, missing = digest_features(features, clips, noise, cache, progress)
            if missing and unreadable == "stop":
                raise explain_missing(clips, missing)
        else:
            digests, missing = digest_clips(source.open(), manifest, cache, progress)
            if missing and unreadable == "stop":
                raise _make_error(manifest, features, missing)
        folder = cache / _store_key(digests, features, noise, alterations)
        work = _Preparation(source, manifest, features, folder, noise, alterations, unreadable)
    store = open_or_make(folder, needed, lambda: work.run(run_chunks or run_locally, progress))
    if store.failures and unreadable == "stop":
        raise _make_error(
            manifest, features, store.failures, f" (recorded in {folder}. Delete this folder to try again)"
        )
    return store


def _estimate_bytes(manifest: pa.Table, features: AnyFeatures) -> int:
    """Estimate the disk space of chunks and store together. Clips of unknown length, or with an unknown time step, count 0."""
    step = features.hop / features.sample_rate if isinstance(features, FeatureSettings) else features.frame_seconds
    seconds = np.nan_to_num(manifest.column("seconds").to_numpy())
    if features.frames is not None:
        frames = features.frames * len(seconds)
    elif step is not None:
        most = getattr(features, "seconds", None)  # images have no length
        frames = int((np.floor(np.minimum(seconds, most or np.inf) / step) + 1).sum())
    else:
        frames = 0
    return frames * features.bands * (4 + np.dtype(features.dtype).itemsize)


def _store_key(
    digests: Sequence[bytes],
    features: AnyFeatures,
    noise: ClipNoise | None,
    alterations: Alterations | None,
) -> str:
    digest = hashlib.blake2b(digest_size=16)
    snr = None if noise is None else noise.snr_db
    digest.update(json.dumps([FORMAT, features.key(), snr], sort_keys=True).encode())
    digest.update(b"".join(digests))
    if noise is not None:
        digest.update(np.array(noise.seeds, np.int64).tobytes())
    if alterations is not None:
        digest.update(repr(alterations.alteration).encode())
        digest.update(np.array(alterations.seeds, np.int64).tobytes())
    return digest.hexdigest()


def _make_error(manifest: pa.Table, features: AnyFeatures, failures: Mapping[int, str], note: str = "") -> DataError:
    """Return the error for unreadable clips, or the encoder's error if several clips fail for the same reason."""
    places = [
        manifest.column("path")[index].as_py() or manifest.column("clip")[index].as_py() for index in sorted(failures)
    ]
    reasons = set(failures.values())
    if isinstance(features, ModelFeatures | PretrainedFeatures) and len(failures) > 1 == len(reasons):
        (reason,) = reasons
        if reason.startswith(f"{features.title}: "):
            return DataError(
                f"data.features: {reason}. {len(places)} of {manifest.num_rows} clips fail for this reason, the first {places[0]}"
                f"{note}. Correct the encoder or its options, or leave these clips out with data.unreadable=skip."
            )
    shown = [f"  {place}: {failures[index]}" for place, index in zip(places[:5], sorted(failures), strict=False)]
    more = f"\n  and {len(failures) - len(shown)} more" if len(failures) > len(shown) else ""
    return DataError(
        f"{len(failures)} of {manifest.num_rows} clips cannot be read{note}:\n"
        + "\n".join(shown)
        + more
        + "\nRepair or remove them, or leave them out with data.unreadable=skip."
    )


def open_or_make(folder: Path, needed: int, make: Callable[[], None]) -> FeatureStore:
    """Open a valid store, or make it in one process while the rest wait.

    Args:
        folder: The store's folder.
        needed: Disk space of the preparation in bytes.
        make: Writes the store.

    Raises:
        ResourcesError: The disk is full or the folder is not writable.
    """
    lock = folder.with_suffix(".lock")

    def report_wait() -> None:
        _log.warning("Another process is preparing the same features (%s). Waiting for it.", lock)

    with writing(folder.parent, needed, _WHAT, CHOOSE_CACHE), hold_lock(lock, report_wait):
        store = _open_if_valid(folder)
        if store is None:
            if free_bytes(folder.parent) < needed:
                raise full_disk(folder.parent, needed, _WHAT, CHOOSE_CACHE)
            make()
            store = open_store(folder)
    return store


def write_store(
    folder: Path,
    lengths: np.ndarray,
    length: int | None,
    frames: Iterable[np.ndarray],
    like: np.ndarray,
    facts: Mapping[str, Any],
    **arrays: np.ndarray,
) -> None:
    """Write a store under a temporary name, and rename it when it is complete.

    Args:
        folder: The store's folder.
        lengths: Frames without padding, int [clips].
        length: Common number of frames, padded with zeros. None: clips keep their lengths.
        frames: Parts of all clips' frames, float [frames, bands].
        like: Empty array [0, bands] with the stored dtype.
        facts: Further content of ``store.json``, at least ``failures``.
        arrays: Further arrays by file name.
    """
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)  # A killed process may have left it.
    new.mkdir()
    rows = lengths if length is None else np.full(len(lengths), length)
    offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    arrays = {"offsets": offsets, "lengths": lengths.astype(np.int32), **arrays}
    for name, array in arrays.items():
        np.save(new / f"{name}.npy", array)
    # A full disk raises an error in a file, but kills the process in a memory map.
    with (new / "frames.npy").open("wb") as file:
        descr = np.lib.format.dtype_to_descr(like.dtype)
        shape = (int(offsets[-1]), like.shape[1])
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        for part in frames:
            file.write(np.ascontiguousarray(part, dtype=like.dtype).data)
        file.flush()
        os.fsync(file.fileno())
    files = {path.name: _read_facts(path) for path in sorted(new.iterdir())}
    about = {"format": FORMAT, "key": folder.name, "length": length, **facts, "files": files}
    content = json.dumps(about, indent=1).encode()
    write_atomically(new / "store.json", lambda path: path.write_bytes(content))
    new.rename(folder)


def _open_if_valid(folder: Path) -> FeatureStore | None:
    if not folder.exists():
        return None
    try:
        return open_store(folder, verify=True)
    except DataError as error:
        _log.warning("%s They are made again now.", error)
        shutil.rmtree(folder)
        return None


@dataclass(frozen=True)
class _Preparation:
    """Preparation of a store, by the process with its lock."""

    source: Source
    manifest: pa.Table
    features: AnyFeatures
    folder: Path
    noise: ClipNoise | None
    alterations: Alterations | None
    unreadable: Literal["stop", "skip"]

    def run(self, run_chunks: RunChunks, progress: ProgressReporter) -> None:
        parts = self.folder.with_suffix(".parts")
        parts.mkdir(exist_ok=True)
        chunks = self._chunks(parts)
        reports = {chunk.number: report for chunk in chunks if (report := read_report(chunk)) is not None}
        missing = [chunk for chunk in chunks if chunk.number not in reports]
        starts = {chunk.number: start for chunk, (start, _) in zip(chunks, self._bounds, strict=True)}
        with progress.steps("computing features", self.manifest.num_rows) as advance:
            advance(sum(report.clips for report in reports.values()))
            for report in run_chunks(compute_chunk, missing) if missing else ():
                reports[report.number] = report
                if report.failures and self.unreadable == "stop":
                    failed = {starts[report.number] + position: why for position, why in report.failures.items()}
                    raise _make_error(self.manifest, self.features, failed)
                advance(report.clips)
        absent = [chunk.path for chunk in chunks if chunk.number not in reports or not Path(chunk.path).exists()]
        if absent:
            raise DataError(
                f"{len(absent)} of {len(chunks)} chunks of features were not written, the first {absent[0]}. All machines with "
                "workers must share the cache folder (data.cache or RAYDFL_CACHE)."
            )
        failures = {
            starts[number] + position: reason
            for number, report in sorted(reports.items())
            for position, reason in sorted(report.failures.items())
        }
        self._assemble(chunks, failures)
        shutil.rmtree(parts)

    @functools.cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        # Networks' features have hundreds of bands. Log-mel keeps its bounds, to reuse chunks of earlier versions.
        smaller = 1 if isinstance(self.features, FeatureSettings) else max(1, self.features.bands // _USUAL_BANDS)
        return chunk_bounds(self.manifest.column("seconds").to_pylist(), smaller)

    def _chunks(self, parts: Path) -> list[Chunk]:
        rows = list(iterate_rows(self.manifest))
        encoder = self.features.content() if isinstance(self.features, PretrainedFeatures) else ""
        return [
            Chunk(
                number,
                self.source,
                rows[start:stop],
                self.features,
                str(parts / f"{number:06d}.npz"),
                None if self.noise is None else self.noise.part(start, stop),
                None if self.alterations is None else self.alterations.part(start, stop),
                encoder,
            )
            for number, (start, stop) in enumerate(self._bounds)
        ]

    def _assemble(self, chunks: Sequence[Chunk], failures: Mapping[int, str]) -> None:
        """Join the chunks into a store."""
        counts = [_load_array(chunk, "counts") for chunk in chunks]
        length = self.features.frames

        def frames() -> Iterator[np.ndarray]:
            for chunk, lengths in zip(chunks, counts, strict=True):
                part = _load_array(chunk, "frames")
                yield part if length is None else _pad(part, lengths, length)

        facts = {
            "features": self.features.model_dump(mode="json"),
            "snr_db": None if self.noise is None else self.noise.snr_db,
            "failures": failures,
        }
        like = np.zeros((0, self.features.bands), self.features.dtype)
        write_store(self.folder, np.concatenate([np.zeros(0, np.int64), *counts]), length, frames(), like, facts)


def _load_array(chunk: Chunk, name: str) -> np.ndarray:
    with np.load(chunk.path) as arrays:
        array: np.ndarray = arrays[name]
        return array


def _read_facts(path: Path) -> tuple[int, int, str]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, file_digest(path)


def _pad(frames: np.ndarray, lengths: np.ndarray, length: int) -> np.ndarray:
    """Pad each clip's frames with zeros to a common length, float32 [clips * length, bands]."""
    padded = np.zeros((len(lengths), length, frames.shape[1]), np.float32)
    padded[np.arange(length) < lengths[:, None]] = frames
    return padded.reshape(-1, frames.shape[1])
