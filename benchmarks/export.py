"""Measure exported models on recordings: difference from ``raydfl predict``, and time for a second of sound.

The run's model is exported for samples (``--input wave``), in int8, and, if it can, for streaming. The run and each
file predict every recording, resampled to the run's rate by raydfl. The table has the largest difference of a
probability (or of a score), the fraction of recordings with the same best class, and the real-time factor: processor
time on one thread divided by the recordings' duration, the minimum of three turns, without resampling. Streams receive
pieces of 20 and of 80 ms.

    python benchmarks/export.py RUN_DIR RECORDING...
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from raydfl import classify, export_model, load_model, read_audio
from raydfl.core.errors import RaydflError
from raydfl.data.features import FeatureExtractor
from raydfl.runs.inference.network import open_session
from raydfl.runs.inference.streaming import Stream
from raydfl.runs.inference.wave import read_settings

Answer = Callable[[np.ndarray], np.ndarray]
"""The answer float [answers] to a recording float32 [samples]."""
_TURNS = 3


def main() -> None:
    """Export, predict and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("recordings", type=Path, nargs="+")
    given = parser.parse_args()
    settings = read_settings(load_model(given.run_dir))
    extractor, rate = FeatureExtractor(settings), settings.sample_rate
    waves = [extractor.wave(*read_audio(file)) for file in given.recordings]
    expected = [prediction.probabilities for prediction in classify(given.run_dir, given.recordings)]
    seconds = sum(map(len, waves)) / rate
    print(f"{len(waves)} recordings, {seconds:.0f} s at {rate} Hz\n")
    print("| file | bytes | largest difference | same class | real-time factor |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="raydfl-export-") as name:
        for form, options in (("wave", {}), ("int8", {"quantize": "int8"}), ("streaming", {"streaming": True})):
            path = Path(name) / f"{form}.onnx"
            try:
                exported = export_model(given.run_dir, path, input="wave", **options)
            except RaydflError as error:
                print(f"| {form} | {error} |")
                continue
            session, size = open_session(path.read_bytes(), 1), path.stat().st_size
            if form != "streaming":
                show(
                    form,
                    size,
                    lambda wave, run=session.run: run(None, {"samples": wave[None]})[0][0],
                    waves,
                    expected,
                    rate,
                )
            else:
                for piece in (20, 80):
                    show(
                        f"{piece} ms",
                        size,
                        make_streaming_answer(session, round(piece * rate / 1000)),
                        waves,
                        expected,
                        rate,
                    )
            print(exported.quantised, end="\n" * bool(exported.quantised))


def make_streaming_answer(session: object, samples: int) -> Answer:
    """Return a function that predicts a recording from pieces of ``size`` samples."""

    def answer(wave: np.ndarray) -> np.ndarray:
        stream = Stream(session)
        for start in range(0, len(wave), samples):
            found = stream.process(wave[None, start : start + samples])
        return found[0]

    return answer


def show(
    name: str, size: int, answer: Answer, waves: Sequence[np.ndarray], expected: Sequence[np.ndarray], rate: int
) -> None:
    """Print a row of the table."""
    spent = []
    for _ in range(_TURNS):
        started = time.process_time()
        found = [answer(wave) for wave in waves]
        spent.append(time.process_time() - started)
    pairs = list(zip(found, expected, strict=True))
    difference = max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)
    same = sum(int(mine.argmax() == theirs.argmax()) for mine, theirs in pairs) / len(pairs)
    factor = min(spent) / (sum(map(len, waves)) / rate)
    print(f"| {name} | {size:,} | {difference:.1e} | {same:.1%} | {factor:.4f} |", flush=True)


if __name__ == "__main__":
    main()
