"""Number of clients trained at once: the search for the best width, its cache, and the groups of clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import known

from raydfl.core.errors import ClientError
from raydfl.core.types import Task
from raydfl.data.population import Population
from raydfl.engine.autotune import choose_width, find_best_width, measure_once, measure_width
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.orders import Order, assign_groups, split_groups
from raydfl.engine.pool import SerialPool
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, start_server, train_federation

Tiny = Callable[..., Config]


def test_the_search_returns_the_last_width_with_a_gain() -> None:
    seconds = {1: 1.0, 2: 0.6, 4: 0.4, 8: 0.39, 16: 0.1}
    measured_widths: list[int] = []
    assert find_best_width(lambda width: (measured_widths.append(width), seconds[width])[1], 100) == 4
    assert measured_widths == [1, 2, 4, 8]
    assert find_best_width(lambda width: 1 / width, 12) == 8
    assert find_best_width(lambda width: 1 / width, 1) == 1


@pytest.mark.parametrize(
    ("seconds", "best", "measured"),
    [
        ({1: 1.0, 2: 1.3, 4: 0.7, 8: 0.36, 16: 0.35}, 8, [1, 2, 4, 8, 16]),
        ({1: 1.0, 2: 1.5, 4: 1.45}, 1, [1, 2, 4]),
        ({1: 1.0, 2: 1.5, 4: 1.2, 8: 0.97, 16: 0.96}, 1, [1, 2, 4, 8, 16]),
    ],
)
def test_the_search_continues_if_only_two_clients_are_slower_than_one(
    seconds: dict[int, float], best: int, measured: list[int]
) -> None:
    """On a GPU a group takes as long as one client, plus what the operations of a group cost more."""
    widths: list[int] = []
    assert find_best_width(lambda width: (widths.append(width), seconds[width])[1], 100) == best
    assert widths == measured


def test_running_out_of_memory_ends_the_search() -> None:
    def measure_or_fail(width: int) -> float:
        if width > 4:
            raise ClientError("client 'a' failed in round 1: OutOfMemoryError")
        return 1 / width

    assert find_best_width(measure_or_fail, 100) == 4


def test_a_measurement_is_cached_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "widths.json"
    assert measure_once(path, ("crnn", 16), lambda: 8) == 8
    assert measure_once(path, ("crnn", 16), lambda: 1) == 8
    assert measure_once(path, ("crnn", 32), lambda: 2) == 2
    assert measure_once(path, ("crnn", 16), lambda: 1) == 8
    path.write_text("{")
    assert measure_once(path, ("crnn", 16), lambda: 4) == 4


def test_groups_hold_clients_of_one_kind_and_similar_cost() -> None:
    orders = [Order(i, Task(f"c{i}", phase="ab"[i % 2]), 0, float(10 + i)) for i in range(9)]
    kinds = ["x"] * 8 + ["y"]
    groups = split_groups(assign_groups(orders, kinds, 3))
    assert sorted(tuple(order.position for order in group) for group in groups) == [
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
        (8,),
    ]
    assert split_groups(assign_groups(orders, kinds, 1)) == [[order] for order in orders]


def test_measuring_leaves_the_run_unchanged(tiny: Tiny) -> None:
    reference = known(tiny(method="fedmlac"))
    config = tiny("run.name=measured", method="fedmlac")
    run_dir = create(config, Progress("quiet"))
    worker = Worker(run_dir, config, PrivateStore(run_dir / "private"))
    federation = Federation(config, Population.load(run_dir / "population"), RunStore(run_dir), SerialPool(worker))
    orders = federation.plan()
    assert choose_width(worker, orders, federation.broadcast({"global"})) == 1  # on the CPU
    assert 1 <= measure_width(worker, orders, federation.broadcast({"global"})) <= len(orders)
    federation.close()
    assert not (run_dir / "private").exists()
    assert_same_bits(reference, train_federation(config))


@pytest.mark.parametrize("together", [1, 2])
def test_a_resumed_run_keeps_its_width(tiny: Tiny, together: int) -> None:
    config = tiny(f"train.together={together}", "train.rounds=4", "run.name=kept")
    server = start_server(config)
    server.round()
    server.close()
    store = RunStore(Path(config.run.dir) / "kept")
    assert store.load(store.latest() or "").together == together
    assert_same_bits(train_federation(config), known(tiny(f"train.together={together}", "train.rounds=4")))
