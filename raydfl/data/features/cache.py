"""The cache of features: one memory-mapped array for (clips, settings), found by content and shared by all processes of a node.

A store is a folder ``KEY`` below the cache folder:

- ``frames.npy``: [all frames, bands], float32 or float16;
- ``offsets.npy``: int64 [clips + 1], clip ``i`` owns the rows ``offsets[i]`` to ``offsets[i + 1] - 1``;
- ``lengths.npy``: int32 [clips], how many of those rows are sound and not padding (0: the clip could not be read);
- ``store.json``: what it is, the sizes and digests of the files, and why clips could not be read.

``KEY`` is a digest of every clip's content in order and of all settings that change a number. While a store is made its
chunks lie in ``KEY.parts`` (an interrupted preparation continues from them) under the lock ``KEY.lock``; the folder gets its
name when it is whole.

``normalise: group`` is not done here: whose clips are training clips is not known yet. :mod:`raydfl.data.statistics` makes a
second store of the one with the numbers as they are.
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

from raydfl.core.errors import DataError
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
from raydfl.core.progress import Progress, Silent
from raydfl.data.features.alteration import Alterations
from raydfl.data.features.digests import content_digests, rows_of
from raydfl.data.features.extraction import (
    Chunk,
    RunChunks,
    Source,
    chunk_bounds,
    compute_chunk,
    read_report,
    run_locally,
)
from raydfl.data.features.file import FileFeatures, features_digests, missing_features, needs_waves
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.features.wave import BY_TRAINING_CLIPS
from raydfl.data.noise import Noise

FORMAT = 1
"""Goes into every key; raised when the calculation of features or the files change."""

_log = logging.getLogger(__name__)

_WHAT = "the features"
_USUAL_BANDS = 128
"""Bands for which the chunks have the right size."""


@dataclass(frozen=True)
class FeatureStore:
    """The features of some clips; the arrays are read-only maps of files that all processes share."""

    folder: Path
    frames: np.ndarray
    """float32 or float16 [all frames, bands]."""
    offsets: np.ndarray
    """int64 [clips + 1]."""
    lengths: np.ndarray
    """int32 [clips]: sounding frames; 0 for clips that could not be read."""
    length: int | None
    """Frames of every clip when all have the same number by the settings, else ``None``."""
    failures: Mapping[int, str]
    """The reasons why clips (by number) could not be read."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def bands(self) -> int:
        """Features of a frame."""
        return int(self.frames.shape[1])

    def clip(self, index: int) -> np.ndarray:
        """Return [frames, bands] of clip ``index``, padding included; a view."""
        view: np.ndarray = self.frames[self.offsets[index] : self.offsets[index + 1]]
        return view

    @functools.cached_property
    def fits_in_memory(self) -> bool:
        """Return whether the page cache can keep all frames, so that reading ahead would be useless after the first time."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.frames.nbytes < memory / 2

    @functools.cached_property
    def moved(self) -> dict[Any, Any]:
        """Copies of the frames on devices, by device; raydfl.training.together.batches puts them here."""
        return {}

    def read_ahead(self, starts: np.ndarray, counts: np.ndarray) -> None:
        """Ask the kernel to fetch some frames from the disk, without waiting for them.

        Args:
            starts: int [ranges]: first row in ``frames``.
            counts: int [ranges]: rows.
        """
        row = self.frames.strides[0]
        with (self.folder / "frames.npy").open("rb") as file:
            begin = os.fstat(file.fileno()).st_size - self.frames.nbytes
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
                if count:  # 0 would mean: to the end of the file
                    os.posix_fadvise(file.fileno(), begin + start * row, count * row, os.POSIX_FADV_WILLNEED)

    def windows(self, count: int) -> np.ndarray:
        """Return every run of ``count`` frames as a row: [all frames - count + 1, count * bands], a view."""
        row, item = self.frames.strides
        shape = len(self.frames) - count + 1, count * self.bands
        return np.ndarray(shape, self.frames.dtype, self.frames, strides=(row, item))

    def __reduce__(self) -> tuple[Any, ...]:
        return open_store, (self.folder,)  # a pickle of the arrays themselves would be a copy of everything


def open_store(folder: Path, verify: bool = False) -> FeatureStore:
    """Open the store in ``folder``, in about a millisecond.

    Args:
        verify: read all of it, about a second for each GB, and compare it with its digests; once in a process.

    Raises:
        DataError: the folder or a file of it is missing, damaged, or not what its name says.
    """
    try:
        facts = json.loads((folder / "store.json").read_bytes())
        if (facts["format"], facts["key"]) != (FORMAT, folder.name):
            raise ValueError(f"store.json is of format {facts['format']}, key {facts['key']}")
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
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"the cached features in {folder} cannot be used ({reason}); make them again with `raydfl data prepare FILE`, where "
            "FILE is the configuration (of a run: its config.yaml)"
        ) from error


def prepare(
    source: Source,
    manifest: pa.Table,
    features: AnyFeatures,
    *,
    cache: Path | None = None,
    unreadable: Literal["stop", "skip"] = "stop",
    noise: Noise | None = None,
    alterations: Alterations | None = None,
    progress: Progress | None = None,
    run_chunks: RunChunks | None = None,
) -> FeatureStore:
    """Return the features of a manifest's clips, from the cache or made now; for ``normalise: group`` as they are, in float32.

    Safe to call from several processes at once (the first makes them, the others wait) and to interrupt (the next call continues).

    Args:
        source: the data set that reads the clips.
        manifest: columns ``clip``, ``path`` and ``seconds``; clip ``i`` of the store is its row ``i``.
        cache: the cache folder; :func:`default_cache` when ``None``.
        unreadable: raise at clips that cannot be read, or record them in ``failures``.
        noise: added to the waves, with one seed for each row; of features from a file, those of ``noisy_path`` are taken.
        alterations: what an attacker does to the waves, then; with one seed for each row.
        progress: shown while clips are looked at and features computed.
        run_chunks: an executor whose workers see the recordings and the cache folder; local processes when ``None``.

    Raises:
        ConfigError: noise or alterations for features that come without waves, or a model that is not there.
        DataError: clips that cannot be read (``unreadable="stop"``), or an executor that left no result.
        ResourcesError: the disk is full or the cache folder cannot be written.
    """
    if alterations is not None and features.kind in ("file", "image"):
        raise needs_waves("the attack")
    progress = progress or Silent()
    cache = (default_cache() if cache is None else cache).expanduser().absolute()
    if not isinstance(features, ImageFeatures) and features.normalise in BY_TRAINING_CLIPS:
        features = features.model_copy(update={"normalise": "none", "dtype": "float32"})
    needed = _needed_bytes(manifest, features)
    with writing(cache, needed, _WHAT, CHOOSE_CACHE):
        cache.mkdir(parents=True, exist_ok=True)
        if isinstance(features, FileFeatures):
            clips = manifest.column("clip").to_pylist()
            digests, missing = features_digests(features, clips, noise, cache, progress)
            if missing and unreadable == "stop":
                raise missing_features(clips, missing)
        else:
            digests, missing = content_digests(source.open(), manifest, cache, progress)
            if missing and unreadable == "stop":
                raise _unreadable(manifest, features, missing)
        folder = cache / _store_key(digests, features, noise, alterations)
        work = _Preparation(source, manifest, features, folder, noise, alterations, unreadable)
    store = found_or_made(folder, needed, lambda: work.run(run_chunks or run_locally, progress))
    if store.failures and unreadable == "stop":
        raise _unreadable(
            manifest, features, store.failures, f" (as recorded in {folder}; delete that folder to try them again)"
        )
    return store


def _needed_bytes(manifest: pa.Table, features: AnyFeatures) -> int:
    """Roughly what chunks and store take together, as far as the clips' lengths are known."""
    seconds = np.nan_to_num(manifest.column("seconds").to_numpy())  # 0 where it is not known
    frames = int(features.frames_of(seconds).sum())
    return frames * features.bands * (4 + np.dtype(features.dtype).itemsize)


def _store_key(
    digests: Sequence[bytes],
    features: AnyFeatures,
    noise: Noise | None,
    alterations: Alterations | None,
) -> str:
    digest = hashlib.blake2b(digest_size=16)
    snr = None if noise is None else noise.snr_db
    digest.update(json.dumps([FORMAT, features.key(), snr], sort_keys=True).encode())
    digest.update(b"".join(digests))
    if noise is not None:
        digest.update(np.array(noise.seeds, np.int64).tobytes())
    if alterations is not None:
        digest.update(repr(alterations.what).encode())
        digest.update(np.array(alterations.seeds, np.int64).tobytes())
    return digest.hexdigest()


def _unreadable(manifest: pa.Table, features: AnyFeatures, failures: Mapping[int, str], note: str = "") -> DataError:
    """Return the error for clips without features: the encoder's, where it fails on several clips for one reason."""
    places = [
        manifest.column("path")[index].as_py() or manifest.column("clip")[index].as_py() for index in sorted(failures)
    ]
    reasons = set(failures.values())
    if isinstance(features, ModelFeatures | PretrainedFeatures) and len(failures) > 1 == len(reasons):
        (reason,) = reasons
        if reason.startswith(f"{features.title}: "):
            return DataError(
                f"data.features: {reason}. This is so for {places[0]} and {len(places) - 1} more of {manifest.num_rows} "
                f"clips{note}. Correct the encoder or its options. If these clips are at fault, leave them out with "
                f"data.unreadable=skip"
            )
    shown = [f"  {place}: {failures[index]}" for place, index in zip(places[:5], sorted(failures), strict=False)]
    more = f"\n  and {len(failures) - len(shown)} more" if len(failures) > len(shown) else ""
    return DataError(
        f"{len(failures)} of {manifest.num_rows} clips cannot be read{note}:\n"
        + "\n".join(shown)
        + more
        + "\nRepair or remove them, or leave them out with data.unreadable=skip"
    )


def found_or_made(folder: Path, needed: int, make: Callable[[], None]) -> FeatureStore:
    """Open the store in ``folder`` if it is whole; else let ``make`` write it, in one process only.

    Args:
        needed: bytes that it takes while it is made.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    lock = folder.with_suffix(".lock")

    def waiting() -> None:
        _log.warning("another process is preparing the same features (%s); waiting for it", lock)

    with writing(folder.parent, needed, _WHAT, CHOOSE_CACHE), hold_lock(lock, waiting):
        store = _open_if_whole(folder)
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
    """Write a store beside its folder, which then gets its name.

    Args:
        lengths: int [clips]: sounding frames.
        length: frames of every clip, shorter ones with zeros behind; ``None``: each has its own.
        frames: float [frames, bands] of all clips, in parts.
        like: [0, bands], of the type in which frames are kept.
        facts: what else ``store.json`` says; ``failures`` at least.
        arrays: further files, by name.
    """
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed right here
    new.mkdir()
    rows = lengths if length is None else np.full(len(lengths), length)
    offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    arrays = {"offsets": offsets, "lengths": lengths.astype(np.int32), **arrays}
    for name, array in arrays.items():
        np.save(new / f"{name}.npy", array)
    # Written through the file and not through a map: a full disk is then an error and not a killed process.
    with (new / "frames.npy").open("wb") as file:
        descr = np.lib.format.dtype_to_descr(like.dtype)
        shape = (int(offsets[-1]), like.shape[1])
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        for part in frames:
            file.write(np.ascontiguousarray(part, dtype=like.dtype).data)
        file.flush()
        os.fsync(file.fileno())
    files = {path.name: _facts_of(path) for path in sorted(new.iterdir())}
    about = {"format": FORMAT, "key": folder.name, "length": length, **facts, "files": files}
    content = json.dumps(about, indent=1).encode()
    write_atomically(new / "store.json", lambda path: path.write_bytes(content))
    new.rename(folder)


def _open_if_whole(folder: Path) -> FeatureStore | None:
    if not folder.exists():
        return None
    try:
        return open_store(folder, verify=True)
    except DataError as error:
        _log.warning("%s: making them again now", error)
        shutil.rmtree(folder)
        return None


@dataclass(frozen=True)
class _Preparation:
    """The making of one store, by the process that holds its lock."""

    source: Source
    manifest: pa.Table
    features: AnyFeatures
    folder: Path
    noise: Noise | None
    alterations: Alterations | None
    unreadable: Literal["stop", "skip"]

    def run(self, run_chunks: RunChunks, progress: Progress) -> None:
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
                    raise _unreadable(self.manifest, self.features, failed)
                advance(report.clips)
        absent = [chunk.path for chunk in chunks if chunk.number not in reports or not Path(chunk.path).exists()]
        if absent:
            raise DataError(
                f"{len(absent)} of {len(chunks)} chunks of features were not written, the first to {absent[0]}: the machines that "
                "compute them must share the cache folder (data.cache or RAYDFL_CACHE)"
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
        # Networks' features have hundreds of bands. Of log-mel the bounds stay: chunks of an earlier version may be there.
        smaller = 1 if isinstance(self.features, FeatureSettings) else max(1, self.features.bands // _USUAL_BANDS)
        return chunk_bounds(self.manifest.column("seconds").to_pylist(), smaller)

    def _chunks(self, parts: Path) -> list[Chunk]:
        rows = list(rows_of(self.manifest))
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
        """Puts the chunks together."""
        counts = [_part(chunk, "counts") for chunk in chunks]
        length = self.features.frames

        def frames() -> Iterator[np.ndarray]:
            for chunk, lengths in zip(chunks, counts, strict=True):
                part = _part(chunk, "frames")
                yield part if length is None else _padded(part, lengths, length)

        facts = {
            "features": self.features.model_dump(mode="json"),
            "snr_db": None if self.noise is None else self.noise.snr_db,
            "failures": failures,
        }
        like = np.zeros((0, self.features.bands), self.features.dtype)
        write_store(self.folder, np.concatenate([np.zeros(0, np.int64), *counts]), length, frames(), like, facts)


def _part(chunk: Chunk, name: str) -> np.ndarray:
    with np.load(chunk.path) as arrays:
        array: np.ndarray = arrays[name]
        return array


def _facts_of(path: Path) -> tuple[int, int, str]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, file_digest(path)


def _padded(frames: np.ndarray, lengths: np.ndarray, length: int) -> np.ndarray:
    """Return [clips * length, bands] of frames of clips of these lengths, zeros after each."""
    padded = np.zeros((len(lengths), length, frames.shape[1]), np.float32)
    padded[np.arange(length) < lengths[:, None]] = frames
    return padded.reshape(-1, frames.shape[1])
