"""Failures at the server end the run, in one process and on Ray. Oracle for Ray: the run in one process."""

from __future__ import annotations

import contextlib
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
    """Fake server actor in the driver's process; ``lost`` replies never arrive."""

    lost: Sequence[str] = ()

    def __init__(self, run_dir: Path, config: Config) -> None:
        actor = ServerActor()
        self._run: Any = (str(run_dir), pickle.loads(pickle.dumps(config)))
        self.calls: list[str] = []
        self._lost_since, self._has_told, self._timeout = None, False, config.ray.ready_timeout
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


CALLS = ("open", "rounds", "finish", "use", "close")


@pytest.fixture
def as_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the server as an actor with several rounds per call, of any duration."""
    monkeypatch.setattr(runs, "Server", InThisProcess)
    monkeypatch.setattr("raydfl.cluster.server.hide_gpus", lambda: None)  # this process continues after the test
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    monkeypatch.setattr(servers, "_CALL_S", 60.0)
    monkeypatch.setattr("ray.wait", lambda references, **_: (references, []))
    monkeypatch.setattr("ray.get", lambda reference, **_: reference())


@pytest.fixture(params=["serial", "actor"])
def server(request: pytest.FixtureRequest) -> None:
    """Select the driver's connection to its server."""
    if request.param == "actor":
        request.getfixturevalue("as_actor")


class RecordingProgress(Progress):
    """Progress that records its reports."""

    def __init__(self) -> None:
        super().__init__("quiet")
        self.rounds: list[int] = []
        self.ends: list[Result] = []

    def round(self, report: RoundReport) -> None:
        self.rounds.append(report.round)

    def finish(self, outcome: Result, *_: object) -> None:
        self.ends.append(outcome)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("failing", [2, 3])
def test_a_failed_evaluation_ends_the_run(tiny: Tiny, failing: int) -> None:
    """This includes the last round, if earlier rounds were executed in the same call."""
    recorder, config = RecordingProgress(), tiny(LAST, f"method.round={failing}", "run.name=measured")
    with pytest.raises(ClientError, match=r"the evaluation on the server's data failed in round \d, .*ValueError"):
        run(config, recorder)
    assert recorder.rounds == list(range(1, failing))
    assert recorder.ends == []
    run_dir = Path(config.run.dir) / "measured"
    assert not (run_dir / "model.safetensors").exists()
    assert final_state(run_dir).round_index == failing - 1


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("round_", "kind"), [(1, errno.ENOSPC), (2, errno.EIO), (3, errno.ENOSPC)])
def test_unwritable_rows_end_the_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, round_: int, kind: int) -> None:
    """One write fails. The resumed run has all rows and the bits of an undisturbed run."""
    recorder, config = RecordingProgress(), tiny("run.name=rows")
    write, path = record.write_rows, record.rows_path(Path(config.run.dir) / "rows", round_)

    def full(where: Path, rows: Sequence[MetricRow]) -> None:
        if where == path:
            raise (ResourcesError if kind == errno.ENOSPC else OSError)(os.strerror(kind))
        write(where, rows)

    with monkeypatch.context() as patch:
        patch.setattr(record, "write_rows", full)
        with pytest.raises((ResourcesError, OSError), match=os.strerror(kind)):
            run(config, recorder)
    assert recorder.rounds == list(range(1, round_ + 1))
    assert recorder.ends == []
    run_dir = Path(config.run.dir) / "rows"
    assert final_state(run_dir).round_index == round_ - 1
    resume(run_dir)
    assert_same_bits(known(tiny()), read_tensors(run_dir))
    losses = [row.round for row in record.to_rows(record.read_rows(run_dir)) if row.metric == "loss" and not row.client]
    assert sorted(set(losses)) == [1, 2, 3]


@pytest.mark.usefixtures("as_actor")
def test_a_failed_server_commits_nothing(tiny: Tiny) -> None:
    """The stop after round 1 must not commit round 2, which failed in the same call."""
    config = tiny(LAST, "method.round=2", "evaluate.every=2", "run.name=half")
    with pytest.raises(ClientError, match="failed in round 2"):
        run(config, on_round=lambda report: True)
    assert final_state(Path(config.run.dir) / "half").round_index == 1


@pytest.mark.usefixtures("as_actor")
@pytest.mark.usefixtures("as_actor")
@pytest.mark.parametrize(("seconds", "is_lost"), [(90.0, False), (130.0, True)])
def test_a_busy_node_may_restart_the_server_late(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, seconds: float, is_lost: bool
) -> None:
    """The limit is ray.ready_timeout. Before, it was 50 attempts, 25 s."""
    now = 0.0

    def sleep(duration: float) -> None:
        nonlocal now
        now += duration

    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    server = InThisProcess(tiny().run.dir, tiny("ray.ready_timeout=120"))
    messages: list[str] = []
    server._tell = messages.append

    def use() -> dict[str, Any]:
        if 10.0 <= now < 10.0 + seconds:
            raise ActorUnavailableError("restarting", b"0" * 16)
        return {"answer": now}

    server._actor.use = SimpleNamespace(remote=lambda: use)
    now = 10.0
    with pytest.raises(ResourcesError, match="could not be restarted") if is_lost else contextlib.nullcontext():
        while not server.use():
            pass
        assert now == pytest.approx(10.0 + seconds)
    assert messages == ["The server was lost. It restarts from the last commit."]


def test_scores_of_rounds_with_lost_replies_are_the_last_scores(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InThisProcess, "lost", ("rounds", "finish"))
    outcome = run(tiny("run.name=lost"))
    monkeypatch.undo()
    assert outcome.finished
    assert outcome.scores == run(tiny("run.name=undisturbed")).scores


@pytest.mark.usefixtures("as_actor")
def test_an_actor_loss_raised_in_the_server_is_not_the_loss_of_the_server(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a remote error as an instance of both its type and RayTaskError."""
    raised = RayTaskError("rounds", "in the server", ActorDiedError()).as_instanceof_cause()
    assert isinstance(raised, ActorDiedError)

    def fail(self: Federation, ahead: bool) -> None:
        raise raised

    monkeypatch.setattr(Federation, "round", fail)
    with pytest.raises(RayTaskError):
        run(tiny("run.name=inner"))


def define_script_method(patch: pytest.MonkeyPatch) -> str:
    """Define a method in the running script, as in a notebook, and return its reference."""
    patch.setattr(sys.modules["__main__"], "Own", FedAvg, raising=False)
    return "method.name=__main__:Own"


@pytest.mark.usefixtures("as_actor")
def test_errors_of_the_servers_constructor_are_reported_verbatim(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reports an error in an actor's constructor as the loss of the actor."""

    class Elsewhere(InThisProcess):
        def __init__(self, run_dir: Path, config: Config) -> None:
            super().__init__(run_dir, config)
            monkeypatch.delattr(sys.modules["__main__"], "Own")

    monkeypatch.setattr(runs, "Server", Elsewhere)
    with pytest.raises(ConfigError, match=r"'__main__:Own'.*run in separate processes.*name it FILE.py:Own"):
        run(tiny(define_script_method(monkeypatch)))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_the_server_actor_cannot_load_a_method_of_a_script(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    own = define_script_method(monkeypatch)
    assert run(tiny(own, "train.rounds=1")).finished
    with pytest.raises(ConfigError, match=r"'__main__:Own'.*run in separate processes.*name it FILE.py:Own"):
        run(tiny(own, "run.name=with-ray", "ray.actors=1"))


class OfThisFile(ServerActor):
    """A server that its process cannot import, because this folder is not on the path."""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_failed_server_start_reports_the_reason(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not mention lack of memory."""
    monkeypatch.setattr(servers, "ServerActor", OfThisFile)
    with pytest.raises(
        ResourcesError, match=f"the server actor cannot start: .*No module named '{__name__}'\\. Check that every node"
    ):
        run(tiny("ray.actors=1"))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_failed_evaluation_in_the_last_round_ends_the_run_on_ray(tiny: Tiny) -> None:
    recorder, config = RecordingProgress(), tiny(LAST, "run.name=measured", "ray.actors=1")
    with pytest.raises(ClientError, match=r"the evaluation on the server's data failed in round 3, .*ValueError"):
        run(config, recorder)
    assert recorder.rounds == [1, 2]
    assert recorder.ends == []
    assert final_state(Path(config.run.dir) / "measured").round_index == 2
