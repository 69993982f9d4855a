"""Groups of clients work for every method: each group's state is that of the method run on the group's clients alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import known, stop_after

from raydfl import Config, resume
from raydfl.core import registry
from raydfl.core.tensors import FlatTensors
from raydfl.data import Population
from raydfl.engine import Federation, Order, Reply, SerialPool, Worker
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, train_federation

Tiny = Callable[..., Config]

KINDS = ["data.profile={kind: {values: [a, b]}}", "train.cohort=1.0", "train.rounds=2"]
KNOWN = "train.groups={name: known, by: kind}"
FAST = ("fedavgm", "fedper")

OF_ALL_CLIENTS = ("scaffold", "feddc", "feddyn", "fedapta")
"""Methods whose equations have the number of all clients, which ``train.clients`` does not change. Their groups are compared in
tests/engine/test_groups.py and tests/methods/test_fedapta.py."""


def entries(bits: Mapping[str, bytes], group: str) -> dict[str, bytes]:
    """Return the server's tensors of a group, by the method's keys; of the state without a group if it is empty."""
    found = {}
    for name, value in bits.items():
        what, _, rest = name.partition(" ")
        key, _, tensor = rest.partition(" ")
        if what != "server":
            continue
        if group and (key == group or key.endswith(f"/{group}")):
            found[f"{'global' if key == group else key.removesuffix(f'/{group}')} {tensor}"] = value
        elif not group and "task" not in key:
            found[f"{key} {tensor}"] = value
    return found


def each_method(*leave_out: str) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name in registry.names("raydfl.methods")
        if name not in leave_out
    ]


@pytest.mark.parametrize("method", each_method(*OF_ALL_CLIENTS))
def test_a_known_groups_state_is_the_method_run_on_its_clients_alone(tiny: Tiny, method: str) -> None:
    both = train_federation(tiny(*KINDS, KNOWN, "run.name=both", method=method))
    for kind in "ab":
        alone = known(tiny(*KINDS, "train.groups=none", f"train.clients.where={{kind: {kind}}}", method=method))
        found = entries(alone, "")
        assert found
        assert_same_bits(entries(both, f"task_{kind}"), found)


@pytest.mark.parametrize("method", each_method("fedapta"))
def test_one_known_group_is_the_method_without_groups(tiny: Tiny, method: str) -> None:
    one = ["data.profile={kind: {values: [a]}}", "train.rounds=2", "evaluate.clients=none"]
    plain = known(tiny(*one, method=method))
    grouped = train_federation(tiny(*one, KNOWN, "run.name=grouped", method=method))
    assert_same_bits(entries(grouped, "task_a"), entries(plain, ""))
    assert_same_bits(
        *({name: value for name, value in each.items() if name.startswith("client")} for each in (grouped, plain))
    )


class Backwards(SerialPool):
    """A pool whose replies arrive in the opposite order."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        yield from reversed([*super().run(orders, broadcast)])


RULES = [
    "{name: hdbscan, min_cluster_size: 2, min_samples: 1, accumulate: 0.5}",
    "{name: ifca, groups: 3}",
    "{name: cfl, eps_mean: 100, eps_max: 0}",
]


@pytest.mark.parametrize("together", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", RULES)
def test_any_order_of_arrival_gives_the_same_bits_and_so_does_a_resumed_run(
    tiny: Tiny, rule: str, together: int
) -> None:
    settings = [f"train.groups={rule}", "train.cohort=1.0", "train.rounds=2", f"train.together={together}"]
    config = tiny(*settings, "run.name=backwards", method="fedavgm")
    run_dir = create(config, Progress("quiet"))
    pool = Backwards(Worker(run_dir, config, PrivateStore(run_dir / "private")))
    federation = Federation(config, Population.load(run_dir / "population"), RunStore(run_dir), pool)
    for _ in range(2):
        federation.round()
    federation.close()
    pool.close()
    whole = read_tensors(run_dir)
    assert any(name.startswith("server moments/task") for name in whole)
    stopped = tiny(*settings, "run.name=stopped", method="fedavgm")
    stop_after(stopped, 1)
    resume(Path(stopped.run.dir) / "stopped")
    assert_same_bits(whole, read_tensors(Path(stopped.run.dir) / "stopped"))
