"""Fixtures for laws with Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def free_cpus(ray_session: None) -> Iterator[None]:
    """Wait until the actors of a test have ended before the next test starts."""
    import ray  # Importing Ray takes a second. The laws without Ray need not wait for it.

    yield
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
