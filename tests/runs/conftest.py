"""Fixture: the command line with captured output."""

from __future__ import annotations

import pytest
from commands import Raydfl


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)
