"""Measure the time of features with recordings read in a helper process, relative to reading in the same process.

Both ways compute log-mel features of the same wav files, in turn. The features must have the same bits.

    python benchmarks/isolation.py --clips 512 --seconds 4
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import soundfile

from raydfl.core.isolation import call_isolated
from raydfl.data.features import Chunk, FeatureSettings
from raydfl.data.features.extraction import compute_chunk
from raydfl.data.source import Source

RATE = 16_000
CHUNK = 128
"""Clips of a chunk."""


def main() -> None:
    """Measure and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clips", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a clip")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raydfl-isolation-") as name:
        folder = Path(name)
        chunks = write_chunks(folder, given.clips, given.seconds)
        begin = time.perf_counter()
        call_isolated(min, (1, 2), where="nothing")
        start = time.perf_counter() - begin
        times: dict[str, list[float]] = {"same process": [], "helper process": []}
        compute(chunks)  # Imports and caches.
        for _ in range(given.repeats):
            with mock.patch("raydfl.data.source.map_isolated", map_here):
                times["same process"].append(compute(chunks))
                here = [Path(chunk.path).read_bytes() for chunk in chunks]
            times["helper process"].append(compute(chunks))
            if here != [Path(chunk.path).read_bytes() for chunk in chunks]:
                raise SystemExit("The features differ.")
    medians = {name: statistics.median(values) for name, values in times.items()}
    for way, median in medians.items():
        print(f"{way:15} {median:8.3f} s  (from {min(times[way]):.3f} to {max(times[way]):.3f})")
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    print(f"ratio           {statistics.median(ratios):8.3f}    (from {min(ratios):.3f} to {max(ratios):.3f})")
    print(f"start of helper {start:8.3f} s")


def write_chunks(folder: Path, clips: int, seconds: float) -> list[Chunk]:
    """Write noise to wav files, and return their chunks."""
    rows = []
    for number in range(clips):
        path = folder / f"{number}.wav"
        wave = 0.1 * np.random.default_rng(number).standard_normal(round(RATE * seconds))
        soundfile.write(path, wave, RATE)
        rows.append({"clip": path.name, "path": str(path)})
    source, features = Source("folder", {"root": str(folder)}), FeatureSettings(sample_rate=RATE)
    return [
        Chunk(first // CHUNK, source, rows[first : first + CHUNK], features, str(folder / f"{first}.npz"))
        for first in range(0, clips, CHUNK)
    ]


def compute(chunks: Sequence[Chunk]) -> float:
    """Compute the chunks, and return the seconds."""
    begin = time.perf_counter()
    for chunk in chunks:
        if compute_chunk(chunk).failures:
            raise SystemExit("A clip is unreadable.")
    return time.perf_counter() - begin


def map_here(function: Callable[[Any], Any], items: Sequence[Any], places: Sequence[str]) -> Iterator[Any]:
    """Call a function for each item in this process."""
    return map(function, items)


if __name__ == "__main__":
    main()
