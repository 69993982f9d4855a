"""Pruning in passes over blocks, compared with pruning of single updates."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from test_cuts import SERVER, draw_updates

from raydfl.core.errors import ClientError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Task, Tensors, Update
from raydfl.engine.orders import Block, Order
from raydfl.engine.passes import BlockUpdates, ReceivedBlock, select_updates
from raydfl.rules import Aggregate, LayerwisePruning, WeightedMean


def make_block(first: int, clients: int, accepted: int = 0) -> Order:
    return Order(first, Task(f"c{first}"), 0, 1.0, block=Block(first, clients, {}, accepted))


def prune_in_blocks(
    rule: LayerwisePruning, clients: Sequence[Sequence[Update]], size: int, current: Mapping[str, Tensors]
) -> Aggregate:
    """Sum blocks of clients, and let the rule combine their selected sums."""
    blocks, sums = [], []
    for first in range(0, len(clients), size):
        members, kept = clients[first : first + size], BlockUpdates(current)
        updates = [update for client in members for update in kept.take(client)]
        sums += pickle.loads(pickle.dumps(rule.sum_updates(updates, {})))
        blocks.append(ReceivedBlock([make_block(first, len(members))], len(members), kept))
    return rule(select_updates(rule, sums, blocks, lambda orders, means: iter(())), current)


def assert_equal(result: Aggregate, expected: Aggregate) -> None:
    """Compare to the rounding of float32 sums. Metrics are equal."""
    assert result.tensors.keys() == expected.tensors.keys()
    for key, tensors in expected.tensors.items():
        assert result.tensors[key].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(result.tensors[key][name], tensor, rtol=2e-6, atol=1e-6)
    assert {name: (r.total, r.count) for name, r in result.report.items()} == {
        name: (r.total, r.count) for name, r in expected.report.items()
    }
    assert result.influence is not None
    assert expected.influence is not None
    np.testing.assert_allclose(result.influence, expected.influence, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("seed", range(8))
def test_blocks_of_cut_updates_give_the_result_of_single_updates(seed: int, size: int) -> None:
    """Draw slices of tensors and kinds of weights."""
    rng = np.random.default_rng(seed)
    clients = [[update] for _ in range(4) for update in draw_updates(rng)]
    rule = LayerwisePruning(vl=0.2, vh=0.3, by="tensor")
    current: dict[str, Tensors] = dict(SERVER)
    assert_equal(prune_in_blocks(rule, clients, size, current), rule([u for [u] in clients], current))


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("by", ["module", "tensor"])
def test_blocks_of_clients_with_different_tensors_and_keys(size: int, by: str) -> None:
    """A layer is pruned among the senders of its tensors."""
    rng = np.random.default_rng(size)

    def draw(names: Sequence[str], key: str) -> Update:
        tensors = {name: torch.from_numpy(rng.normal(3, 1, 4).astype(np.float32)) for name in names}
        return Update(tensors, float(rng.integers(1, 50)), key=key)

    both, one = ["a.weight", "a.bias", "b.weight"], ["b.weight", "a.weight"]
    clients = [[draw(both if number % 3 else one, "global")] for number in range(11)]
    for number in (2, 5, 7, 8):
        clients[number].append(draw(["c.weight"], "other"))
    current = {key: {name: torch.zeros(4) for name in [*both, "c.weight"]} for key in ("global", "other")}
    rule = LayerwisePruning(vl=0.2, vh=0.3, by=by)  # type: ignore[arg-type]
    expected = rule([update for client in clients for update in client], current)
    assert_equal(prune_in_blocks(rule, clients, size, current), expected)


def test_equal_updates_are_pruned_in_client_order() -> None:
    """Their distances are equal to the bit in any block, although the mean differs in its last bits from them."""
    values = np.random.default_rng(1).normal(size=50).astype(np.float32)
    clients = [[Update({"a": torch.from_numpy(values)}, 1.0)] for _ in range(10)]
    rule = LayerwisePruning(vl=0.2, vh=0.3)
    for size in (1, 3, 10):
        result = prune_in_blocks(rule, clients, size, {})
        assert result.influence is not None
        assert result.influence.tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0]


def test_senders_of_selected_sums_are_those_of_all_updates() -> None:
    """Methods may count senders. Excluded clients are senders, too."""
    rng = np.random.default_rng(3)
    kept = BlockUpdates({})
    updates = [Update({"a": torch.from_numpy(rng.normal(size=3)).float()}, 2.0) for _ in range(10)]
    for update in updates:
        kept.take([update])
    rule = LayerwisePruning(vl=0.3, vh=0.3)
    block = ReceivedBlock([make_block(0, 10)], 10, kept)
    [total] = select_updates(rule, rule.sum_updates(updates, {}), [block], lambda orders, means: iter(()))
    assert (total.senders, total.weight) == ({"a": 10}, 8.0)


def test_a_repeated_training_with_fewer_clients_is_an_error() -> None:
    kept = BlockUpdates({})
    kept.take([Update({"a": torch.zeros(2)}, 1.0)])
    with pytest.raises(ClientError, match="were trained again after a loss, and 1 of them were accepted instead of 2"):
        kept.repeat(make_block(0, 2, accepted=2), LayerwisePruning(), {})


def test_a_subclass_of_lpa_needs_single_updates() -> None:
    class Own(LayerwisePruning):
        pass

    assert LayerwisePruning.associative
    assert not Own.associative


def test_the_first_sums_have_equal_weights() -> None:
    updates = [Update({"a": torch.tensor([1.0])}, 5.0), Update({"a": torch.tensor([4.0])}, 0.0)]
    [total] = LayerwisePruning().sum_updates(updates, {"global": Layout(("a",), ((1,),))})
    assert FlatTensors.from_tensors(total.tensors).vector.tolist() == [5.0]
    assert total.weight == 2.0
    assert WeightedMean().sum_updates(updates, {})[0].weight == 5.0
