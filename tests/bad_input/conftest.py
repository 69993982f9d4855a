"""The command line with its output captured, and what undisturbed runs end with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from commands import Raydfl
from helpers import finish

from raydfl.engine.config import Config

_KNOWN: dict[tuple[int, str], dict[str, bytes]] = {}


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)


@pytest.fixture
def undisturbed(tiny: Callable[..., Config]) -> Callable[..., dict[str, bytes]]:
    """``undisturbed(rounds)``: the exact bytes of all that a run of the tiny federation knows after so many rounds."""

    def bytes_after(rounds: int, method: str = "fedmlac") -> dict[str, bytes]:
        if (rounds, method) not in _KNOWN:
            _KNOWN[rounds, method] = finish(tiny(f"train.rounds={rounds}", "run.name=undisturbed", method=method))
        return _KNOWN[rounds, method]

    return bytes_after
