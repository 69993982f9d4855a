"""Groups of clients work for every method: the state of a group equals a run of the method on the clients of the group alone."""

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
"""Methods whose equations use the number of all clients, regardless of ``train.clients``. Their groups are compared in
tests/engine/test_groups.py and tests/methods/test_fedapta.py."""


def select_group_entries(bits: Mapping[str, bytes], group: str) -> dict[str, bytes]:
    """Select the server's tensors of a group, or of the state without groups if ``group`` is empty, by the method's keys."""
    selected = {}
    for name, value in bits.items():
        owner, _, rest = name.partition(" ")
        key, _, tensor = rest.partition(" ")
        if owner != "server":
            continue
        if group and (key == group or key.endswith(f"/{group}")):
            selected[f"{'global' if key == group else key.removesuffix(f'/{group}')} {tensor}"] = value
        elif not group and "task" not in key:
            selected[f"{key} {tensor}"] = value
    return selected


def make_method_params(*leave_out: str) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name in registry.names("raydfl.methods")
        if name not in leave_out
    ]


@pytest.mark.parametrize("method", make_method_params(*OF_ALL_CLIENTS))
def test_the_state_of_a_known_group_equals_a_run_on_its_clients_alone(tiny: Tiny, method: str) -> None:
    both = train_federation(tiny(*KINDS, KNOWN, "run.name=both", method=method))
    for kind in "ab":
        alone = known(tiny(*KINDS, "train.groups=none", f"train.clients.where={{kind: {kind}}}", method=method))
        expected = select_group_entries(alone, "")
        assert expected
        assert_same_bits(select_group_entries(both, f"task_{kind}"), expected)


@pytest.mark.parametrize("method", make_method_params("fedapta"))
def test_one_known_group_equals_the_method_without_groups(tiny: Tiny, method: str) -> None:
    settings = ["data.profile={kind: {values: [a]}}", "train.rounds=2", "evaluate.clients=none"]
    plain = known(tiny(*settings, method=method))
    with_groups = train_federation(tiny(*settings, KNOWN, "run.name=grouped", method=method))
    assert_same_bits(select_group_entries(with_groups, "task_a"), select_group_entries(plain, ""))
    assert_same_bits(
        *(
            {name: value for name, value in tensors.items() if name.startswith("client")}
            for tensors in (with_groups, plain)
        )
    )


class Backwards(SerialPool):
    """Pool whose replies arrive in reverse order."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        yield from reversed([*super().run(orders, broadcast)])


RULES = [
    "{name: hdbscan, min_cluster_size: 2, min_samples: 1, accumulate: 0.5}",
    "{name: ifca, groups: 3}",
    "{name: cfl, eps_mean: 100, eps_max: 0}",
]


@pytest.mark.parametrize("together", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", RULES)
def test_any_order_of_arrival_and_a_resumed_run_give_the_same_bits(tiny: Tiny, rule: str, together: int) -> None:
    settings = [f"train.groups={rule}", "train.cohort=1.0", "train.rounds=2", f"train.together={together}"]
    config = tiny(*settings, "run.name=backwards", method="fedavgm")
    run_dir = create(config, Progress("quiet"))
    pool = Backwards(Worker(run_dir, config, PrivateStore(run_dir / "private")))
    federation = Federation(config, Population.load(run_dir / "population"), RunStore(run_dir), pool)
    for _ in range(2):
        federation.round()
    federation.close()
    pool.close()
    reference = read_tensors(run_dir)
    assert any(name.startswith("server moments/task") for name in reference)
    resumed = tiny(*settings, "run.name=stopped", method="fedavgm")
    stop_after(resumed, 1)
    resume(Path(resumed.run.dir) / "stopped")
    assert_same_bits(reference, read_tensors(Path(resumed.run.dir) / "stopped"))
