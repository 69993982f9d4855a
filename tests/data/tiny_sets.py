"""Small data sets, which test configurations name as ``tiny_sets.py:Folder`` and ``tiny_sets.py:Made``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import soundfile
from pydantic.dataclasses import dataclass

from raydfl.data import Assignment
from raydfl.data.dataset import Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.steps.listing import make_assignment

RATE = 8000


@dataclass(frozen=True, kw_only=True)
class Folder(Dataset):
    """Files ``{label}_{group}_{take}.wav`` in a folder. Take 0 is the official test set."""

    root: Path

    def manifest(self) -> pa.Table:
        rows = []
        for path in sorted(self.root.glob("*.wav")):
            label, group, take = path.stem.split("_")
            split = "test" if take == "0" else "train"
            rows.append(
                {"clip": path.name, "path": str(path.absolute()), "label": label, "group": group, "split": split}
            )
        return make_manifest(rows, f"tiny folder {self.root}")


@dataclass(frozen=True, kw_only=True)
class Made(Dataset):
    """Synthetic tones without files: the label sets the pitch, the group sets the loudness and the noise."""

    groups: int = 6
    labels: int = 4
    takes: int = 5
    seconds: float = 0.2
    uneven: bool = False
    """Later takes are longer."""

    def manifest(self) -> pa.Table:
        rows = [
            {
                "clip": f"w{label}/g{group}/{take}",
                "path": None,
                "label": f"w{label}",
                "group": f"g{group}",
                "split": "validation" if take == 1 else "test" if take == 0 else "train",
                "seconds": self._compute_seconds(take),
                "take": take,
                "recording": f"r{group}-{label}",
            }
            for group in range(self.groups)
            for label in range(self.labels)
            for take in range(self.takes)
        ]
        return make_manifest(rows, "made-up tones")

    def _compute_seconds(self, take: int) -> float:
        return self.seconds * (1 + 0.5 * take) if self.uneven else self.seconds

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        label, group = int(row["label"][1:]), int(row["group"][1:])
        rng = np.random.default_rng([label, group, row["take"]])
        time = np.arange(round(RATE * self._compute_seconds(row["take"]))) / RATE
        wave = (group + 1) * 0.05 * np.sin(2 * np.pi * 300 * (label + 1) * time) + 0.01 * rng.standard_normal(len(time))
        return wave.astype(np.float32)[:, None], RATE

    def identity(self, row: Mapping[str, Any]) -> str:
        return f"tone {row['clip']} {self._compute_seconds(row['take'])}"


def list_synthetic(clips: int, labels: int = 2, **columns: list[Any]) -> Assignment:
    """List synthetic clips ``c0``, ``c1`` ... with the classes ``0``, ``1`` ... in turn, and further columns."""
    numbers = range(clips)
    names = {"clip": [f"c{i}" for i in numbers], "path": [None] * clips, "label": [str(i % labels) for i in numbers]}
    return make_assignment(make_manifest({**names, **columns}, "made up"), [str(label) for label in range(labels)])


def write_folder(root: Path, labels: int = 3, groups: int = 2, takes: int = 3, seconds: float = 0.2) -> Path:
    """Write the files of a :class:`Folder`, with clip lengths that depend on group and take."""
    root.mkdir(parents=True)
    for label in range(labels):
        for group in range(groups):
            for take in range(takes):
                rng = np.random.default_rng([label, group, take])
                samples = round(RATE * seconds * (1 + 0.3 * group + 0.1 * take))
                wave = 0.1 * rng.standard_normal(samples) + 0.2 * np.sin(np.arange(samples) * (label + 1) * 0.2)
                soundfile.write(root / f"w{label}_g{group}_{take}.wav", wave, RATE, subtype="PCM_16")
    return root
