"""A round that clients begin before the last one is recorded: the same run to the bit, and only where nothing speaks against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
from helpers import known

from raydfl.cluster.server import Server
from raydfl.core.tensors import FlatTensors
from raydfl.engine.config import Config
from raydfl.engine.orders import Order, Reply
from raydfl.engine.pool import SerialPool
from raydfl.engine.worker import Worker
from raydfl.testing import assert_same_bits, read_tensors, start_server

Tiny = Callable[..., Config]


class Apart(SerialPool):
    """Works at once, as actors do, and notes of which rounds it got the orders."""

    concurrent = True

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.trained: list[int] = []

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        if orders[0].measure is None:
            self.trained.append(orders[0].round_number)
        return iter(list(super().run(orders, broadcast)))


def open_apart(config: Config) -> tuple[Server, Apart]:
    with mock.patch("raydfl.cluster.sites.SerialPool", Apart):
        server = start_server(config)
    return server, cast(Apart, server._pool)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedapta", "modality_mirror"])
@pytest.mark.parametrize("settings", [(), ("run.commit_every=2", "evaluate.every=2")])
def test_the_run_is_the_same_to_the_bit(tiny: Tiny, method: str, settings: Sequence[str]) -> None:
    """With private state, phases, evaluation and commits between rounds."""
    config = tiny(*settings, method=method)
    server, pool = open_apart(config)
    reports = [report for _ in range(config.train.rounds) for report in server.rounds(server.round_index, 0) or ()]
    server.finish()
    server.close()
    assert pool.trained == [report.round for report in reports] == list(range(1, config.train.rounds + 1))
    assert_same_bits(read_tensors(Path(config.run.dir) / "tiny"), known(tiny(*settings, method=method)))


def test_the_next_round_is_begun_before_this_one_is_reported(tiny: Tiny) -> None:
    config = tiny("train.rounds=3")
    server, pool = open_apart(config)
    begun = []
    for _ in range(3):
        server.rounds(server.round_index, 0)
        begun.append(list(pool.trained))
    server.close()
    assert begun == [[1, 2], [1, 2, 3], [1, 2, 3]]


def test_a_round_that_nobody_asks_for_counts_for_nothing(tiny: Tiny) -> None:
    """The run is ended while clients work ahead, and resumed."""
    config = tiny("train.rounds=3", method="scaffold")
    server, pool = open_apart(config)
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


@pytest.mark.parametrize("what", ["deadline", "moving", "here", "asked for alone"])
def test_where_none_is_begun_ahead(tiny: Tiny, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("train.rounds=3", *(["train.deadline=1000"] if what == "deadline" else []))
    server, pool = open_apart(config)
    if what == "moving":
        committer = server._federation._committer
        monkeypatch.setattr(committer, "select_sparse", lambda private: private)
    if what == "here":
        pool.concurrent = False
    if what == "asked for alone":
        server.round()
    else:
        server.rounds(0, 0)
    assert pool.trained == [1]
    server.close()


def test_a_plan_that_fails_fails_its_own_round(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("train.rounds=3")
    server, _ = open_apart(config)
    plan = type(server._federation).plan

    def fails(federation: object) -> list[Order]:
        if server._federation.state.round_index == 1:
            raise ValueError("no plan")
        return plan(server._federation)

    monkeypatch.setattr(type(server._federation), "plan", fails)
    reports = server.rounds(0, 3, 0.0)
    assert [report.round for report in reports or ()] == [1]
    with pytest.raises(ValueError, match="no plan"):
        server.rounds(1, 3, 0.0)
    server.close()
