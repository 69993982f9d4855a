from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Raydfl

from raydfl.data.settings import DataSettings

TINY = Path(__file__).parent / "tiny_sets.py"
FEATURES: dict[str, Any] = {"sample_rate": 8000, "bands": 16}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a feature cache shared by all tests that do not test the cache itself."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_data(cache: Path) -> Callable[..., DataSettings]:
    """Return a factory of settings on the synthetic tones: 6 groups x 4 labels x 5 takes (0: test, 1: validation)."""

    def make(**options: Any) -> DataSettings:
        return DataSettings(**{"name": f"{TINY}:Made", "cache": cache, "features": FEATURES, **options})

    return make


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    """Return a caller of the command line."""
    return Raydfl(capfd)
