"""What a configuration describes is built once: counted, and looked at in another process."""

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
OWN = """
from raydfl.methods.fedavg import FedAvg

class Mine(FedAvg):
    pass
"""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often methods, rules, attacks and networks were built, by kind."""
    counts: Counter[str] = Counter()
    build, network = registry.build, CRNN.__init__

    def counted_build(cls: type, options: dict[str, object], where: str) -> object:
        counts[where] += 1
        return build(cls, options, where)

    @functools.wraps(network)
    def counted_network(self: CRNN, *arguments: object, **options: object) -> None:
        counts["network"] += 1
        network(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(registry, "build", counted_build)
    monkeypatch.setattr(CRNN, "__init__", counted_network)
    monkeypatch.setattr(_build, "_TRIED", set())
    return counts


def test_from_the_configuration_to_round_2_everything_is_built_once(tiny: Tiny, built: Counter[str]) -> None:
    """Of networks four: to check the options, to try and describe them, for the server and for the clients."""
    config = tiny(*EVERYTHING, "run.name=counted")
    assert built == {"method": 1, "objective": 1, "method.rule": 1, "attack": 1, "network": 1}
    outcome = run(config, on_round=lambda report: report.round == 2)
    assert outcome.round == 2
    assert built == {"method": 1, "objective": 1, "method.rule": 1, "attack": 1, "network": 4}


def test_a_run_that_goes_on_is_checked_once(tiny: Tiny, built: Counter[str]) -> None:
    """Of networks three: for the server, for the clients, and for what the export holds of them that was never sent."""
    run_dir = run(tiny(*EVERYTHING), on_round=lambda report: True).run_dir
    built.clear()
    assert resume(run_dir).finished
    assert built == {"method": 1, "objective": 1, "method.rule": 1, "attack": 1, "network": 3}


def test_a_configuration_travels_as_a_description(tiny: Tiny, built: Counter[str]) -> None:
    """Nothing is checked when it arrives, and built what is asked for."""
    config = tiny(*EVERYTHING)
    sent = pickle.dumps(config)
    built.clear()
    arrived = pickle.loads(sent)
    assert arrived == config
    assert not built
    assert arrived.digest() == config.digest()
    assert arrived.components == config.components
    assert built == {"method": 1, "objective": 1, "method.rule": 1, "attack": 1}


def test_a_process_loads_users_files_by_itself(tiny: Tiny, tmp_path: Path) -> None:
    """Nothing that travels refers to a module of theirs, which another process may not have yet, or not find."""
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    (tmp_path / "sent").write_bytes(pickle.dumps(tiny(f"method.name={file}:Mine")))
    program = (
        "import pathlib, pickle, sys; config = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print(type(config.components.method).__name__)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "sent")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "Mine\n"


@pytest.mark.parametrize("equal", [False, True])
def test_a_worker_warns_if_its_kernels_are_not_those_of_the_driver(
    tiny: Tiny, tmp_path: Path, equal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They compute other last digits than PyTorch's, so law 1 would not hold between such workers."""
    config = tiny("train.rounds=1")
    with monkeypatch.context() as at_the_driver:
        there = kernels() if equal else {**kernels(), "operators": "another"}
        at_the_driver.setattr("raydfl.engine.config.kernels", lambda: there)
        sent = pickle.loads(pickle.dumps(config))
    run_dir = create(sent, Progress("quiet"))
    Worker(run_dir, sent, PrivateStore(run_dir / "private"), "cpu")
    said = [record.getMessage() for record in caplog.records if "last digits" in record.getMessage()]
    assert bool(said) == (not equal)


@pytest.mark.parametrize("own", ["method.name={}:Mine", "models.model={}:Net"])
def test_a_users_class_that_another_process_cannot_load_is_said_before_any_client_works(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{OWN}\nfrom raydfl.models.crnn import CRNN\n\nclass Net(CRNN):\n    pass\n")
    config = pickle.loads(pickle.dumps(tiny(own.format(file))))
    file.unlink()
    monkeypatch.setattr(registry, "load_file", registry.load_file.__wrapped__)
    with pytest.raises(ConfigError, match=f"'{file}:(Mine|Net)': there is no file {file}"):
        _ = config.components


def test_a_copy_has_the_parts_of_what_it_describes(tiny: Tiny, built: Counter[str]) -> None:
    config = tiny()
    built.clear()
    assert config.model_copy(update={"run": config.run}).components is config.components
    assert not built
    other = config.model_copy(update={"method": {"name": "fedprox", "mu": 0.5}})
    assert isinstance(other.components.method, FedProx)
    assert config.components.method == FedAvg()


def test_a_method_holds_its_rule(built: Counter[str]) -> None:
    """It is no option: two methods are equal, and mean the same, whether or not they have built it."""
    own, configured = FedAvg(), FedAvg(rule="uniform_mean")
    assert isinstance(own.built_rule, WeightedMean)
    assert isinstance(configured.built_rule, UniformMean)
    assert configured.built_rule is configured.built_rule
    assert built == {"method.rule": 1}
    assert own == FedAvg() != configured
    assert hash(own) == hash(FedAvg())
    assert repr(own) == repr(FedAvg())
