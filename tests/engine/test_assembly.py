"""Components of a configuration: each is built once, and another process can rebuild it."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.ops import kernels
from raydfl.engine.config import Config
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.worker import Worker
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedprox import FedProx
from raydfl.models import _build
from raydfl.models.crnn import CRNN
from raydfl.rules import UniformMean, WeightedMean
from raydfl.runs._run import resume, run
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

Tiny = Callable[..., Config]
EVERYTHING = ["method.rule=uniform_mean", "attack=sign_flip"]
METHOD = """
from raydfl.methods.fedavg import FedAvg

class Mine(FedAvg):
    pass
"""


@pytest.fixture
def build_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the methods, rules, attacks and networks that are built."""
    counts: Counter[str] = Counter()
    build, network = registry.build, CRNN.__init__

    def count_build(cls: type, options: dict[str, object], where: str) -> object:
        counts[where] += 1
        return build(cls, options, where)

    @functools.wraps(network)
    def count_network(self: CRNN, *arguments: object, **options: object) -> None:
        counts["network"] += 1
        network(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(registry, "build", count_build)
    monkeypatch.setattr(CRNN, "__init__", count_network)
    monkeypatch.setattr(_build, "_TRIED", set())
    return counts


def test_a_new_run_builds_each_component_once(tiny: Tiny, build_counts: Counter[str]) -> None:
    """The four networks are for the options check, the trial pass, the server and the clients."""
    config = tiny(*EVERYTHING, "run.name=counted")
    assert build_counts == {"method": 1, "objective": 1, "method.rule": 1, "attack": 1, "network": 1}
    outcome = run(config, on_round=lambda report: report.round == 2)
    assert outcome.round == 2
    assert build_counts == {"method": 1, "objective": 1, "method.rule": 1, "attack": 1, "network": 4}


@pytest.mark.slow
def test_a_resumed_run_builds_each_component_once(tiny: Tiny, build_counts: Counter[str]) -> None:
    """The three networks are for the server, the clients, and the exported tensors that are never sent."""
    run_dir = run(tiny(*EVERYTHING), on_round=lambda report: True).run_dir
    build_counts.clear()
    assert resume(run_dir).finished
    assert build_counts == {"method": 1, "objective": 1, "method.rule": 1, "attack": 1, "network": 3}


def test_a_pickled_configuration_builds_components_on_demand(tiny: Tiny, build_counts: Counter[str]) -> None:
    """Unpickling neither validates nor builds a component."""
    config = tiny(*EVERYTHING)
    sent = pickle.dumps(config)
    build_counts.clear()
    arrived = pickle.loads(sent)
    assert arrived == config
    assert not build_counts
    assert arrived.digest() == config.digest()
    assert arrived.components == config.components
    assert build_counts == {"method": 1, "objective": 1, "method.rule": 1, "attack": 1}


@pytest.mark.slow
def test_another_process_loads_user_files_itself(tiny: Tiny, tmp_path: Path) -> None:
    """The pickle refers to no user module, because another process may not find it."""
    file = tmp_path / "mine.py"
    file.write_text(METHOD)
    (tmp_path / "sent").write_bytes(pickle.dumps(tiny(f"method.name={file}:Mine")))
    program = (
        "import pathlib, pickle, sys; config = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print(type(config.components.method).__name__)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "sent")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "Mine\n"


@pytest.mark.parametrize("equal", [False, True])
def test_a_worker_warns_about_kernels_that_differ_from_the_drivers(
    tiny: Tiny, tmp_path: Path, equal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels and PyTorch round differently, so law 1 would not hold between mixed workers."""
    config = tiny("train.rounds=1")
    with monkeypatch.context() as driver:
        driver_kernels = kernels() if equal else {**kernels(), "operators": "another"}
        driver.setattr("raydfl.engine.software.kernels", lambda: driver_kernels)
        sent = pickle.loads(pickle.dumps(config))
    run_dir = create(sent, Progress("quiet"))
    Worker(run_dir, sent, PrivateStore(run_dir / "private"), "cpu")
    warnings = [record.getMessage() for record in caplog.records if "last digits" in record.getMessage()]
    assert bool(warnings) == (not equal)


@pytest.mark.parametrize("setting", ["method.name={}:Mine", "models.model={}:Net"])
def test_an_unloadable_user_class_is_reported_before_training(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{METHOD}\nfrom raydfl.models.crnn import CRNN\n\nclass Net(CRNN):\n    pass\n")
    config = pickle.loads(pickle.dumps(tiny(setting.format(file))))
    file.unlink()
    monkeypatch.setattr(registry, "load_file", registry.load_file.__wrapped__)
    with pytest.raises(ConfigError, match=f"'{file}:(Mine|Net)': there is no file {file}"):
        _ = config.components


def test_a_copied_configuration_reuses_unchanged_components(tiny: Tiny, build_counts: Counter[str]) -> None:
    config = tiny()
    build_counts.clear()
    assert config.model_copy(update={"run": config.run}).components is config.components
    assert not build_counts
    other = config.model_copy(update={"method": {"name": "fedprox", "mu": 0.5}})
    assert isinstance(other.components.method, FedProx)
    assert config.components.method == FedAvg()


def test_a_method_caches_its_rule(build_counts: Counter[str]) -> None:
    """Equality, hash and repr ignore the cached rule."""
    default, configured = FedAvg(), FedAvg(rule="uniform_mean")
    assert isinstance(default.built_rule, WeightedMean)
    assert isinstance(configured.built_rule, UniformMean)
    assert configured.built_rule is configured.built_rule
    assert build_counts == {"method.rule": 1}
    assert default == FedAvg() != configured
    assert hash(default) == hash(FedAvg())
    assert repr(default) == repr(FedAvg())
