"""Fixtures: the command line with captured output, and references of undisturbed runs."""

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
def check_reference(tiny: Callable[..., Config]) -> Callable[..., dict[str, bytes]]:
    """Return the exact bytes of a tiny federation's state after a number of rounds."""

    return lambda rounds, method="fedmlac": known(tiny(f"train.rounds={rounds}", method=method))
