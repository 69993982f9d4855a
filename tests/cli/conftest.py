"""The command line with its output captured."""

from __future__ import annotations

import pytest
from commands import Raydfl


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a tiny run's time would be the drawing of its report's pictures."""
    monkeypatch.setattr("raydfl.runs.report.figures.to_svg", lambda *_: "")
