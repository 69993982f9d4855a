"""Partial sums of blocks, compared with sums written out in NumPy."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_cuts import SERVER, draw_updates

from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Update
from raydfl.rules import Rule, UniformMean, WeightedMean

LAYOUTS = {key: Layout.from_tensors(tensors) for key, tensors in SERVER.items()}


def sum_blocks(rule: Rule, updates: Sequence[Update], size: int) -> list[Update]:
    """Sum blocks of updates, and pickle the sums like Ray."""
    blocks = [updates[start : start + size] for start in range(0, len(updates), size)]
    return [total for block in blocks for total in pickle.loads(pickle.dumps(rule.sum_updates(block, LAYOUTS)))]


def to_bytes(rule: Rule, updates: Sequence[Update]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in rule(updates, SERVER).tensors["global"].items()}


@pytest.mark.parametrize("rule", [WeightedMean(), UniformMean()])
@pytest.mark.parametrize("seed", range(20))
def test_a_single_sum_has_the_bits_of_its_updates(rule: Rule, seed: int) -> None:
    """Draw slices of tensors, orders of indices and kinds of weights."""
    updates = draw_updates(np.random.default_rng(seed))
    assert to_bytes(rule, sum_blocks(rule, updates, len(updates))) == to_bytes(rule, updates)
    assert to_bytes(rule, sum_blocks(rule, updates, 1)) == to_bytes(rule, updates)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_blocks_are_added_in_float64_in_order(size: int) -> None:
    """Large values cancel, so the order of additions changes the result."""
    rng = np.random.default_rng(size)
    values = (rng.normal(size=(10, 50)) * 10.0 ** rng.integers(-8, 9, (10, 50))).astype(np.float32)
    weights = rng.uniform(0.1, 100, 10)
    updates = [Update({"w": torch.from_numpy(row)}, float(weight)) for row, weight in zip(values, weights, strict=True)]
    total, weight = np.zeros(50), 0.0
    for start in range(0, 10, size):
        part, part_weight = np.zeros(50), 0.0
        for position in range(start, min(start + size, 10)):
            part = part + weights[position] * values[position].astype(np.float64)
            part_weight = part_weight + weights[position]
        total, weight = total + part, weight + part_weight
    sums = sum_blocks(WeightedMean(), updates, size)
    added = sum(FlatTensors.from_tensors(update.tensors).vector for update in sums)
    np.testing.assert_array_equal(added, total)
    result = WeightedMean()(sums, {"global": {"w": torch.zeros(50)}}).tensors["global"]["w"]
    np.testing.assert_array_equal(result.numpy(), (total / weight).astype(np.float32))
    in_sequence = WeightedMean().sum_updates(updates, {})[0]
    assert not np.array_equal(FlatTensors.from_tensors(in_sequence.tensors).vector, total)


def test_a_sum_counts_its_senders_and_separates_keys() -> None:
    updates = [
        Update({"a": torch.ones(2), "b": torch.ones(3)}, 2.0),
        Update({"a": torch.ones(2)}, 3.0),
        Update({"a": torch.ones(2), "b": torch.ones(3)}, 5.0, key="other"),
        Update({"c": torch.ones(1)}, 7.0),
    ]
    first, other = WeightedMean().sum_updates(updates, {})
    assert first.senders == {"a": 2, "b": 1, "c": 1}
    assert first.weight == {"a": 5.0, "b": 2.0, "c": 7.0}
    assert (other.key, other.weight, other.senders) == ("other", 5.0, {"a": 1, "b": 1})
    assert {name: tensor.tolist() for name, tensor in first.tensors.items()} == {
        "a": [5.0, 5.0],
        "b": [2.0, 2.0, 2.0],
        "c": [7.0],
    }
