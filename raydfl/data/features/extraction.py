"""Computation of clips' features in this process, a worker process or a Ray task.

A chunk is a plain value and :func:`compute_chunk` a plain function. Any executor can call it on a machine that sees the
recordings and the cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from joblib.externals.loky.process_executor import TerminatedWorkerError

from raydfl.core.errors import DataError, RaydflError
from raydfl.core.files import write_atomically
from raydfl.core.isolation import map_isolated
from raydfl.core.registry import list_loaded_files, load_file
from raydfl.data.features.alteration import UNALTERED, Alterations
from raydfl.data.features.extractor import FeatureExtractor, WaveFeatures
from raydfl.data.features.file import FileFeatures, read_features
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.noise import NOISELESS, ClipNoise, add_noise
from raydfl.data.source import Source
from raydfl.data.video import NoDecoderError

_CLIPS = 128
_SECONDS = 600.0
_START_UP_S = 5.0
"""Start-up time of a worker process, spent on the import of torch."""
_IDLE_S = 5
"""Idle time in seconds before a worker process ends."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive clips to process together, and the path of their features."""

    number: int
    source: Source
    rows: Sequence[Mapping[str, Any]]
    """Rows of the manifest."""
    features: AnyFeatures
    path: str
    """Path of the output file."""
    noise: ClipNoise | None = None
    alterations: Alterations | None = None
    """Applied after the noise."""
    encoder: str = ""
    """Digest of the encoder's folder, for pretrained features."""


@dataclass(frozen=True)
class ChunkReport:
    """The result of a chunk."""

    number: int
    clips: int
    failures: Mapping[int, str]
    """The reasons why clips are unreadable, by position in the chunk."""
    seconds: float
    """Duration of reading and computing."""


def chunk_bounds(seconds: Sequence[float | None], smaller: int = 1) -> list[tuple[int, int]]:
    """Divide clips into chunks of consecutive clips, with at most 128 clips and 600 s, or a single longer clip.

    Args:
        seconds: The clips' lengths, None if unknown.
        smaller: Divisor of both limits, for features that need more memory.

    Returns:
        Start and stop of each chunk.
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
    """Read or compute the features of a chunk, and write its file atomically.

    The file is an uncompressed ``.npz`` with ``frames`` (float32 [all frames, bands]), ``counts`` (int64 [clips], 0 for unreadable
    clips) and ``failures`` (JSON).

    Raises:
        OSError: The file cannot be written, such as on a full disk.
        ConfigError: A feature model cannot be built, the encoder's folder has other content than at the preparation's start, or the
            video decoder is not installed.
    """
    settings = chunk.features
    compute: _Compute
    if isinstance(settings, FileFeatures):
        contents, compute = _read_features(chunk, settings), lambda _, matrix: matrix
    elif isinstance(settings, ImageFeatures):
        contents, compute = chunk.source.read_clips("image", chunk.rows), lambda _, image: settings.to_rows(image)
    else:
        contents, compute = chunk.source.read_clips("read", chunk.rows), _make_extractor(chunk, settings)
    matrices: list[np.ndarray] = []
    counts = np.zeros(len(chunk.rows), np.int64)
    failures: dict[int, str] = {}
    start = time.perf_counter()
    with _one_thread():
        for position, (row, content) in enumerate(zip(chunk.rows, contents, strict=True)):
            try:
                if isinstance(content, Exception):
                    raise content
                matrix = compute(position, content)
            except (MemoryError, NoDecoderError):
                raise
            except RaydflError as error:
                failures[position] = str(error).removeprefix(f"{row.get('path')}: ")  # The final message adds the path.
                continue
            except Exception as error:  # noqa: BLE001  (A decoder or a user's data set may raise anything.)
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
    return ChunkReport(chunk.number, len(chunk.rows), failures, time.perf_counter() - start)


_Compute = Callable[[int, Any], np.ndarray]
"""Returns a clip's features, float32 [frames, bands], for its position in the chunk and its content."""


def _read_features(chunk: Chunk, settings: FileFeatures) -> Iterator[Any]:
    """Yield the features of each clip in a user's file, or the error."""
    seeds = [NOISELESS] * len(chunk.rows) if chunk.noise is None else chunk.noise.seeds
    clips = [(row["clip"], seed != NOISELESS) for row, seed in zip(chunk.rows, seeds, strict=True)]
    return map_isolated(functools.partial(_read_clip, settings), clips, [clip for clip, _ in clips])


def _read_clip(settings: FileFeatures, clip: tuple[str, bool]) -> np.ndarray:
    return read_features(settings, *clip)


def _make_extractor(chunk: Chunk, settings: WaveFeatures) -> _Compute:
    if isinstance(settings, PretrainedFeatures):
        settings.check_content(chunk.encoder)
    extractor = _find_extractor(settings)
    noise, alterations = chunk.noise, chunk.alterations

    def compute(position: int, recording: tuple[np.ndarray, int]) -> np.ndarray:
        wave = extractor.trim(extractor.wave(*recording))
        if noise is not None and noise.seeds[position] != NOISELESS:
            wave = add_noise(wave, noise.snr_db, noise.seeds[position])
        if alterations is not None and alterations.seeds[position] != UNALTERED:
            wave = alterations.alteration(wave[: settings.samples], extractor, alterations.seeds[position])
        if not isinstance(settings, ModelFeatures | PretrainedFeatures):
            return extractor.features(wave)
        try:
            return extractor.features(wave)
        except MemoryError:
            raise
        except Exception as error:  # A user's network or an encoder may raise anything.
            reason = str(error) if isinstance(error, RaydflError) else f"{type(error).__name__}: {error}"
            raise DataError(f"{settings.title}: {reason}") from error

    return compute


def read_report(chunk: Chunk) -> ChunkReport | None:
    """Read the report of a chunk from an earlier run. None if its file is missing or damaged, or has failures.

    Failures are tried again, because their cause may be gone.
    """
    try:
        with zipfile.ZipFile(chunk.path) as archive:
            if archive.testzip() is not None:  # It compares every member with its checksum.
                return None
        with np.load(chunk.path) as arrays:
            failures = json.loads(arrays["failures"].tobytes())
            clips = len(arrays["counts"])
    except Exception:  # noqa: BLE001  (damaged in any way: made again)
        return None
    return None if failures or clips != len(chunk.rows) else ChunkReport(chunk.number, clips, {}, 0.0)


RunChunks = Callable[[Callable[[Chunk], ChunkReport], Sequence[Chunk]], Iterable[ChunkReport]]
"""An executor. It applies a function to every chunk, and yields the reports in any order."""


def run_locally(function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
    """Run chunks in this process, or in one process per processor if the measured time justifies their start.

    Raises:
        RaydflError: A process was killed.
    """
    workers = joblib.cpu_count()
    spent = 0.0
    for position, chunk in enumerate(chunks):
        left = len(chunks) - position
        # The first chunks run here. Processes start once they would save more time than their start takes.
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
            "A worker process was killed during its work, often for lack of memory. All finished chunks are kept. Run the same "
            "command again."
        ) from error


def _run_with_files(files: Sequence[Path], call: bytes) -> ChunkReport:
    """Load the users' files with the classes of a pickled call, then run it."""
    for file in files:
        load_file(file)
    function, chunk = pickle.loads(call)  # noqa: S301  (The parent process wrote it.)
    report: ChunkReport = function(chunk)
    return report


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread. Small transforms are slower with more, and their last bits depend on the number."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_extractors: dict[str, FeatureExtractor] = {}


def _find_extractor(settings: WaveFeatures) -> FeatureExtractor:
    """Build an extractor once per process, and again after a change of a model's weights."""
    weights = settings.weights if isinstance(settings, ModelFeatures) else None
    changed: Any = None if weights is None else weights.stat().st_mtime_ns
    if isinstance(settings, PretrainedFeatures):
        changed = settings.content()
    key = f"{settings.model_dump_json()} {changed}"
    if key not in _extractors:
        _extractors.clear()  # A model may be large, so only one is kept.
        _extractors[key] = FeatureExtractor(settings)
    return _extractors[key]
