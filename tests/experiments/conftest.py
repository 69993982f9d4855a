"""Study files of the tiny federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl
from studies import StudyFile

from raydfl.core.yaml import to_yaml
from raydfl.engine.config import Config


def _make_writer(folder: Path, base: Config, name: str, values: dict[str, Any]) -> StudyFile:
    (folder / f"base_of_{name}.yaml").write_text(to_yaml(base.model_dump(mode="json"), flow=False))

    def write(name: str = name, **changes: Any) -> Path:
        path = folder / f"{name}.yaml"
        content = {key: value for key, value in (values | changes).items() if value is not None}
        path.write_text(to_yaml(content, flow=False))
        return path

    return write


@pytest.fixture
def grid(tmp_path: Path, tiny: Callable[..., Config]) -> StudyFile:
    """Return a writer for a grid: two conditions, three methods, two seeds. Keywords replace keys, ``None`` removes them."""
    methods = {
        "FedAvg": {"method": "fedavg"},
        "FedProx": {"method": {"name": "fedprox", "mu": 0.5}},
        "fast": {"train.optimiser.lr": 0.3},
    }
    values = {
        "title": "A grid",
        "base": "base_of_grid.yaml",
        "axes": {"condition": {"clean": {}, "wrong": {"data.corrupt.labels": {"rate": 0.5}}}, "method": methods},
        "repeat": {"run.seed": [1, 2]},
        "dir": str(tmp_path / "runs"),
    }
    return _make_writer(tmp_path, tiny("run.name=null"), "grid", values)


@pytest.fixture
def search_file(tmp_path: Path, tiny: Callable[..., Config]) -> StudyFile:
    """Return a writer for a search over two settings of FedProx. Keywords replace keys, ``None`` removes them."""
    values = {
        "title": "A search",
        "base": "base_of_few.yaml",
        "domains": {"method.mu": {"loguniform": [0.001, 1.0]}, "train.optimiser.lr": {"uniform": [0.05, 0.3]}},
        "metric": {"score": "loss"},
        "samples": 4,
        "rounds": 4,
        "parallel": 1,
        "dir": str(tmp_path / "search"),
    }
    return _make_writer(tmp_path, tiny("run.name=null", method="fedprox"), "few", values)


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    """Return a caller of the command line."""
    return Raydfl(capfd)
