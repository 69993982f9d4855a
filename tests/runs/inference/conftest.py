"""The runs that the tests here share."""

from __future__ import annotations

import pytest
from commands import Raydfl
from used_runs import Finished, finished


@pytest.fixture(scope="session")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """FedMLAC on clips of one length: a shared plug-in, private models of two architectures."""
    return finished(tmp_path_factory.mktemp("mutual"))


@pytest.fixture(scope="session")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """FedMLAC on clips of several lengths, some of them cut into segments."""
    segment = {"frames": 30, "stride": 10, "test_stride": 7}
    return finished(tmp_path_factory.mktemp("segmented"), uneven=True, features={}, data={"segment": segment})


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    """The command line."""
    return Raydfl(capfd)
