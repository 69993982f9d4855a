"""A data set in the style of a user: tones with noise, whose pitch is the label."""

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
class Tones(Dataset):
    first: int = 0
    speakers: int = 6
    classes: int = 3
    takes: int = 3
    test_takes: int = 2
    seconds: float = 0.25

    def manifest(self) -> pa.Table:
        rows = [
            {
                "clip": f"s{speaker}/c{label}/t{take}",
                "path": None,
                "label": f"tone{label}",
                "group": f"s{speaker}",
                "split": "test" if take < self.test_takes else "train",
            }
            for speaker in range(self.first, self.first + self.speakers)
            for label in range(self.classes)
            # Speakers differ in size, so that weights and last batches do.
            for take in range(self.test_takes + self.takes + speaker % 3)
        ]
        return make_manifest(rows, "Tones")

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        rng = generator(0, 0, row["clip"], "tone")
        pitch = 300.0 * 2 ** int(row["label"][4:]) * (1 + 0.02 * rng.standard_normal())
        time = np.arange(int(self.seconds * RATE)) / RATE
        wave = 0.3 * np.sin(2 * np.pi * pitch * time) + 0.05 * rng.standard_normal(len(time))
        return wave.astype(np.float32)[:, None], RATE

    def identity(self, row: Mapping[str, Any]) -> str | None:
        return f"tones/{row['clip']}/{self.seconds}"
