"""Batches of several clients against those that each client has alone."""

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
def test_every_client_has_its_own_batches_and_padding_of_weight_0(
    lengths: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = make_examples(20, 0, lengths)
    examples = [every.take(np.arange(*part)) for part in ((4, 14), (13, 20), (0, 3))]
    monkeypatch.setattr(resident_module, "_SHARE", 1 if fits else 0)
    monkeypatch.setattr(resident_module, "_get_free_memory", lambda device: 1e9)
    plans = [own.order(4, np.random.default_rng(1)) for own in examples]
    assert [[len(index) for index in plan] for plan in plans] == [[4, 4, 2], [4, 3], [3]]
    batches = StackedBatches(examples, plans, torch.device("cpu"))
    views = [own.first_view for own in examples]
    resident = ResidentFrames(views, plans, windows(views, plans), 4, torch.device("cpu"))
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
    moved = move_frames(every.first_view.store, torch.device("cpu"))
    assert (moved is not None) == fits
    assert (resident._frames is moved) == fits


def test_clients_of_different_stores_are_put_together() -> None:
    """As clients with clean and with noisy recordings are."""
    examples = [make_examples(5, 1), make_examples(3, 2)]
    plans = [own.order(5, None) for own in examples]
    views = [own.first_view for own in examples]
    cut = ResidentFrames(views, plans, windows(views, plans), 5, torch.device("cpu")).cut(0, 2, 5, FRAMES)
    for client, own in enumerate(examples):
        assert torch.equal(cut[client, : len(own)], own.batch(plans[client][0]).x)
    assert not cut[1, 3:].any()


@pytest.mark.parametrize("lengths", [False, True])
def test_a_client_alone_on_a_device_has_the_same_batches(lengths: bool) -> None:
    """The batches that a GPU would cut for itself, cut on the CPU."""
    (step,) = make_steps(FedAvg(), lambda: {"model": MeanMLP(BANDS, 3)}, sizes=(10,), lengths=lengths)
    expected = list(step.data.train.batches(4, np.random.default_rng(7), "cpu"))
    device = type("Device", (), {"type": "elsewhere"})()
    step.rng, step.device = np.random.default_rng(7), device  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train, "StackedBatches", lambda e, p, *_: on_device(e, p))
        found = list(train._batches(step, step.data.train, None, 1, 0))
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
        assert one.weight is None
        assert (one.lengths is None) == (other.lengths is None) == (not lengths)
        if one.lengths is not None and other.lengths is not None:
            assert torch.equal(one.lengths, other.lengths)


def on_device(examples: list[Examples], plans: list[list[np.ndarray]]) -> StackedBatches:
    batches = StackedBatches(examples, plans, torch.device("cpu"))
    views = [own.first_view for own in examples]
    batches._views[FIRST_VIEW]._resident = ResidentFrames(views, plans, windows(views, plans), 4, torch.device("cpu"))
    return batches


def windows(views: list[Frames], plans: list[list[np.ndarray]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """First rows and numbers of frames of the examples of each batch, whole."""
    return [[(own.starts[i], own.counts[i]) for i in plan] for own, plan in zip(views, plans, strict=True)]


def test_examples_are_ordered_as_their_batches_are() -> None:
    examples = make_examples(10, 0)
    order = examples.order(4, np.random.default_rng(3))
    batches = list(examples.batches(4, np.random.default_rng(3)))
    assert [len(index) for index in order] == [4, 4, 2]
    for index, batch in zip(order, batches, strict=True):
        assert torch.equal(batch.y, torch.from_numpy(examples.labels[index]))
    np.testing.assert_array_equal(np.concatenate(examples.order(4, None)), np.arange(10))
    assert examples.take(np.zeros(0, np.int64)).order(4, np.random.default_rng(0)) == []
