"""Working ahead: clients start a round before the previous one is recorded, if the settings allow it. The bits stay equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
from helpers import known

from raydfl.cluster.early_work import EarlyWork
from raydfl.cluster.server import Server
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Task
from raydfl.engine.config import Config
from raydfl.engine.fleet import Step
from raydfl.engine.orders import Order, Reply
from raydfl.engine.planning import RoundPlanner
from raydfl.engine.pool import EarlyOrders, SerialPool
from raydfl.engine.rounds import Checkpoint
from raydfl.engine.worker import Worker
from raydfl.testing import assert_same_bits, read_tensors, start_server

Tiny = Callable[..., Config]


class ConcurrentPool(SerialPool):
    """A pool that runs orders at once, as actors do, and records the rounds of its training orders."""

    concurrent = True

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.trained: list[int] = []

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        if orders and orders[0].measure is None:
            self.trained.append(orders[0].round_number)
        return iter(list(super().run(orders, broadcast)))


class EarlyPool(ConcurrentPool):
    """A pool that carries out early orders before all others, and keeps their replies."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.work = EarlyWork()
        self.used = 0

    def run(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], early: EarlyOrders | None = None
    ) -> Iterator[Reply]:
        rest, ready = self.work.start(orders, early)
        self.used += len(ready)
        while (order := self.work.take()) is not None:
            (reply,) = super().run([order], broadcast)
            assert not self.work.keep(order, reply)
        return iter([*ready, *(super().run(rest, broadcast) if rest else ())])


def start_concurrent_server(config: Config, pool: type[SerialPool] = ConcurrentPool) -> tuple[Server, ConcurrentPool]:
    with mock.patch("raydfl.cluster.sites.SerialPool", pool):
        server = start_server(config)
    return server, cast(ConcurrentPool, server._pool)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedapta", "modality_mirror"])
@pytest.mark.parametrize("settings", [(), ("run.commit_every=2", "evaluate.every=2")])
def test_working_ahead_keeps_the_bits(tiny: Tiny, method: str, settings: Sequence[str]) -> None:
    """The cases cover private state, phases, evaluation, and rounds without a commit."""
    config = tiny(*settings, method=method)
    server, pool = start_concurrent_server(config)
    reports = [report for _ in range(config.train.rounds) for report in server.rounds(server.round_index, 0) or ()]
    server.finish()
    server.close()
    assert pool.trained == [report.round for report in reports] == list(range(1, config.train.rounds + 1))
    assert_same_bits(read_tensors(Path(config.run.dir) / "tiny"), known(tiny(*settings, method=method)))


def test_empty_rounds_of_poisson_draws_do_not_stall(tiny: Tiny) -> None:
    settings = (
        *("method.rule={name: gaussian, clip: 0.5, noise: 1.0}", "privacy.key=seed", "evaluate.clients=none"),
        *("train.clients={draw: poisson}", "train.cohort=1", "train.rounds=8"),
    )
    config = tiny(*settings)
    server, pool = start_concurrent_server(config)
    while server.round_index < config.train.rounds:
        server.rounds(server.round_index, 0)
    server.finish()
    server.close()
    assert 0 < len(pool.trained) < 8
    assert_same_bits(read_tensors(Path(config.run.dir) / "tiny"), known(tiny(*settings)))


def test_the_next_round_starts_before_this_one_is_reported(tiny: Tiny) -> None:
    config = tiny("train.rounds=3")
    server, pool = start_concurrent_server(config)
    started = []
    for _ in range(3):
        server.rounds(server.round_index, 0)
        started.append(list(pool.trained))
    server.close()
    assert started == [[1, 2], [1, 2, 3], [1, 2, 3]]


def test_an_unrequested_round_is_discarded(tiny: Tiny) -> None:
    """The run ends while clients work ahead, and resumes."""
    config = tiny("train.rounds=3", method="scaffold")
    server, pool = start_concurrent_server(config)
    server.rounds(0, 0)
    server.finish()
    server.close()
    assert pool.trained == [1, 2]
    server = Server(Path(config.run.dir) / "tiny", config)
    assert server.round_index == 1
    server.rounds(1, 3, 1e9)
    server.finish()
    server.close()
    assert_same_bits(read_tensors(Path(config.run.dir) / "tiny"), known(tiny("train.rounds=3", method="scaffold")))


@pytest.mark.parametrize("condition", ["deadline", "compaction", "serial pool", "single round"])
def test_some_conditions_prevent_working_ahead(tiny: Tiny, condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("train.rounds=3", *(["train.deadline=1000"] if condition == "deadline" else []))
    server, pool = start_concurrent_server(config)
    if condition == "compaction":
        committer = server._federation._committer
        monkeypatch.setattr(committer, "select_sparse", lambda private: private)
    if condition == "serial pool":
        pool.concurrent = False
    if condition == "single round":
        server.round()
    else:
        server.rounds(0, 0)
    assert pool.trained == [1]
    server.close()


def test_a_failing_plan_fails_only_its_own_round(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("train.rounds=3")
    server, _ = start_concurrent_server(config)
    plan = RoundPlanner.plan

    def plan_or_fail(
        planner: RoundPlanner, checkpoint: Checkpoint, drawn: bool = True
    ) -> tuple[list[Order], Step | None]:
        if checkpoint.state.round_index == 1:
            raise ValueError("no plan")
        return plan(planner, checkpoint, drawn)

    monkeypatch.setattr(RoundPlanner, "plan", plan_or_fail)
    reports = server.rounds(0, 3, 0.0)
    assert [report.round for report in reports or ()] == [1]
    with pytest.raises(ValueError, match="no plan"):
        server.rounds(1, 3, 0.0)
    server.close()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", ("train.fleet.buffer=2", "train.together=1", "train.batch_size=4", "train.deadline=14")),
        ("scaffold", ("train.fleet.buffer=1", "evaluate.every=3", "run.commit_every=2")),
        (
            "fedmlac",
            ("train.fleet.buffer=1", "train.together=2", "train.fleet.stale={most: 3}", "train.fleet.lost=0.1"),
        ),
        ("modality_mirror", ("train.fleet={buffer: 1, mix: model}", "train.phases.multimodal.rounds=5")),
    ],
)
def test_early_work_of_clients_in_flight_keeps_the_bits(tiny: Tiny, method: str, settings: Sequence[str]) -> None:
    """The cases cover private state, deadlines, lost and stale clients, and phases."""
    fleet = ("train.fleet.concurrency=5", "train.fleet.seconds.spread=1.5")
    settings = ("data.speakers=8", "train.rounds=10", *settings, *fleet)
    config = tiny(*settings, method=method)
    server, pool = start_concurrent_server(config, EarlyPool)
    while server.round_index < config.train.rounds:
        server.rounds(server.round_index, 0)
    server.finish()
    server.close()
    assert cast(EarlyPool, pool).used >= 5
    assert_same_bits(read_tensors(Path(config.run.dir) / "tiny"), known(tiny(*settings, method=method)))


def test_early_work_of_stale_clients_is_dropped() -> None:
    """Start 3 becomes stale, so that no step awaits it. Start 4 fails early, and is carried out in its own step."""
    work = EarlyWork()
    orders = [Order(0, Task("a"), 1, 1.0, start=3, early=True), Order(1, Task("b"), 1, 1.0, start=4, early=True)]
    assert work.start([], EarlyOrders(orders, frozenset({3, 4}))) == ([], [])
    assert [work.take(), work.take(), work.take()] == [*orders, None]
    assert work.keep(orders[0], Reply(0, "a")) == []
    assert work.forget(orders[1]) == []
    assert work.start([], EarlyOrders(orders[1:], frozenset({4}))) == ([], [])
    assert work.take() is None
    own = [Order(5, Task("a"), 2, 1.0, start=3), Order(6, Task("b"), 2, 1.0, start=4)]
    assert work.start(own, None) == (own, [])
