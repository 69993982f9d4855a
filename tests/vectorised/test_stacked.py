"""Batches of several clients against those that each client has alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from several_clients import FRAMES, make_examples

from raydfl.data.stacked import StackedBatches, _Resident


@pytest.mark.parametrize("lengths", [False, True])
def test_every_client_has_its_own_batches_and_padding_of_weight_0(lengths: bool) -> None:
    examples = [make_examples(size, size, lengths) for size in (10, 7, 3)]
    plans = [own.order(4, np.random.default_rng(1)) for own in examples]
    assert [[len(index) for index in plan] for plan in plans] == [[4, 4, 2], [4, 3], [3]]
    batches = StackedBatches(examples, plans, torch.device("cpu"))
    resident = _Resident(examples, plans, 4, torch.device("cpu"))
    assert len(batches) == 3
    assert [batches.clients(step) for step in range(3)] == [3, 2, 1]
    for step in range(3):
        batch = batches.batch(step)
        width = batch.x.shape[1]
        assert width == max(len(plan[step]) for plan in plans if step < len(plan))
        cut = resident.cut(step, batches.clients(step), width, batch.x.shape[2])
        assert torch.equal(cut, batch.x)
        for client in range(batches.clients(step)):
            alone = examples[client].batch(plans[client][step])
            size, frames = alone.x.shape[:2]
            assert torch.equal(batch.x[client, :size, :frames], alone.x)
            assert not batch.x[client, size:].any()
            assert not batch.x[client, :, frames:].any()
            assert torch.equal(batch.y[client, :size], alone.y)
            assert not batch.y[client, size:].any()
            if batch.weight is not None:
                assert batch.weight[client].tolist() == [1.0] * size + [0.0] * (width - size)
            else:
                assert size == width
            if alone.lengths is None:
                assert batch.lengths is None
                assert batch.x.shape[2] == FRAMES
            else:
                assert batch.lengths is not None
                assert batch.lengths[client].tolist() == alone.lengths.tolist() + [1] * (width - size)
    assert batches.batch(2).weight is None


def test_examples_are_ordered_as_their_batches_are() -> None:
    examples = make_examples(10, 0)
    order = examples.order(4, np.random.default_rng(3))
    batches = list(examples.batches(4, np.random.default_rng(3)))
    assert [len(index) for index in order] == [4, 4, 2]
    for index, batch in zip(order, batches, strict=True):
        assert torch.equal(batch.y, torch.from_numpy(examples.labels[index]))
    np.testing.assert_array_equal(np.concatenate(examples.order(4, None)), np.arange(10))
    assert examples.take(np.zeros(0, np.int64)).order(4, np.random.default_rng(0)) == []
