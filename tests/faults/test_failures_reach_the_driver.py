"""What fails at the server ends the run, whoever asks for the rounds. The oracle of a run on Ray is the one without it."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import known
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from raydfl.cluster import server as servers
from raydfl.cluster.server import RemoteServer, ServerActor
from raydfl.core.errors import ClientError, ConfigError, ResourcesError
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.record import MetricRow
from raydfl.engine.telemetry import RoundReport
from raydfl.methods.fedavg import FedAvg
from raydfl.runs import _run as runs
from raydfl.runs._run import resume, run
from raydfl.runs.progress import Progress
from raydfl.runs.result import Result
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
FAULTY = Path(__file__).parent / "faulty_methods.py"
LAST = f"method.name={FAULTY}:CannotMeasureAt"


class InThisProcess(RemoteServer):
    """The driver's side of a server actor, whose other side is an object here; ``lost`` replies never arrive."""

    lost: Sequence[str] = ()

    def __init__(self, run_dir: Path, config: Config) -> None:
        actor = ServerActor(str(run_dir), pickle.loads(pickle.dumps(config)))
        self.calls: list[str] = []
        self._lost = 0
        self._tell = lambda _: None

        def call(name: str, *arguments: Any) -> Any:
            answer = getattr(actor, name)(*arguments)
            self.calls.append(name)
            if name in self.lost and self.calls.count(name) == 1:
                raise ActorUnavailableError("the reply was lost", b"0" * 16)
            return answer

        self._actor: Any = SimpleNamespace(
            **{name: SimpleNamespace(remote=functools.partial(functools.partial, call, name)) for name in CALLS}
        )
        self._watch: Any = SimpleNamespace(report_changes=lambda: None)

    def close(self) -> None:
        self._actor.close.remote()()


CALLS = ("open", "rounds", "finish", "close")


@pytest.fixture
def as_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reaches its server as an actor, which does several rounds in a call, however long they take."""
    monkeypatch.setattr(runs, "Server", InThisProcess)
    monkeypatch.setattr("raydfl.cluster.server.hide_gpus", lambda: None)  # this process goes on after the test
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    monkeypatch.setattr(servers, "_AT_ONCE", 60.0)
    monkeypatch.setattr("ray.wait", lambda references, **_: (references, []))
    monkeypatch.setattr("ray.get", lambda reference, **_: reference())


@pytest.fixture(params=["serial", "actor"])
def server(request: pytest.FixtureRequest) -> None:
    """How the driver reaches its server."""
    if request.param == "actor":
        request.getfixturevalue("as_actor")


class Told(Progress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("quiet")
        self.rounds: list[int] = []
        self.ends: list[Result] = []

    def round(self, report: RoundReport) -> None:
        self.rounds.append(report.round)

    def finish(self, outcome: Result, seconds: float, next_step: str = "") -> None:
        self.ends.append(outcome)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("failing", [2, 3])
def test_an_evaluation_that_fails_ends_the_run(tiny: Tiny, failing: int) -> None:
    """In the last round too, when the rounds before it were done in the same call."""
    told, config = Told(), tiny(LAST, f"method.round={failing}", "run.name=measured")
    with pytest.raises(ClientError, match=r"the evaluation on the server's data failed in round \d, .*ValueError"):
        run(config, told)
    assert told.rounds == list(range(1, failing))
    assert told.ends == []
    run_dir = Path(config.run.dir) / "measured"
    assert not (run_dir / "model.safetensors").exists()
    assert final_state(run_dir).round_index == failing - 1


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("round_", "kind"), [(1, errno.ENOSPC), (2, errno.EIO), (3, errno.ENOSPC)])
def test_rows_that_cannot_be_written_end_the_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, round_: int, kind: int
) -> None:
    """One write fails; nothing of it is lost for good: the run that goes on has every row and the bits of an undisturbed one."""
    told, config = Told(), tiny("run.name=rows")
    write, path = record.write_rows, record.rows_path(Path(config.run.dir) / "rows", round_)

    def full(where: Path, rows: Sequence[MetricRow]) -> None:
        if where == path:
            raise (ResourcesError if kind == errno.ENOSPC else OSError)(os.strerror(kind))
        write(where, rows)

    with monkeypatch.context() as patch:
        patch.setattr(record, "write_rows", full)
        with pytest.raises((ResourcesError, OSError), match=os.strerror(kind)):
            run(config, told)
    assert told.rounds == list(range(1, round_ + 1))
    assert told.ends == []
    run_dir = Path(config.run.dir) / "rows"
    assert final_state(run_dir).round_index == round_ - 1
    resume(run_dir)
    assert_same_bits(known(tiny()), read_tensors(run_dir))
    losses = [row.round for row in record.to_rows(record.read_rows(run_dir)) if row.metric == "loss" and not row.client]
    assert sorted(set(losses)) == [1, 2, 3]


@pytest.mark.usefixtures("as_actor")
def test_a_server_that_failed_makes_nothing_more_true(tiny: Tiny) -> None:
    """Asked to stop after round 1, where round 2 has failed in the same call: the half of it must not be committed."""
    config = tiny(LAST, "method.round=2", "evaluate.every=2", "run.name=half")
    with pytest.raises(ClientError, match="failed in round 2"):
        run(config, on_round=lambda report: True)
    assert final_state(Path(config.run.dir) / "half").round_index == 1


@pytest.mark.usefixtures("as_actor")
def test_scores_of_rounds_whose_reply_was_lost_are_the_last_ones(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InThisProcess, "lost", ("rounds", "finish"))
    outcome = run(tiny("run.name=lost"))
    monkeypatch.undo()
    assert outcome.finished
    assert outcome.scores == run(tiny("run.name=undisturbed")).scores


@pytest.mark.usefixtures("as_actor")
def test_a_loss_in_the_server_is_not_the_loss_of_the_server(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives an error that was raised there both types: the one raised, and RayTaskError."""
    raised = RayTaskError("rounds", "in the server", ActorDiedError()).as_instanceof_cause()
    assert isinstance(raised, ActorDiedError)

    def fails(self: Federation, ahead: bool) -> None:
        raise raised

    monkeypatch.setattr(Federation, "round", fails)
    with pytest.raises(RayTaskError):
        run(tiny("run.name=inner"))


def in_a_script(patch: pytest.MonkeyPatch) -> str:
    """A method that the running script has defined, as in a notebook; its reference."""
    patch.setattr(sys.modules["__main__"], "Own", FedAvg, raising=False)
    return "method.name=__main__:Own"


@pytest.mark.usefixtures("as_actor")
def test_what_the_server_cannot_open_is_said_in_its_own_words(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a constructor of an actor raises is, to Ray, the loss of an actor."""

    class Elsewhere(InThisProcess):
        def __init__(self, run_dir: Path, config: Config) -> None:
            super().__init__(run_dir, config)
            monkeypatch.delattr(sys.modules["__main__"], "Own")

    monkeypatch.setattr(runs, "Server", Elsewhere)
    with pytest.raises(ConfigError, match=r"'__main__:Own'.*run in separate processes.*name it FILE.py:Own"):
        run(tiny(in_a_script(monkeypatch)))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_method_of_a_script_cannot_be_found_by_the_server_actor(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    own = in_a_script(monkeypatch)
    assert run(tiny(own, "train.rounds=1")).finished
    with pytest.raises(ConfigError, match=r"'__main__:Own'.*run in separate processes.*name it FILE.py:Own"):
        run(tiny(own, "run.name=with-ray", "ray.actors=1"))


class OfThisFile(ServerActor):
    """A server whose process cannot import it: the folder of this file is not on its path."""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_server_that_cannot_be_made_says_why(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the loss of an actor that ran out of memory."""
    monkeypatch.setattr(servers, "ServerActor", OfThisFile)
    with pytest.raises(
        ResourcesError, match=f"the server actor cannot start: .*No module named '{__name__}'\\. Check that every node"
    ):
        run(tiny("ray.actors=1"))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_on_ray_too_an_evaluation_that_fails_in_the_last_round_ends_the_run(tiny: Tiny) -> None:
    told, config = Told(), tiny(LAST, "run.name=measured", "ray.actors=1")
    with pytest.raises(ClientError, match=r"the evaluation on the server's data failed in round 3, .*ValueError"):
        run(config, told)
    assert told.rounds == [1, 2]
    assert told.ends == []
    assert final_state(Path(config.run.dir) / "measured").round_index == 2
