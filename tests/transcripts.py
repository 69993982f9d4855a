"""A data set in the style of a user: syllables of tones, whose transcripts are of different lengths."""

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
TEXTS = ("Ab, b!", "b a", "a", "b", "c'b", "abc", "-")


@dataclass(frozen=True, kw_only=True)
class Spoken(Dataset):
    """A tone for each letter, each 60 ms long. Take 0 of each text is the test set."""

    takes: int = 4
    groups: int = 2
    texts: tuple[str, ...] = TEXTS

    def manifest(self) -> pa.Table:
        rows = [
            {
                "clip": f"{number}/{take}",
                "path": None,
                "label": text,
                "group": f"g{take % self.groups}",
                "split": "test" if take == 0 else "train",
            }
            for number, text in enumerate(self.texts)
            for take in range(self.takes)
        ]
        return make_manifest(rows, "spoken")

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        rng = generator(0, 0, row["clip"], "spoken")
        time = np.arange(int(0.06 * RATE)) / RATE
        tones = [0.3 * np.sin(2 * np.pi * 200.0 * (1 + ord(letter) % 7) * time) for letter in row["label"]]
        wave = np.concatenate([np.zeros(800), *tones, np.zeros(800)])
        return (wave + 0.01 * rng.standard_normal(len(wave))).astype(np.float32)[:, None], RATE

    def identity(self, row: Mapping[str, Any]) -> str | None:
        return f"spoken/{row['clip']}/{row['label']}"
