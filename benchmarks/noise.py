"""Measure the effect of training with noise and SpecAugment on the accuracy on noisy recordings.

The six speakers of the Free Spoken Digit Dataset are the clients, 450 clips each; takes 0 to 4, 300 clips, are the test
set. FedAvg of CRNN-Lite is trained without transforms, with noise, with SpecAugment, and with both, with the same
budget. The last round is evaluated on the original test recordings, and with white and with pink noise added to the
samples at 20, 10 and 0 dB. Training never sees pink noise; its own noise is white and is added to the power in the mel
bands.

    python benchmarks/noise.py --root PATH/TO/fsdd
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import soundfile

from raydfl import classify, make_config, run

NOISE = {"name": "noise", "snr_db": [0, 20], "share": 0.5}
MASKS = {"name": "spec_augment", "frames": 20, "bands": 8}
TRAININGS: Mapping[str, Sequence[Mapping[str, object]]] = {
    "as they are": [],
    "SpecAugment": [MASKS],
    "noise": [NOISE],
    "noise, SpecAugment": [NOISE, MASKS],
}
SNR_DB = (20, 10, 0)


def main() -> None:
    """Train, measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="the Free Spoken Digit Dataset")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raydfl-noise-") as name:
        folder = Path(name)
        tests = write_tests(given.root, folder / "tests")
        found: dict[str, list[dict[str, float]]] = {training: [] for training in TRAININGS}
        for seed in range(1, given.seeds + 1):
            for number, (training, transforms) in enumerate(TRAININGS.items()):
                run_dir = train(given.root, folder / f"{seed}-{number}", transforms, seed, given.rounds)
                found[training].append({test: accuracy(run_dir, files) for test, files in tests.items()})
                print(f"seed {seed}, {training}: {found[training][-1]}", flush=True)
    print(f"| training | {' | '.join(tests)} |")
    print(f"|---|{'---|' * len(tests)}")
    for training, seeds in found.items():
        cells = [cell([each[test] for each in seeds]) for test in tests]
        print(f"| {training} | {' | '.join(cells)} |")


def train(root: Path, folder: Path, transforms: Sequence[Mapping[str, object]], seed: int, rounds: int) -> Path:
    """Train one federation; return its run folder."""
    config = make_config(
        {
            "method": "fedavg",
            "models": {"model": "crnn_lite"},
            "data": {
                "name": "fsdd",
                "root": str(root),
                "features": {"sample_rate": 8000, "bands": 64, "window_ms": 25, "hop_ms": 10, "seconds": 1.0},
                "transforms": list(transforms),
                "partition": {"by": "group"},
            },
            "train": {"rounds": rounds, "cohort": 1.0, "batch_size": 16, "optimiser": {"name": "adam", "lr": 0.003}},
            "evaluate": {"every": rounds},
            "ray": {"actors": 0},
            "run": {"dir": str(folder), "name": "run", "seed": seed, "keep": 1},
            "track": {"mlflow": False},
        }
    )
    run(config)
    return folder / "run"


def write_tests(root: Path, folder: Path) -> dict[str, list[Path]]:
    """Write the test recordings with noise; return the files of each condition by its name."""
    clean = [file for file in sorted((root / "recordings").glob("*.wav")) if int(file.stem.rpartition("_")[2]) < 5]
    found = {"clean": clean}
    for colour in ("white", "pink"):
        for snr_db in SNR_DB:
            place = folder / f"{colour}-{snr_db}"
            place.mkdir(parents=True)
            for number, file in enumerate(clean):
                samples, rate = soundfile.read(file, dtype="float64")
                noise = noise_of(colour, len(samples), np.random.default_rng([number, snr_db]))
                noise *= np.sqrt(np.mean(samples**2) / np.mean(noise**2) * 10 ** (-snr_db / 10))
                soundfile.write(place / file.name, samples + noise, rate, subtype="FLOAT")
            found[f"{colour} {snr_db} dB"] = sorted(place.glob("*.wav"))
    return found


def noise_of(colour: str, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Draw noise, float64 [samples]: white, or pink, whose power falls by 3 dB an octave."""
    white = rng.standard_normal(samples)
    if colour == "white":
        return white
    spectrum = np.fft.rfft(white)
    spectrum[1:] /= np.sqrt(np.arange(1, len(spectrum)))
    spectrum[0] = 0.0
    return np.fft.irfft(spectrum, samples)


def accuracy(run_dir: Path, files: Sequence[Path]) -> float:
    """Return the fraction of recordings with the correct digit, the first character of the file name."""
    return float(np.mean([prediction.label == prediction.file.name[0] for prediction in classify(run_dir, files)]))


def cell(values: Sequence[float]) -> str:
    """Return mean and range in percent."""
    low, high = 100 * min(values), 100 * max(values)
    return f"{100 * statistics.mean(values):.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
