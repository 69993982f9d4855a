"""A data set with given features, for tests with scores by hand and by scikit-learn."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Dataset
from raydfl.data.manifest import make_manifest
from raydfl.engine.config import Config, make_config

Row = tuple[str, str, str, Any]
"""Label, owner, split and features (frames, bands) of a clip."""


@dataclass(frozen=True, kw_only=True)
class Given(Dataset):
    """Clips of a table in CSV. A file has their features."""

    table: Path

    def manifest(self) -> pa.Table:
        with self.table.open() as file:
            return make_manifest([{**row, "path": None} for row in csv.DictReader(file)], "Given")

    def identity(self, row: Mapping[str, Any]) -> str | None:
        return str(row["clip"])


def configure(folder: Path, rows: Sequence[Row], **settings: Any) -> Config:
    """Write a data set to a folder, and return the configuration of a run in the folder."""
    features = {f"c{number}": np.array(row[3], np.float32) for number, row in enumerate(rows)}
    np.savez(folder / "features.npz", **features)  # type: ignore[arg-type]
    with (folder / "table.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["clip", "label", "group", "split", "id"])
        writer.writerows((f"c{number}", *row[:3], row[1]) for number, row in enumerate(rows))
    data = {
        "name": f"{__file__}:Given",
        "table": str(folder / "table.csv"),
        "features": {"kind": "file", "path": str(folder / "features.npz")},
        **settings.pop("data", {}),
    }
    return configure_data(folder, data, **settings)


def configure_data(folder: Path, data: Mapping[str, Any], **settings: Any) -> Config:
    """Return the configuration of a run on any data set in a folder."""
    values = {
        "method": {"name": "fedavg"},
        "models": {"model": {"name": "linear"}},
        "data": {"partition": {"by": "group"}, "cache": str(folder / "cache"), **data},
        "train": {"rounds": 1, "optimiser": {"lr": 0.1}},
        "ray": {"actors": 0},
        "track": {"mlflow": False},
        "run": {"seed": 1, "name": "given", "dir": str(folder / "runs")},
        **settings,
    }
    return make_config(values)
