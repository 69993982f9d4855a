"""Blocks: sums of blocks equal an independent reference, and depend on positions alone."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import known, known_run

from raydfl.core import registry
from raydfl.core.errors import ClientError, ConfigError
from raydfl.core.tensors import FlatTensors
from raydfl.data.population import Population
from raydfl.engine import block_size
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.orders import Order, Reply, split_pieces
from raydfl.engine.passes import HeldBlocks
from raydfl.engine.pool import SerialPool
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.methods import Method
from raydfl.runs._replay import replay
from raydfl.runs._run import resume, run
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
EXTRA = Path(__file__).parent.parent / "extra_methods.py"
FAULTY = Path(__file__).parent.parent / "faults" / "faulty_methods.py"
ALL = ("train.cohort=1.0", "evaluate.every=3")
"""A cohort of six clients."""
METHODS = [
    name
    for name in registry.names("raydfl.methods")
    if registry.find("raydfl.methods", name, Method, "method").associative  # type: ignore[type-abstract]
]
FAST = ("fedavg", "fedadam", "fedmlac", "fednova", "feddyn", "fedrolex", "scaffold", "fedper")


class TreePool(SerialPool):
    """Pool with pieces and replies in random order. It divides some blocks."""

    def __init__(self, worker: Worker, divided: Sequence[int] = ()) -> None:
        super().__init__(worker)
        self.divided = divided
        """Positions of first orders. Their blocks reach the worker as single orders."""
        self.bytes = 0
        """Bytes of received updates and sums."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        shuffle = random.Random(len(self.divided)).shuffle
        orders = [
            dataclasses.replace(order, block=None) if order.block and order.block.first in self.divided else order
            for order in orders
        ]
        pieces = split_pieces(orders)
        shuffle(pieces)
        replies = [reply for piece in pieces for reply in self.workers[""].carry_out(piece, broadcast)]
        shuffle(replies)
        for reply in replies:
            vectors = [FlatTensors.from_tensors(update.tensors).vector for update in (*reply.updates, *reply.sums)]
            self.bytes += sum(vector.nbytes for vector in vectors)
            yield reply


def finish_with_tree_pool(config: Config, divided: Sequence[int] = ()) -> tuple[dict[str, bytes], TreePool]:
    run_dir = create(config, Progress("quiet"))
    pool = TreePool(Worker(run_dir, config, PrivateStore(run_dir / "private")), divided)
    with contextlib.closing(pool):
        federation = Federation(config, Population.load(run_dir / "population"), RunStore(run_dir), pool)
        while federation.state.round_index < config.train.rounds:
            federation.round()
        federation.close()
    return read_tensors(run_dir), pool


@pytest.mark.parametrize("block", [1, 2, 4, 5, 6])
def test_a_round_equals_the_sum_of_its_blocks(tiny: Tiny, block: int) -> None:
    """Train single clients, and add float64 products in client order: within blocks, then over blocks."""
    config = tiny(*ALL, "train.rounds=1", f"train.block={block}", "run.name=blocks")
    server = start_server(config)
    run_dir = Path(config.run.dir) / "blocks"
    first = RunStore(run_dir).newest()
    assert first is not None
    worker = Worker(run_dir, config, PrivateStore(run_dir / "scratch"))
    broadcast = {"global": FlatTensors.from_tensors(first.state.tensors["global"])}
    vectors, weights = [], []
    for order in server._federation.plan():
        update = worker.carry_out([dataclasses.replace(order, block=None)], broadcast)[0].update
        assert update is not None
        vectors.append(FlatTensors.from_tensors(update.tensors).vector.astype(np.float64))
        weights.append(float(update.weight))  # type: ignore[arg-type]
    total, weight = np.zeros_like(vectors[0]), 0.0
    for start in range(0, 6, block):
        part, part_weight = np.zeros_like(total), 0.0
        for position in range(start, min(start + block, 6)):
            part = part + weights[position] * vectors[position]
            part_weight += weights[position]
        total, weight = total + part, weight + part_weight
    with contextlib.closing(server):
        server.round()
        server.finish()
    after = FlatTensors.from_tensors(final_state(run_dir).tensors["global"]).vector
    np.testing.assert_array_equal(after, (total / weight).astype(np.float32))


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in METHODS]
)
def test_a_single_block_has_the_bits_of_single_updates(tiny: Tiny, method: str) -> None:
    rule = ["method.lpa=false"] if method == "fedmlac" else []
    whole, single = (
        train_federation(tiny(*ALL, *rule, f"train.block={block}", f"run.name=b{block}", method=method))
        for block in (6, 1)
    )
    assert_same_bits(single, whole)


@pytest.mark.parametrize("together", [1, 2])
def test_any_order_of_work_and_any_division_of_blocks_give_the_same_bits(tiny: Tiny, together: int) -> None:
    common = (*ALL, f"train.together={together}", "train.block=4", "method.lpa=false")
    reference = known(tiny(*common, method="fedmlac"))
    whole, pool = finish_with_tree_pool(tiny(*common, "run.name=whole", method="fedmlac"))
    assert_same_bits(reference, whole)
    if together == 1:  # A batched client differs from a single one in the last bits.
        divided, divided_pool = finish_with_tree_pool(tiny(*common, "run.name=divided", method="fedmlac"), (0, 4))
        assert_same_bits(reference, divided)
        assert 6 * pool.bytes == 2 * 2 * divided_pool.bytes  # Two sums in float64 instead of six updates in float32.
        assert_same_bits(reference, finish_with_tree_pool(tiny(*common, "run.name=mixed", method="fedmlac"), (0,))[0])


PRUNING = (*ALL, "method.vl=0.2", "method.vh=0.2", "train.rounds=2")
"""A client out of six is excluded from each layer on each side."""


@pytest.mark.parametrize("block", [2, 4, 6])
def test_pruning_with_blocks_equals_pruning_of_single_updates(tiny: Tiny, block: int) -> None:
    """The means of all updates differ in their last bits. A float32 parameter differs only where its sum rounds differently."""
    single, blocks = (
        known_run(tiny(*PRUNING, f"train.block={size}", "train.rounds=1", method="fedmlac")) for size in (1, block)
    )
    for name, tensor in final_state(single).tensors["global"].items():
        torch.testing.assert_close(final_state(blocks).tensors["global"][name], tensor, rtol=2e-7, atol=0)
    metrics = [
        [
            (row.metric, row.value, row.count)
            for row in record.to_rows(record.read_rows(run_dir))
            if "lpa/" in row.metric
        ]
        for run_dir in (single, blocks)
    ]
    assert metrics[0] == metrics[1]
    assert any(value > 0 for _, value, _ in metrics[0])


def test_pruning_gives_the_same_bits_for_any_order_of_work_and_division(tiny: Tiny) -> None:
    common = (*PRUNING, "train.block=2")
    reference = known(tiny(*common, method="fedmlac"))
    for name, divided in (("whole", ()), ("divided", (0, 2, 4)), ("mixed", (2,))):
        tensors, _ = finish_with_tree_pool(tiny(*common, f"run.name={name}", method="fedmlac"), divided)
        assert_same_bits(reference, tensors)


class ForgetfulPool(TreePool):
    """Pool with a worker that loses the updates of a block before each pass."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        if orders[0].repeats:
            self.workers[""]._held = HeldBlocks()
        return super().run(orders, broadcast)


def test_lost_updates_of_a_block_are_trained_again_with_equal_bits(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    common = (*PRUNING, "train.block=4")
    reference = known(tiny(*common, method="fedmlac"))
    monkeypatch.setattr(f"{__name__}.TreePool", ForgetfulPool)
    tensors, _ = finish_with_tree_pool(tiny(*common, "run.name=lost", method="fedmlac"))
    assert_same_bits(reference, tensors)


@pytest.mark.parametrize("block", [1, 4])
def test_pruning_leaves_out_a_rejected_client(tiny: Tiny, block: int) -> None:
    """Five clients remain, and are pruned as usual."""
    common = [*ALL, "train.rounds=1", "run.max_failed=1.0", "method.rule={name: lpa, vl: 0.2, vh: 0.2}"]
    config = tiny(f"method.name={EXTRA}:Diverging", "method.bad=[s1]", *common, f"train.block={block}", "run.name=bad")
    with contextlib.closing(start_server(config)) as server:
        report = server.round()
        server.finish()
    assert list(report.rejected) == ["s1"]
    rows = record.to_rows(record.read_rows(Path(config.run.dir) / "bad"))
    assert {(row.value, row.count) for row in rows if row.metric.startswith("lpa/pruned")} == {(0.4, 5.0)}


def test_a_resumed_run_keeps_its_block(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(*ALL, "train.block=2", "run.name=stopped")
    with contextlib.closing(start_server(config)) as server:
        server.round()
        server.finish()
    assert_same_bits(known(tiny(*ALL, "train.block=2")), train_federation(config))

    # A run of an earlier version has no block in its commits.
    config = tiny(*ALL, "run.name=earlier")
    with contextlib.closing(start_server(config)) as server:
        server.round()
        server.finish()
    monkeypatch.setattr(block_size, "_BLOCKS", 2)
    assert_same_bits(known(tiny(*ALL, "train.block=1")), train_federation(config))
    automatic = train_federation(tiny(*ALL, "run.name=automatic"))  # 6 // 2
    assert_same_bits(known(tiny(*ALL, "train.block=3")), automatic)
    store = RunStore(Path(config.run.dir) / "automatic")
    assert store.load(store.latest() or "").block == 3
    store = RunStore(Path(config.run.dir) / "earlier")
    assert store.load(store.latest() or "").block == 1


def test_another_block_on_resume_is_rejected(tiny: Tiny) -> None:
    outcome = run(tiny(*ALL, "train.block=2", "train.rounds=1"))
    with pytest.raises(Exception, match="belongs to another configuration"):
        resume(outcome.run_dir, ["train.block=3", "train.rounds=2"])


@pytest.mark.parametrize("cohort", [1, 511, 512, 1024, 4096, 100_000])
def test_the_automatic_block_leaves_256_blocks(tiny: Tiny, cohort: int) -> None:
    config = tiny()
    chosen = block_size.choose_block(config.train, config.components, cohort)
    assert chosen == {1: 1, 511: 1, 512: 2, 1024: 4, 4096: 16, 100_000: 16}[cohort]
    single = tiny("method.rule=median")
    assert block_size.choose_block(single.train, single.components, cohort) == 1


@pytest.mark.parametrize(
    ("settings", "method", "reason"),
    [
        (["method.rule=krum"], "fedavg", "rule Krum needs each update"),
        (["method.rule={name: norm_clipping, norm: 1.0}"], "fedavg", "rule NormClipping needs each update"),
        (["attack=sign_flip"], "fedavg", "attack changes single updates"),
        (["train.groups={name: known, by: speaker}"], "fedavg", "train.groups needs each update"),
        (["train.deadline=1"], "fedavg", "train.deadline limits"),
        ([], "fedapta", "needs each update"),
        ([], "hermes", "method Hermes needs each update"),
    ],
)
def test_a_block_is_rejected_if_the_server_needs_single_updates(
    tiny: Tiny, settings: list[str], method: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"train.block=2 adds .*{reason}.*Set train.block to 1 or auto"):
        tiny(*settings, "train.block=2", method=method)
    tiny(*settings, "train.block=1", method=method)


def test_a_users_rule_or_method_is_not_associative_unless_it_declares_it(tmp_path: Path) -> None:
    from raydfl.methods.fedadam import FedAdam
    from raydfl.rules import WeightedMean

    class Own(WeightedMean):
        def __call__(self, *arguments, **options):  # type: ignore[no-untyped-def]
            return super().__call__(*arguments, **options)

    class OwnMethod(FedAdam):
        def aggregate(self, state, updates, rng):  # type: ignore[no-untyped-def]
            return super().aggregate(state, updates, rng)

    class Declared(FedAdam):
        associative = True

        def aggregate(self, state, updates, rng):  # type: ignore[no-untyped-def]
            return super().aggregate(state, updates, rng)

    class Derived(FedAdam):
        pass

    assert not Own.associative
    assert [cls.associative for cls in (OwnMethod, Declared, Derived)] == [False, True, True]


@pytest.mark.parametrize("block", [2, 4])
def test_a_rejected_client_is_left_out_of_its_block(tiny: Tiny, block: int) -> None:
    common = [*ALL, "train.rounds=1", f"train.block={block}", "run.max_failed=1.0"]
    config = tiny(f"method.name={EXTRA}:Diverging", "method.bad=[s1]", *common, "run.name=bad")
    with contextlib.closing(start_server(config)) as server:
        report = server.round()
        server.finish()
    assert list(report.rejected) == ["s1"]
    assert (report.clients, report.used) == (6, 5)
    single = tiny(f"method.name={EXTRA}:Diverging", "method.bad=[s1]", *common, "run.name=single")
    tensors, _ = finish_with_tree_pool(single, range(6))
    assert_same_bits(tensors, read_tensors(Path(config.run.dir) / "bad"))


@pytest.mark.parametrize("what", ["shape", "name", "key", "cut outside", "metric kind", "metric shape"])
def test_the_worker_rejects_an_update_for_the_reason_of_the_server(tiny: Tiny, what: str) -> None:
    common = (f"method.name={FAULTY}:Nonsense", f"method.what={what}", "method.round=1", *ALL)
    reasons = []
    for block in (1, 3):
        config = tiny(*common, "run.on_error=drop", f"train.block={block}", f"run.name=b{block}")
        with contextlib.closing(start_server(config)) as server:
            reasons.append(server.round().rejected)
        config = tiny(*common, f"train.block={block}", f"run.name=s{block}")
        with contextlib.closing(start_server(config)) as server, pytest.raises(ClientError, match="client 's2'"):
            server.round()
    assert reasons[0] == reasons[1]
    assert list(reasons[0]) == ["s2"]


def test_a_block_with_other_kinds_of_metrics_than_the_first_is_rejected(tiny: Tiny) -> None:
    common = (f"method.name={FAULTY}:Nonsense", "method.what=metric kind", "method.round=1", "method.client=s4")
    config = tiny(*common, *ALL, "run.on_error=drop", "train.block=4", "run.name=kinds")
    with contextlib.closing(start_server(config)) as server:
        report = server.round()
    # The first of two clients decides the kind of its block, and the first block decides the kind of the round.
    assert list(report.rejected) == ["s4", "s5"]
    assert all("share" in reason for reason in report.rejected.values())


def test_rows_of_clients_are_recorded_with_blocks(tiny: Tiny) -> None:
    tables = []
    for block in (1, 4):
        run_dir = run(tiny(*ALL, "train.rounds=1", f"train.block={block}", f"run.name=b{block}")).run_dir
        rows = record.to_rows(record.read_rows(run_dir))
        tables.append(
            [
                (row.phase, row.client, row.split, row.metric, row.value, row.count)
                for row in rows
                if row.phase == "train" and not row.metric.startswith(("seconds", "timeline"))
            ]
        )
    assert tables[0] == tables[1]
    assert len(tables[0]) > 6


def test_a_replayed_client_of_a_block_has_its_own_update(tiny: Tiny) -> None:
    outcome = run(tiny(*ALL, "train.block=4", "train.rounds=1"))
    result = replay(outcome.run_dir, 1, "s5")
    assert result.update is not None
    assert result.update.senders is None
    assert not result.rejected
