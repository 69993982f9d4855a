"""A rule that holds all updates of a round is compared with the memory of the server's machine."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from raydfl.core.errors import ConfigError
from raydfl.core.memory import read_free_memory, read_memory_limit
from raydfl.data import Population
from raydfl.engine import rule_memory
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.orders import Order
from raydfl.engine.passes import BlockUpdates, HeldBlocks
from raydfl.engine.rule_memory import check_rule_memory, compute_kept_bytes, compute_update_bytes
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedper import FedPer
from raydfl.testing import start_server, train_federation

NETWORKS = [((), {"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))})]
"""6 + 2 weights of the layer; 2 scales, 2 shifts, 2 means and 2 variances of the norm; a counter that is not sent."""


def test_an_update_has_four_bytes_for_each_shared_value() -> None:
    assert compute_update_bytes(FedAvg(), NETWORKS) == 4 * 16
    assert compute_update_bytes(FedPer(personal=("model/1",)), NETWORKS) == 4 * 8


@pytest.mark.parametrize(
    ("rule", "limit", "outcome"),
    [
        ("median", 20_000, "note"),
        ("median", 10_000, "warning"),
        ("median", 7_000, "error"),
        ("weighted_mean", 7_000, ""),
        ({"name": "norm_clipping", "norm": 1.0}, 7_000, ""),
        ("norm_clipping", 7_000, "error"),
    ],
)
def test_a_cohort_must_fit_into_memory_if_the_rule_collects_updates(
    rule: str | dict[str, object], limit: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The need is 1.2 x 100 clients x 64 bytes, or 7,680 bytes. More than half of the limit is a warning."""
    monkeypatch.setattr(rule_memory, "read_free_memory", lambda: limit)
    if outcome == "error":
        with pytest.raises(ConfigError, match=r"method.rule: .* holds all updates of a round .* Lower train.cohort"):
            check_rule_memory(FedAvg(rule=rule), NETWORKS, [10, 100])
    else:
        text, large = check_rule_memory(FedAvg(rule=rule), NETWORKS, [10, 100])
        assert ("100 clients with 64 B each need 7.7 kB" in text) == bool(outcome)
        assert large == (outcome == "warning")


def test_a_run_that_does_not_fit_is_rejected_before_the_first_round(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_memory, "read_free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="its machine has 1.0 kB"):
        start_server(tiny("method.rule=median"))


def test_the_limit_is_positive_and_at_most_the_machines_memory() -> None:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < read_free_memory() <= read_memory_limit() <= total


def test_a_run_prints_the_need_once_before_the_first_round(tiny: Callable[..., Config]) -> None:
    server = start_server(tiny("method.rule=median"))
    with contextlib.closing(server):
        _, (message,), _ = server.open()
        assert re.match(r"rule Median holds all updates of a round at the server: \d+ clients with .* need ", message)


KEEPING = ("method={name: fedavg, rule: lpa}", "train.cohort=1.0", "train.block=2")


def test_the_kept_updates_are_counted_as_a_worker_keeps_them(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker keeps the updates of all blocks. The oracle adds the bytes of their tensors in a round."""
    seen: list[int] = []
    keep = HeldBlocks.keep

    def count(self: HeldBlocks, order: Order, updates: BlockUpdates) -> None:
        tensors = [tensor for client in updates.clients for update in client for tensor in update.tensors.values()]
        seen.append(sum(tensor.nbytes for tensor in tensors))
        keep(self, order, updates)

    monkeypatch.setattr(HeldBlocks, "keep", count)
    config = tiny(*KEEPING, "train.rounds=1")
    train_federation(config)
    clients = Clients(Population.load(next(Path(config.run.dir).iterdir()) / "population"), config)
    assert len(seen) == math.ceil(len(clients) / 2)
    for actors, expected in ((1, sum(seen)), (len(seen), max(seen)), (0, 0), ("per_client", 0)):
        assert compute_kept_bytes(tiny(*KEEPING, f"ray.actors={actors}"), clients) == expected
    assert compute_kept_bytes(tiny(*KEEPING, "ray.actors=1"), clients, block=1) == 0
    assert compute_kept_bytes(tiny(*KEEPING, "method.rule=weighted_mean", "ray.actors=1"), clients) == 0
