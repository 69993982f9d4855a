"""The command line with its output captured, and what undisturbed runs end with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from commands import Raydfl
from helpers import known

from raydfl.engine.config import Config


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)


@pytest.fixture
def undisturbed(tiny: Callable[..., Config]) -> Callable[..., dict[str, bytes]]:
    """``undisturbed(rounds)``: the exact bytes of all that a run of the tiny federation knows after so many rounds."""

    return lambda rounds, method="fedmlac": known(tiny(f"train.rounds={rounds}", method=method))
