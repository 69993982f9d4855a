"""Fixture: two sites on this machine with separate folders and speakers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydfl.engine.config import Config

Tiny = Callable[..., Config]
FIRST = {"north": 0, "south": 10}
"""Number of the first speaker of each site."""


@pytest.fixture
def silos(tiny: Tiny, tmp_path: Path) -> Tiny:
    """Make a tiny configuration with sites of five and four speakers. One speaker has no clip of the last class."""

    def configure(
        *overrides: str, method: str = "fedmlac", folders: str = "nodes", **options: dict[str, Any]
    ) -> Config:
        sites: dict[str, Any] = {
            "north": {"first": FIRST["north"], "speakers": 5},
            "south": {"first": FIRST["south"], "speakers": 4, "classes": 2},
        }
        for name, site in sites.items():
            site["folder"] = str(tmp_path / folders / name)
            site.update(options.get(name, {}))
        return tiny(f"data.sites={json.dumps(sites)}", *overrides, method=method)

    return configure
