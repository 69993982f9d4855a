"""What laws that need Ray share."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def free_cpus(ray_session: None) -> Iterator[None]:
    """The next test begins when this one's actors are gone."""
    import ray  # it takes a second, which other laws need not wait for

    yield
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
