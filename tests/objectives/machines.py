"""User-defined data sets for tests of objectives: humming machines, and chords of tones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic.dataclasses import dataclass

from raydfl.core.seeds import generator
from raydfl.data.dataset import Dataset
from raydfl.data.manifest import make_manifest

RATE = 8000
PITCHES = {"low": 300.0, "middle": 900.0, "high": 2400.0, "top": 3300.0}


def synthesise_hum(clip: str, anomalous: bool, seconds: float = 0.25) -> np.ndarray:
    """Synthesise the hum of a machine. Anomalous machines also whine."""
    rng = generator(0, 0, clip, "hum")
    time = np.arange(int(seconds * RATE)) / RATE
    wave = 0.3 * np.sin(2 * np.pi * 220 * (1 + 0.02 * rng.standard_normal()) * time)
    if anomalous:
        wave += 0.2 * np.sin(2 * np.pi * 2600 * time)
    return (wave + 0.05 * rng.standard_normal(len(time))).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Machines(Dataset):
    """Machines with anomalous clips in the test only."""

    machines: int = 4
    takes: int = 6

    def manifest(self) -> pa.Table:
        rows = [
            {
                "clip": f"m{machine}/{label}/t{take}",
                "path": None,
                "label": label,
                "group": f"m{machine}",
                "split": "test" if label == "anomalous" or take < 4 else "train",
            }
            for machine in range(self.machines)
            for label, takes in (("normal", self.takes + 4), ("anomalous", 3))
            for take in range(takes)
        ]
        return make_manifest(rows, "Machines")

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        return synthesise_hum(row["clip"], row["label"] == "anomalous")[:, None], RATE

    def identity(self, row: Mapping[str, Any]) -> str | None:
        return f"machines/{row['clip']}"


@dataclass(frozen=True, kw_only=True)
class Chords(Dataset):
    """Chords, labelled with their tones (or none). With ``late`` the test has a chord without training clips."""

    players: int = 4
    late: bool = False
    chords: tuple[str, ...] = ("low", "high", "low|high", "middle|low", "|", "high|middle")

    def manifest(self) -> pa.Table:
        rows = [
            {
                "clip": f"p{player}/c{number}/t{take}",
                "path": None,
                "label": label,
                "group": f"p{player}",
                "split": "test" if take == 0 else "train",
            }
            for player in range(self.players)
            for number, label in enumerate((*self.chords, *(["middle|top"] if self.late else [])))
            for take in range(1 if label == "middle|top" else 4)
        ]
        return make_manifest(rows, "Chords")

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        rng = generator(0, 0, row["clip"], "chord")
        time = np.arange(RATE // 4) / RATE
        wave = 0.05 * rng.standard_normal(len(time))
        for tone in row["label"].split("|"):
            if tone:
                wave += 0.2 * np.sin(2 * np.pi * PITCHES[tone] * (1 + 0.02 * rng.standard_normal()) * time)
        return wave.astype(np.float32)[:, None], RATE

    def identity(self, row: Mapping[str, Any]) -> str | None:
        return f"chords/{row['clip']}"
