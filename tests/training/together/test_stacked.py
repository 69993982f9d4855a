"""Batches of several clients against the batches of each client alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from several_clients import BANDS, FRAMES, make_examples, make_steps

from raydfl.core.settings import FIRST_VIEW
from raydfl.data.examples import Examples, Frames
from raydfl.methods.fedavg import FedAvg
from raydfl.models.dense import MeanMLP
from raydfl.training import _fit as train
from raydfl.training.together import batches as resident_module
from raydfl.training.together.batches import ResidentFrames, StackedBatches, move_frames


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_every_client_has_its_own_batches_and_padding_has_weight_0(
    lengths: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_examples = make_examples(20, 0, lengths)
    examples = [all_examples.take(np.arange(*part)) for part in ((4, 14), (13, 20), (0, 3))]
    monkeypatch.setattr(resident_module, "_SHARE", 1 if fits else 0)
    monkeypatch.setattr(resident_module, "_get_free_memory", lambda device: 1e9)
    plans = [client_examples.order(4, np.random.default_rng(1)) for client_examples in examples]
    assert [[len(index) for index in plan] for plan in plans] == [[4, 4, 2], [4, 3], [3]]
    batches = StackedBatches(examples, plans, torch.device("cpu"))
    views = [client_examples.first_view for client_examples in examples]
    resident = ResidentFrames(views, plans, list_windows(views, plans), 4, torch.device("cpu"))
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
    device_frames = move_frames(all_examples.first_view.store, torch.device("cpu"))
    assert (device_frames is not None) == fits
    assert (resident._frames is device_frames) == fits


def test_clients_of_different_stores_are_batched() -> None:
    """Clean and noisy recordings are an example of two stores."""
    examples = [make_examples(5, 1), make_examples(3, 2)]
    plans = [client_examples.order(5, None) for client_examples in examples]
    views = [client_examples.first_view for client_examples in examples]
    cut = ResidentFrames(views, plans, list_windows(views, plans), 5, torch.device("cpu")).cut(0, 2, 5, FRAMES)
    for client, client_examples in enumerate(examples):
        assert torch.equal(cut[client, : len(client_examples)], client_examples.batch(plans[client][0]).x)
    assert not cut[1, 3:].any()


@pytest.mark.parametrize("lengths", [False, True])
def test_a_single_client_on_a_device_has_the_same_batches(lengths: bool) -> None:
    """Cut the batches of a GPU on the CPU."""
    (step,) = make_steps(FedAvg(), lambda: {"model": MeanMLP(BANDS, 3)}, sizes=(10,), lengths=lengths)
    expected = list(step.data.train.batches(4, np.random.default_rng(7), "cpu"))
    device = type("Device", (), {"type": "elsewhere"})()
    step.rng, step.device = np.random.default_rng(7), device  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "StackedBatches", lambda e, p, *_, **__: stack_on_device(e, p))
        batches = list(train._batches(step, step.data.train, None, 1, 0))
    assert len(batches) == len(expected) == 3
    for batch, reference in zip(batches, expected, strict=True):
        assert torch.equal(batch.x, reference.x)
        assert torch.equal(batch.y, reference.y)
        assert batch.weight is None
        assert (batch.lengths is None) == (reference.lengths is None) == (not lengths)
        if batch.lengths is not None and reference.lengths is not None:
            assert torch.equal(batch.lengths, reference.lengths)


def stack_on_device(examples: list[Examples], plans: list[list[np.ndarray]]) -> StackedBatches:
    batches = StackedBatches(examples, plans, torch.device("cpu"))
    views = [client_examples.first_view for client_examples in examples]
    batches._views[FIRST_VIEW]._resident = ResidentFrames(
        views, plans, list_windows(views, plans), 4, torch.device("cpu")
    )
    return batches


def list_windows(views: list[Frames], plans: list[list[np.ndarray]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return first rows and numbers of frames of each batch's examples, with whole clips."""
    return [[(view.starts[i], view.counts[i]) for i in plan] for view, plan in zip(views, plans, strict=True)]


def test_the_order_of_examples_matches_their_batches() -> None:
    examples = make_examples(10, 0)
    order = examples.order(4, np.random.default_rng(3))
    batches = list(examples.batches(4, np.random.default_rng(3)))
    assert [len(index) for index in order] == [4, 4, 2]
    for index, batch in zip(order, batches, strict=True):
        assert torch.equal(batch.y, torch.from_numpy(examples.labels[index]))
    np.testing.assert_array_equal(np.concatenate(examples.order(4, None)), np.arange(10))
    assert examples.take(np.zeros(0, np.int64)).order(4, np.random.default_rng(0)) == []
