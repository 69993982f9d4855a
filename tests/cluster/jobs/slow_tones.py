"""A data set with slow clips and a log of the reading processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Dataset
from raydfl.data.manifest import make_manifest


@dataclass(frozen=True, kw_only=True)
class SlowTones(Dataset):
    log: Path
    speakers: int = 6
    takes: int = 32

    def manifest(self) -> pa.Table:
        rows = [
            {
                "clip": f"s{s}-t{t}",
                "path": None,
                "label": f"tone{t % 2}",
                "group": f"s{s}",
                "split": "test" if t < 2 else "train",
            }
            for s in range(self.speakers)
            for t in range(self.takes)
        ]
        return make_manifest(rows, "SlowTones")

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        with self.log.open("a") as file:
            file.write(f"{row['clip']} {os.getpid()}\n")
        time.sleep(0.02)
        pitch = 300.0 if row["label"] == "tone0" else 600.0
        return np.sin(2 * np.pi * pitch * np.arange(2000) / 8000).astype(np.float32)[:, None], 8000

    def identity(self, row: Mapping[str, Any]) -> str | None:
        return f"slow/{row['clip']}"
