"""Search files on the tiny federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl
from space_files import SearchFile

from raydfl.core.yaml import to_yaml
from raydfl.engine.config import Config


@pytest.fixture
def search_file(tmp_path: Path, tiny: Callable[..., Config]) -> SearchFile:
    """Two settings of FedProx on the tiny federation; other keys of the file as keywords, ``None`` leaves one out."""
    base = tiny("run.name=null", method="fedprox").model_dump(mode="json")
    (tmp_path / "base.yaml").write_text(to_yaml(base, flow=False))

    def write(name: str = "few", **changes: Any) -> Path:
        values: dict[str, Any] = {
            "title": "A search",
            "base": "base.yaml",
            "space": {
                "method.mu": {"loguniform": [0.001, 1.0]},
                "train.optimiser.lr": {"uniform": [0.05, 0.3]},
            },
            "metric": {"score": "loss"},
            "samples": 4,
            "rounds": 4,
            "parallel": 1,
            "dir": str(tmp_path / "search"),
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
