"""A small grid on the tiny federation, and runs whose records are written by the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl
from synthetic import Grid

from raydfl.core.yaml import to_yaml
from raydfl.engine.config import Config


@pytest.fixture
def grid(tmp_path: Path, tiny: Callable[..., Config]) -> Grid:
    """Two conditions x three methods x two seeds of the tiny federation; other keys of the file as keywords."""
    base = tiny("run.name=null").model_dump(mode="json")
    (tmp_path / "base.yaml").write_text(to_yaml(base, flow=False))

    def write(name: str = "grid", **changes: Any) -> Path:
        values: dict[str, Any] = {
            "title": "A grid",
            "base": "base.yaml",
            "axes": {
                "condition": {"clean": {}, "wrong": {"data.corrupt.labels": {"rate": 0.5}}},
                "method": {
                    "FedAvg": {"method": "fedavg"},
                    "FedProx": {"method": {"name": "fedprox", "mu": 0.5}},
                    "fast": {"train.optimiser.lr": 0.3},
                },
            },
            "repeat": {"run.seed": [1, 2]},
            "dir": str(tmp_path / "runs"),
        }
        values |= changes
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_yaml({key: value for key, value in values.items() if value is not None}, flow=False))
        return path

    return write


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    """The command line."""
    return Raydfl(capfd)
