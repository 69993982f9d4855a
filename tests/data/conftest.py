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
    """A cache that all tests share which do not test the cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def made(cache: Path) -> Callable[..., DataSettings]:
    """Settings on the made-up tones: 6 groups x 4 labels x 5 takes, take 0 the test set and take 1 the validation set."""

    def make(**options: Any) -> DataSettings:
        return DataSettings(**{"name": f"{TINY}:Made", "cache": cache, "features": FEATURES, **options})

    return make


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    """The command line."""
    return Raydfl(capfd)
