"""Fixtures: finished runs shared by tests of inference."""

from __future__ import annotations

import pytest
from commands import Raydfl
from used_runs import Finished, execute_run


@pytest.fixture(scope="session")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Execute FedMLAC on clips of equal length, with a shared plug-in and private models of two architectures."""
    return execute_run(tmp_path_factory.mktemp("mutual"))


@pytest.fixture(scope="session")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Execute FedMLAC on clips of different lengths. Long clips are cut into segments."""
    segment = {"frames": 30, "stride": 10, "test_stride": 7}
    return execute_run(tmp_path_factory.mktemp("segmented"), uneven=True, features={}, data={"segment": segment})


@pytest.fixture(scope="session")
def averaging_logits(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Execute a run that averages the logits of test segments."""
    crop = {"name": "random_crop", "size": 15, "test": "segments"}
    return execute_run(
        tmp_path_factory.mktemp("logits"),
        uneven=True,
        features={},
        data={"transforms": [crop]},
        method={"name": "fedavg"},
        models={"model": {"name": "mlp", "hidden": 5}},
        objective={"name": "classify", "average": "logits"},
    )


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    """Capture the output of the command line."""

    return Raydfl(capfd)
