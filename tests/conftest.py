"""Fixtures of all tests: a tiny federation that trains in a second, and one Ray cluster."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Ray reads these when it is imported: its token must be there before, and never in the user's home.
_secrets = tempfile.mkdtemp(prefix="raydfl-tests-")
atexit.register(shutil.rmtree, _secrets, ignore_errors=True)
_token = Path(_secrets) / "token"
_token.write_text("for-tests-only-0123456789")
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DEDUP_LOGS="0",
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN_PATH=str(_token),
    RAY_worker_niceness="0",  # by default 15: beside busy tests, the workers of small clusters would starve
)
os.environ["XDG_CONFIG_HOME"] = f"{_secrets}/config"  # the list of code that the user has run
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and what is printed would be wrapped

gc.disable()  # while modules are imported and tests collected, none of which is rubbish: a sixth of that time

import hypothesis
import pytest
from tiny_federation import tiny_values

if TYPE_CHECKING:  # the process that only hands out the tests needs no PyTorch
    from raydfl.engine.config import Config

# A busy machine is no failure, and a test fails for everybody or for nobody.
hypothesis.settings.register_profile("all", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fast", parent=hypothesis.settings.get_profile("all"), max_examples=30)


def pytest_configure(config: pytest.Config) -> None:
    """Use fewer Hypothesis examples in the fast suite."""
    hypothesis.settings.load_profile("fast" if config.option.markexpr == "not slow" else "all")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with Ray as slow."""
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Freeze existing objects, so that garbage collection checks only objects of tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def drawing() -> Iterator[Callable[..., str]]:
    """Disable plots, except in tests with the fixture ``pictures``. Plots take most of a tiny run's time."""
    from raydfl.runs.report import page

    draw = page.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "draw", lambda *_: "")
        yield draw


@pytest.fixture(scope="session", autouse=True)
def no_power_cuts() -> Iterator[None]:
    """Disable fsync. Other processes see complete files without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def pictures(drawing: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the plots of this test's reports."""
    monkeypatch.setattr("raydfl.runs.report.page.draw", drawing)


@pytest.fixture(scope="session")
def feature_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(tmp_path: Path, feature_cache: Path) -> Callable[..., Config]:
    """``tiny("key=value", ...)`` configures the tiny federation, with runs in the test's folder."""
    from raydfl.engine.config import make_config
    from raydfl.engine.overrides import apply_overrides

    def configure(*overrides: str, method: str = "fedavg") -> Config:
        values = tiny_values(method)
        values["data"]["cache"] = str(feature_cache)
        values["run"]["dir"] = str(tmp_path / "runs")
        return make_config(apply_overrides(values, overrides))

    return configure


@pytest.fixture
def ray_session() -> None:
    """Connect to a local Ray with 4 logical CPUs and a logical GPU, common to all tests. It never joins a running cluster."""
    import ray

    if not ray.is_initialized():
        ray.init(
            "local",
            num_cpus=4,
            num_gpus=1,
            include_dashboard=False,
            object_store_memory=150 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            namespace="tests",
        )


@pytest.fixture
def no_ray_session() -> None:
    """End the common Ray. A run in this process would use it, instead of the cluster in its configuration."""
    import ray

    ray.shutdown()
