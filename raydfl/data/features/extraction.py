"""Compute the features of some clips, wherever that is done: in this process, a worker process, or a Ray task.

A chunk is a plain value and :func:`compute_chunk` a plain function, so any executor will do that can call one with the other on a
machine that sees the recordings and the cache folder.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from joblib.externals.loky.process_executor import TerminatedWorkerError

from raydfl.core.errors import DataError, RaydflError
from raydfl.core.files import write_atomically
from raydfl.core.registry import build, list_loaded_files, load_file
from raydfl.data.dataset import Dataset, find_dataset
from raydfl.data.features.alteration import UNALTERED, Alterations
from raydfl.data.features.extractor import FeatureExtractor, WaveFeatures
from raydfl.data.features.file import FileFeatures, read_features
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.films import NoDecoderError
from raydfl.data.noise import NOISELESS, Noise, add_noise

_CLIPS = 128
_SECONDS = 600.0
_START_UP_S = 5.0
"""The time of a worker process before its first result: it imports torch."""
_IDLE_S = 5
"""Seconds after which a worker process without work ends."""


@dataclass(frozen=True)
class Source:
    """A data set by its name and options, which any process can open."""

    name: str
    """Built-in name, or ``my_file.py:Class`` or ``my_module:Class``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its class."""

    def open(self) -> Dataset:
        """Open the data set.

        Raises:
            ConfigError: unknown name, or options that its class does not take.
        """
        return build(find_dataset(self.name), self.options, "data")


@dataclass(frozen=True)
class Chunk:
    """Some neighbouring clips whose features are computed together, and the file that takes them."""

    number: int
    source: Source
    rows: Sequence[Mapping[str, Any]]
    """Rows of the manifest."""
    features: AnyFeatures
    path: str
    """The file to write."""
    noise: Noise | None = None
    alterations: Alterations | None = None
    """Done after the noise."""
    encoder: str = ""
    """The digest of the pretrained encoder's folder, where features of that kind are wanted."""


@dataclass(frozen=True)
class ChunkReport:
    """The result of a chunk."""

    number: int
    clips: int
    failures: Mapping[int, str]
    """The reasons why clips (by position in the chunk) could not be read."""
    seconds: float
    """Time that reading and computing took."""


def chunk_bounds(seconds: Sequence[float | None], smaller: int = 1) -> list[tuple[int, int]]:
    """Cut clips of these lengths into neighbouring groups: at most 128 clips, and 600 s unless one clip alone is longer.

    Args:
        smaller: factor by which both limits are lowered, for features that take more memory.
    """
    most, longest = max(1, _CLIPS // smaller), _SECONDS / smaller
    bounds, start, total = [], 0, 0.0
    for index, length in enumerate(seconds):
        if index > start and (index - start == most or total + (length or 0.0) > longest):
            bounds.append((start, index))
            start, total = index, 0.0
        total += length or 0.0
    if len(seconds) > start:
        bounds.append((start, len(seconds)))
    return bounds


def compute_chunk(chunk: Chunk) -> ChunkReport:
    """Read a chunk's clips or their features, computes what is to be computed, and writes the chunk's file, whole or not at all.

    The file is an uncompressed ``.npz``: ``frames`` (float32 [all frames, bands]), ``counts`` (int64 [clips], 0 for a clip
    that could not be read) and ``failures`` (JSON).

    Raises:
        OSError: the file cannot be written (a full disk).
        ConfigError: a model that makes the features cannot be built, an encoder's folder has other content than where the work
            began, or what decodes films is not installed.
    """
    settings = chunk.features
    if isinstance(settings, FileFeatures):
        features_of = _given(chunk, settings)
    elif isinstance(settings, ImageFeatures):
        features_of = _pictured(chunk, settings)
    else:
        features_of = _computed(chunk, settings)
    matrices: list[np.ndarray] = []
    counts = np.zeros(len(chunk.rows), np.int64)
    failures: dict[int, str] = {}
    started = time.perf_counter()
    with _one_thread():
        for position, row in enumerate(chunk.rows):
            try:
                matrix = features_of(position, row)
            except (MemoryError, NoDecoderError):
                raise
            except RaydflError as error:
                failures[position] = str(error).removeprefix(f"{row.get('path')}: ")  # who tells of it names the file
                continue
            except Exception as error:  # noqa: BLE001  (whatever a decoder or a user's data set raises)
                failures[position] = f"{type(error).__name__}: {error}"
                continue
            matrices.append(matrix)
            counts[position] = len(matrix)
    frames = np.concatenate(matrices) if matrices else np.zeros((0, chunk.features.bands), np.float32)
    text = np.frombuffer(json.dumps(failures).encode(), np.uint8)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, frames=frames, counts=counts, failures=text)

    write_atomically(Path(chunk.path), write)
    return ChunkReport(chunk.number, len(chunk.rows), failures, time.perf_counter() - started)


FeaturesOf = Callable[[int, Mapping[str, Any]], np.ndarray]
"""The features of a clip by its position in the chunk and its row of the manifest: float32 [frames, bands]."""


def _given(chunk: Chunk, settings: FileFeatures) -> FeaturesOf:
    """From the user's file."""
    noise = chunk.noise
    return lambda position, row: read_features(
        settings, row["clip"], noise is not None and noise.seeds[position] != NOISELESS
    )


def _pictured(chunk: Chunk, settings: ImageFeatures) -> FeaturesOf:
    """From the image."""
    dataset = _open(chunk.source)
    return lambda position, row: settings.stored(dataset.image(row))


def _computed(chunk: Chunk, settings: WaveFeatures) -> FeaturesOf:
    """From the recording."""
    if isinstance(settings, PretrainedFeatures):
        settings.check_content(chunk.encoder)
    dataset, extractor = _open(chunk.source), _extractor(settings)
    noise, alterations = chunk.noise, chunk.alterations

    def compute(position: int, row: Mapping[str, Any]) -> np.ndarray:
        wave = extractor.wave(*dataset.read(row))
        if noise is not None and noise.seeds[position] != NOISELESS:
            wave = add_noise(wave, noise.snr_db, noise.seeds[position])
        if alterations is not None and alterations.seeds[position] != UNALTERED:
            wave = alterations.what(wave[: settings.samples], extractor, alterations.seeds[position])
        if not isinstance(settings, ModelFeatures | PretrainedFeatures):
            return extractor.features(wave)
        try:
            return extractor.features(wave)
        except MemoryError:
            raise
        except Exception as error:  # whatever a user's network or a strange option of an encoder raises
            reason = str(error) if isinstance(error, RaydflError) else f"{type(error).__name__}: {error}"
            raise DataError(f"{settings.title}: {reason}") from error

    return compute


def read_report(chunk: Chunk) -> ChunkReport | None:
    """Read the report of a chunk that an earlier run finished; ``None`` when its file is missing, damaged, or has failures.

    Failures are tried again: the reason may have gone.
    """
    try:
        with zipfile.ZipFile(chunk.path) as archive:
            if archive.testzip() is not None:  # compares every member with its checksum
                return None
        with np.load(chunk.path) as arrays:
            failures = json.loads(arrays["failures"].tobytes())
            clips = len(arrays["counts"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return None if failures or clips != len(chunk.rows) else ChunkReport(chunk.number, clips, {}, 0.0)


RunChunks = Callable[[Callable[[Chunk], ChunkReport], Sequence[Chunk]], Iterable[ChunkReport]]
"""An executor: applies a function to every chunk and gives the reports in any order, as they come."""


def run_locally(function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
    """Run chunks in this process, and in one process for each processor once the measured time shows that this pays.

    Raises:
        RaydflError: a process was killed.
    """
    workers = joblib.cpu_count()
    spent = 0.0
    for position, chunk in enumerate(chunks):
        left = len(chunks) - position
        if position and workers > 1 and spent / position * left * (1 - 1 / workers) > _START_UP_S:
            yield from _run_in_processes(function, chunks[position:], workers)
            return
        report = function(chunk)
        spent += report.seconds
        yield report


def _run_in_processes(
    function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk], workers: int
) -> Iterator[ChunkReport]:
    run = joblib.Parallel(workers, return_as="generator_unordered", batch_size=1, idle_worker_timeout=_IDLE_S)
    files = list_loaded_files()
    try:
        yield from run(joblib.delayed(_run_with_files)(files, pickle.dumps((function, chunk))) for chunk in chunks)
    except TerminatedWorkerError as error:
        raise RaydflError(
            "a worker process was killed in the middle of its work, often for lack of memory; the chunks that others finished are "
            "kept, so run the same command again"
        ) from error


def _run_with_files(files: Sequence[Path], call: bytes) -> ChunkReport:
    """Run a chunk in a process that first loads the users' files whose classes the pickled call names."""
    for file in files:
        load_file(file)
    function, chunk = pickle.loads(call)  # noqa: S301  (from the parent process)
    report: ChunkReport = function(chunk)
    return report


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on one thread: small transforms are slower on several, and their last bits would depend on how many."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_datasets: dict[str, Dataset] = {}


def _open(source: Source) -> Dataset:
    """Open a data set once in each process: some load voices or tables."""
    key = repr(source)
    if key not in _datasets:
        _datasets[key] = source.open()
    return _datasets[key]


_extractors: dict[str, FeatureExtractor] = {}


def _extractor(settings: WaveFeatures) -> FeatureExtractor:
    """Built once in each process; once more when the weights of a model have changed."""
    weights = settings.weights if isinstance(settings, ModelFeatures) else None
    changed: Any = None if weights is None else weights.stat().st_mtime_ns
    if isinstance(settings, PretrainedFeatures):
        changed = settings.content()
    key = f"{settings.model_dump_json()} {changed}"
    if key not in _extractors:
        _extractors.clear()  # a model may be large: one at a time
        _extractors[key] = FeatureExtractor(settings)
    return _extractors[key]
