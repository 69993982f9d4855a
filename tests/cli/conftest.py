"""The command line with its output captured."""

from __future__ import annotations

import pytest
from commands import Raydfl


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)
