"""A data set in the style of a user: voices with tones of their own, and words as labels."""

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


@dataclass(frozen=True, kw_only=True)
class Voices(Dataset):
    """A chord for each speaker, with clips of different lengths. The last speakers are the test set."""

    speakers: int = 7
    tested: int = 3
    takes: int = 4

    def manifest(self) -> pa.Table:
        rows = [
            {
                "clip": f"v{speaker}/{take}.wav",
                "path": None,
                "label": f"word{take % 2}",
                "group": f"v{speaker}",
                "split": "train" if speaker < self.speakers - self.tested else "test",
                "client": f"c{speaker // 2}",
            }
            for speaker in range(self.speakers)
            for take in range(self.takes)
        ]
        return make_manifest(rows, "voices")

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        rng = generator(0, 0, row["clip"], "voices")
        seconds = float(rng.uniform(0.25, 0.45))
        time = np.arange(int(seconds * RATE)) / RATE
        pitch = 180 * 1.12 ** int(row["group"][1:]) * rng.uniform(0.93, 1.07)
        wave = sum(0.2 * np.sin(2 * np.pi * pitch * overtone * time) for overtone in (1, 2, 3))
        return (wave + 0.05 * rng.standard_normal(len(time))).astype(np.float32)[:, None], RATE

    def identity(self, row: Mapping[str, Any]) -> str | None:
        return f"voices/{row['clip']}"
