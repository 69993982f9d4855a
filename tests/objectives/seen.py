"""Synthetic data set with every kind of view: tones, a second microphone, and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Dataset
from raydfl.data.manifest import make_manifest

RATE = 8000


@dataclass(frozen=True, kw_only=True)
class Seen(Dataset):
    """Three classes with different pitch and brightness, four clients, and six clips of each class."""

    def manifest(self) -> pa.Table:
        rows = [
            {
                "clip": f"g{group}/{label}/{take}",
                "path": None,
                "label": "abc"[label],
                "group": f"g{group}",
                "split": "test" if take == 0 else "train",
                "second": "second",
            }
            for group in range(4)
            for label in range(3)
            for take in range(6)
        ]
        return make_manifest(rows, "Seen")

    def file_of(self, row: Mapping[str, Any], column: str) -> str | None:
        return str(row[column])

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        """Synthesise the microphone in the row's path. The second microphone records for longer."""
        _, label, take = row["clip"].split("/")
        seconds = 0.3 if row["path"] == "second" else 0.25
        time = np.arange(int(seconds * RATE)) / RATE
        noise = np.random.default_rng(int(take)).standard_normal(len(time))
        return (0.3 * np.sin(2 * np.pi * 400 * (1 + int(label)) * time) + 0.05 * noise).astype(np.float32)[
            :, None
        ], RATE

    def image(self, row: Mapping[str, Any]) -> np.ndarray:
        _, label, take = row["clip"].split("/")
        return np.random.default_rng(int(take)).integers(60 * int(label), 60 * int(label) + 90, (8, 8)).astype(np.uint8)

    def identity(self, row: Mapping[str, Any]) -> str:
        return f"seen/{row['clip']}/{row['path']}"
