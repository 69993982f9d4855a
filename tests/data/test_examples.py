from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raydfl.data.examples import Examples
from raydfl.data.features.cache import FeatureStore
from raydfl.testing import make_examples


def make_store(lengths: list[int], dtype: type = np.float32) -> FeatureStore:
    """Make a store of clips in which all frames differ."""
    total = sum(lengths)
    frames = np.arange(total * 3, dtype=dtype).reshape(total, 3)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return FeatureStore(Path("none"), frames, offsets, np.array(lengths), None, {})


def make_numbered_examples(lengths: list[int], length: int | None = None, dtype: type = np.float32) -> Examples:
    clips = make_store(lengths, dtype)
    count = len(lengths)
    return make_examples(np.arange(count) % 2, clips, clips.offsets[:-1], np.array(lengths), length)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_batches_of_fixed_length_have_no_lengths(dtype: type) -> None:
    data = make_numbered_examples([4] * 6, length=4, dtype=dtype)
    batch = data.batch(np.array([5, 0, 5]))
    assert batch.x.dtype == torch.float32
    assert batch.y.dtype == torch.int64
    assert batch.lengths is None
    assert batch.weight is None
    for row, index in enumerate([5, 0, 5]):
        np.testing.assert_array_equal(batch.x[row].numpy(), data.first_view.store.clip(index))
    assert batch.y.tolist() == [1, 0, 1]
    batch.x[0] = -1.0  # a batch is a copy
    assert data.first_view.store.frames.min() == 0


def test_batches_of_unequal_lengths_are_padded_with_zeros() -> None:
    data = make_numbered_examples([4, 2, 7, 1])
    batch = data.batch(np.array([1, 2, 0]))
    assert batch.x.shape == (3, 7, 3)
    assert batch.lengths is not None
    assert batch.lengths.dtype == torch.int64
    assert batch.lengths.tolist() == [2, 7, 4]
    for row, index in enumerate([1, 2, 0]):
        clip = data.first_view.store.clip(index)
        np.testing.assert_array_equal(batch.x[row, : len(clip)].numpy(), clip)
        assert not batch.x[row, len(clip) :].any()
    assert data.batch(np.array([1, 3])).x.shape == (2, 2, 3)  # padded to the longest clip of the batch
    batch = data.batch(np.array([0, 0]))
    assert batch.lengths is not None  # also for clips of equal length, so that all batches have the same fields


def test_batches_cover_all_examples_in_order_or_shuffled() -> None:
    data = make_numbered_examples([4] * 10, length=4)
    batches = list(data.batches(4, None))
    assert [len(batch.y) for batch in batches] == [4, 4, 2]
    whole = torch.cat([b.x for b in batches]).numpy()
    np.testing.assert_array_equal(whole.reshape(-1, 3), data.first_view.store.frames)

    def list_order(seed: int) -> list[int]:
        return [int(x[0, 0]) // 12 for b in data.batches(3, np.random.default_rng(seed)) for x in b.x]

    assert sorted(list_order(1)) == list(range(10))
    assert list_order(1) == list_order(1) == np.random.default_rng(1).permutation(10).tolist()
    assert list_order(1) != list_order(2)


def test_take_selects_examples() -> None:
    data = make_numbered_examples([4, 2, 7, 1])
    part = data.take(np.array([2, 0]))
    assert len(part) == 2
    assert part.clips.tolist() == [2, 0]
    assert part.labels.tolist() == [0, 0]
    np.testing.assert_array_equal(part.batch(np.array([0])).x[0].numpy(), data.first_view.store.clip(2))
    empty = data.take(np.zeros(0, np.int64))
    assert len(empty) == 0
    assert list(empty.batches(4, None)) == []
    assert empty.batch(np.zeros(0, np.int64)).x.shape == (0, 1, 3)


def test_read_ahead_requests_the_bytes_of_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raydfl.data.features import cache

    whole = make_store([4, 2, 7, 1])
    np.save(tmp_path / "frames.npy", whole.frames)
    mapped = FeatureStore(tmp_path, np.load(tmp_path / "frames.npy"), whole.offsets, whole.lengths, None, {})
    data = make_examples(np.zeros(2, int), mapped, whole.offsets[[2, 0]], np.array([7, 4]), None)
    content = (tmp_path / "frames.npy").read_bytes()
    requested: list[bytes] = []
    monkeypatch.setattr(
        cache.os, "posix_fadvise", lambda fd, start, size, _: requested.append(content[start : start + size])
    )
    data.read_ahead()
    assert requested == []  # the store fits in memory
    mapped.__dict__["fits_in_memory"] = False
    data.read_ahead()
    assert requested == [whole.clip(2).tobytes(), whole.clip(0).tobytes()]
    monkeypatch.delattr(cache.os, "posix_fadvise")  # as on macOS
    data.read_ahead()
    assert len(requested) == 2
