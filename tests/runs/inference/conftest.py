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


@pytest.fixture(scope="session")
def averaging_logits(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Test clips in segments, of whose logits the mean is taken."""
    crop = {"name": "random_crop", "size": 15, "test": "segments"}
    return finished(
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
    """The command line."""
    return Raydfl(capfd)
