"""Detect the anomalies of generated machines without a network: the table of docs/objectives.md#machine-anomaly-detection.

Each machine has a detector of its own, fitted to normal training clips. The rows of a detector are statistics of a clip's
log-mel frames. An area under the ROC curve (AUC) with 100 normal and 100 anomalous clips has a standard error of up to 0.04.

    python benchmarks/trivial_detectors.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from result_tables import print_head, print_row
from sklearn.covariance import LedoitWolf
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler

from raydfl.core.registry import build
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.sets.machines import Machines

Rows = NDArray[np.float64]

FEATURES = FeatureSettings(window_ms=64, hop_ms=32, bands=32, normalise="none")
CORPORA: Mapping[str, Mapping[str, Any]] = {
    "added, -5 dB": {"strength_db": -5.0},
    "added, -5 dB, `level: clip`": {"strength_db": -5.0, "level": "clip"},
    "`disorder`, 0 dB, `level: clip`": {"anomalies": ["disorder"], "strength_db": 0.0, "level": "clip"},
    "`disorder`, -10 dB, `level: clip`": {"anomalies": ["disorder"], "strength_db": -10.0, "level": "clip"},
    "`hunting`, 0 dB, `level: clip`": {"anomalies": ["hunting"], "strength_db": 0.0, "level": "clip"},
    "`hunting`, -10 dB, `level: clip`": {"anomalies": ["hunting"], "strength_db": -10.0, "level": "clip"},
}


def compute_loudness(frames: Rows) -> Rows:
    """Return the mean power of a clip in dB, float64 [1], from frames in dB, float64 [frames, bands]."""
    return 10 * np.log10(np.mean(10 ** (frames / 10), keepdims=True)[0])


def compute_mean(frames: Rows) -> Rows:
    """Return the mean frame, float64 [bands]."""
    return np.asarray(frames.mean(axis=0))


def compute_modulation(frames: Rows) -> Rows:
    """Return the logarithm of the modulation spectrum, averaged over the bands, float64 [frames // 2]."""
    window = np.hanning(len(frames))[:, None]
    spectrum = np.abs(np.fft.rfft((frames - frames.mean(axis=0)) * window, axis=0))
    return np.asarray(np.log(spectrum[1:].mean(axis=1) + 1e-3))


def measure_mahalanobis(reference: Rows, rows: Rows) -> Rows:
    """Return the squared Mahalanobis distances of rows from the mean of the reference, float64 [rows]."""
    return np.asarray(LedoitWolf().fit(reference).mahalanobis(rows))


def measure_nearest(reference: Rows, rows: Rows) -> Rows:
    """Return the distances of rows from the nearest row of the reference, in standard deviations, float64 [rows]."""
    scale = StandardScaler().fit(reference)
    neighbours = NearestNeighbors(n_neighbors=1).fit(scale.transform(reference))
    return np.asarray(neighbours.kneighbors(scale.transform(rows))[0][:, 0])


DETECTORS: Mapping[str, tuple[Callable[[Rows], Rows], Callable[[Rows, Rows], Rows]]] = {
    "loudness": (compute_loudness, lambda reference, rows: rows[:, 0]),
    "mean frame, Mahalanobis": (compute_mean, measure_mahalanobis),
    "mean frame, nearest neighbour": (compute_mean, measure_nearest),
    "modulation spectrum, Mahalanobis": (compute_modulation, measure_mahalanobis),
}
"""Statistic of a clip, and score of rows of statistics, by name."""


def measure_aucs(corpus: Machines) -> dict[str, list[float]]:
    """Return the AUC of each detector for each machine of a corpus."""
    extract = FeatureExtractor(FEATURES)
    machines: dict[str, list[dict[str, Any]]] = {}
    for row in corpus.manifest().to_pylist():
        machines.setdefault(row["group"], []).append(row)
    aucs: dict[str, list[float]] = {name: [] for name in DETECTORS}
    for rows in machines.values():
        clips = [np.asarray(extract(*corpus.read(row)), np.float64) for row in rows]
        train = np.array([row["split"] == "train" for row in rows])
        anomalous = np.array([row["condition"] == "anomaly" for row in rows])
        for name, (summarise, score) in DETECTORS.items():
            values = np.array([summarise(frames) for frames in clips])
            scores = score(values[train], values[~train])
            aucs[name].append(float(roc_auc_score(anomalous[~train], scores)))
    return aucs


def main() -> None:
    """Print the mean, smallest and largest AUC over the machines for each corpus and detector."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--ids", type=int, default=2, help="machines of each kind")
    parser.add_argument("--clips", type=int, default=100, help="training clips, and test clips of each condition")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print_head([*DETECTORS])
    for name, options in CORPORA.items():
        values = {
            "kinds": ["fan", "pump", "gearbox"],
            "ids": chosen.ids,
            "clips": chosen.clips,
            "test_clips": chosen.clips,
            "seed": chosen.seed,
        }
        aucs = measure_aucs(build(Machines, {**values, **options}, "data"))
        print_row(name, [f"{np.mean(each):.3f} ({min(each):.2f} to {max(each):.2f})" for each in aucs.values()])


if __name__ == "__main__":
    main()
