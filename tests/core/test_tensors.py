"""Flat vectors: round trips, avoided copies, and read-only memory."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from raydfl.core import tensors as tensors_module
from raydfl.core.tensors import FlatTensors, Layout, OwnTensors, flatten

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)


def make_tensors() -> dict[str, Tensor]:
    return {
        "a/x.weight": torch.arange(6.0).view(2, 3),
        "a/x.bias": torch.tensor([7.0, 8.0]),
        "b/scale": torch.tensor(9.0),
    }


@given(shapes=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_views_of_the_flat_vector_equal_the_tensors(shapes: list[tuple[int, ...]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}
    layout, vector = flatten(tensors)
    assert vector.dtype == np.float32
    assert vector.flags.c_contiguous
    assert vector.shape == (sum(tensor.numel() for tensor in tensors.values()),) == (layout.size,)
    restored = layout.views(vector)
    assert list(restored) == list(tensors)
    for name, tensor in tensors.items():
        assert restored[name].shape == tensor.shape
        assert torch.equal(restored[name], tensor)
        assert np.array_equal(vector[layout.columns(name)], tensor.flatten().numpy())


def test_the_layout_has_offsets_and_columns_in_order() -> None:
    layout, vector = flatten(make_tensors())
    assert layout.offsets == (0, 6, 8, 9)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert layout.columns("a/x.bias") == slice(6, 8)
    with pytest.raises(KeyError):
        layout.columns("a/x")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_all_types_are_flattened_to_float32(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    layout, vector = flatten({"v": values})
    assert vector.dtype == np.float32
    assert layout.views(vector)["v"].to(dtype).equal(values)


def test_strided_tensors_and_parameters_are_flattened_in_row_order() -> None:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3).T)
    assert flatten({"w": weight})[1].tolist() == [0, 3, 1, 4, 2, 5]


def test_views_share_memory_and_flat_tensors_are_not_copied() -> None:
    layout, vector = flatten(make_tensors())
    view = layout.views(vector)["a/x.bias"]
    vector[6] = -1
    assert view[0] == -1
    flat = FlatTensors(layout, vector)
    assert flatten(flat)[1] is vector
    assert FlatTensors.from_tensors(flat) is flat
    assert Layout.from_tensors(flat) is layout
    assert np.shares_memory(flat["a/x.weight"].numpy(), vector)
    whole = torch.from_numpy(vector)
    assert layout.views(whole)["b/scale"].data_ptr() == whole[8:].data_ptr()


def test_flat_tensors_behave_like_the_original_mapping() -> None:
    tensors = make_tensors()
    flat = FlatTensors.from_tensors(tensors)
    assert list(flat) == list(tensors)
    assert len(flat) == 3
    assert "a/x.bias" in flat
    assert "a/x" not in flat
    assert all(torch.equal(flat[name], tensors[name]) for name in tensors)
    assert repr(flat) == "FlatTensors(3 tensors, 9 elements)"
    with pytest.raises(KeyError):
        flat["a/x"]


def test_views_of_a_read_only_array_cause_no_warnings_and_no_writes() -> None:
    layout, vector = flatten(make_tensors())
    vector.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        views = layout.views(vector)
        FlatTensors(layout, vector)["b/scale"].item()
    linear = nn.Linear(3, 2)
    linear.load_state_dict({"weight": views["a/x.weight"], "bias": views["a/x.bias"]})
    linear(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(linear.parameters(), lr=1.0).step()
    assert not torch.equal(linear.weight, views["a/x.weight"])
    assert not vector.flags.writeable
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]


def test_equal_layouts_are_interchangeable_and_have_small_pickles() -> None:
    first, second = Layout.from_tensors(make_tensors()), Layout.from_tensors(make_tensors())
    assert first == second
    assert hash(first) == hash(second)
    assert first != Layout.from_tensors({"a/x.weight": torch.zeros(3, 2)})
    before = len(pickle.dumps(first))
    first.columns("b/scale")  # derives offsets and positions
    assert len(pickle.dumps(first)) == before < 300
    assert pickle.loads(pickle.dumps(first)) == first


def test_flat_tensors_pickle_as_one_buffer_out_of_band() -> None:
    flat = FlatTensors.from_tensors({"w": torch.randn(10_000)})
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(flat, protocol=5, buffer_callback=buffers.append)
    assert len(content) < 500
    assert len(buffers) == 1
    restored = pickle.loads(content, buffers=buffers)
    assert np.shares_memory(restored.vector, flat.vector)
    assert torch.equal(restored["w"], flat["w"])


def test_mismatched_vectors_and_names_are_rejected() -> None:
    layout, vector = flatten(make_tensors())
    with pytest.raises(ValueError, match=r"the vector has shape \(8,\), not \(9,\)"):
        layout.views(vector[:8])
    with pytest.raises(ValueError, match=r"contiguous float32 or float64 vector of 9 elements is needed, not float16"):
        FlatTensors(layout, vector.astype(np.float16))
    with pytest.raises(ValueError, match=r"contiguous float32 or float64 vector of 9 elements"):
        FlatTensors(layout, np.zeros(18, np.float32)[::2])
    with pytest.raises(ValueError, match="one shape for each name: 2 names, 1 shapes"):
        Layout(("a", "b"), ((1,),))
    with pytest.raises(ValueError, match="names each tensor once"):
        Layout(("a", "a"), ((1,), (1,)))
    with pytest.raises(TypeError, match="'c' is torch.complex64: send its real and imaginary parts"):
        flatten({"c": torch.zeros(2, dtype=torch.complex64)})


def test_the_concatenation_for_gpus_matches_flatten() -> None:
    """Concatenate on the CPU as on a GPU, with several types, shapes and strides."""
    tensors = {
        "a": torch.randn(3, 4).t(),
        "b": torch.randn(2, dtype=torch.float64),
        "c": torch.arange(5),
        "d": nn.Parameter(torch.randn(())),
        "e": torch.empty(0, 3),
    }
    joined = tensors_module._concatenate(list(tensors.values()))
    assert (joined.dtype, joined.requires_grad) == (torch.float32, False)
    np.testing.assert_array_equal(joined.numpy(), flatten(tensors)[1])


def test_the_vector_is_copied_to_a_device_once() -> None:
    flat = FlatTensors.from_tensors({"a": torch.ones(2, 3), "b": torch.zeros(4)})
    assert flat.to(torch.device("cpu")).data_ptr() == flat.whole.data_ptr()
    device = torch.device("meta")
    moved = flat.to(device)
    assert (moved.device, moved.shape) == (device, (10,))
    assert flat.to(device) is moved
    copies = OwnTensors(flat, device)
    assert copies["a"].device == device
    assert copies["a"]._base is not None
    assert copies["a"]._base is not moved, "clients must not share their copies"
    assert pickle.loads(pickle.dumps(flat))._moved is None


def test_aligned_copies_have_the_values_and_begin_at_multiples_of_16_bytes() -> None:
    """cuDNN's batch norm fails at unaligned addresses."""
    tensors = {
        "a": torch.randn(3),
        "b": torch.randn(2, 3),
        "c": torch.randn(()),
        "d": torch.empty(0),
        "e": torch.randn(5),
    }
    layout, vector = flatten(tensors)
    views, copies = layout.views(vector), layout.copy_aligned(torch.from_numpy(vector))
    assert any(view.data_ptr() % 16 for view in views.values())
    assert [*copies] == [*tensors]
    for name, copied in copies.items():
        assert torch.equal(copied, tensors[name])
        assert copied.data_ptr() % 16 == 0
        copied.fill_(7)
    assert flatten(tensors)[1].tobytes() == vector.tobytes(), "the copies have memory of their own"
    assert Layout.from_shapes({}).copy_aligned(torch.empty(0)) == {}


@pytest.mark.parametrize(
    ("device", "requested", "expected"), [("cuda:0", "cuda", True), ("cuda:1", "cuda:0", False), ("cpu", "cuda", False)]
)
def test_a_device_without_an_index_matches_all_of_its_type(device: str, requested: str, expected: bool) -> None:
    assert tensors_module._is_on(torch.device(device), torch.device(requested)) == expected
