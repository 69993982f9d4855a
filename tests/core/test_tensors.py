"""Flat vectors: what goes in comes out, nothing is copied that need not be, and read-only memory stays as it is."""

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


def example() -> dict[str, Tensor]:
    return {
        "a/x.weight": torch.arange(6.0).view(2, 3),
        "a/x.bias": torch.tensor([7.0, 8.0]),
        "b/scale": torch.tensor(9.0),
    }


@given(shapes=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_views_of_the_flat_vector_are_the_tensors(shapes: list[tuple[int, ...]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}
    layout, vector = flatten(tensors)
    assert vector.dtype == np.float32
    assert vector.flags.c_contiguous
    assert vector.shape == (sum(tensor.numel() for tensor in tensors.values()),) == (layout.size,)
    back = layout.views(vector)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)
        assert np.array_equal(vector[layout.columns(name)], tensor.flatten().numpy())


def test_order_offsets_and_columns() -> None:
    layout, vector = flatten(example())
    assert layout.offsets == (0, 6, 8, 9)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert layout.columns("a/x.bias") == slice(6, 8)
    with pytest.raises(KeyError):
        layout.columns("a/x")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_everything_travels_as_float32(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    layout, vector = flatten({"v": values})
    assert vector.dtype == np.float32
    assert layout.views(vector)["v"].to(dtype).equal(values)


def test_strided_tensors_and_parameters_are_flattened_in_row_order() -> None:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3).T)
    assert flatten({"w": weight})[1].tolist() == [0, 3, 1, 4, 2, 5]


def test_views_share_memory_both_ways_and_flat_tensors_are_not_copied() -> None:
    layout, vector = flatten(example())
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


def test_flat_tensors_are_the_mapping_they_were_made_from() -> None:
    tensors = example()
    flat = FlatTensors.from_tensors(tensors)
    assert list(flat) == list(tensors)
    assert len(flat) == 3
    assert "a/x.bias" in flat
    assert "a/x" not in flat
    assert all(torch.equal(flat[name], tensors[name]) for name in tensors)
    assert repr(flat) == "FlatTensors(3 tensors, 9 elements)"
    with pytest.raises(KeyError):
        flat["a/x"]


def test_reading_a_read_only_array_neither_warns_nor_changes_it() -> None:
    layout, vector = flatten(example())
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


def test_equal_layouts_are_interchangeable_and_pickle_small() -> None:
    one, other = Layout.from_tensors(example()), Layout.from_tensors(example())
    assert one == other
    assert hash(one) == hash(other)
    assert one != Layout.from_tensors({"a/x.weight": torch.zeros(3, 2)})
    before = len(pickle.dumps(one))
    one.columns("b/scale")  # derives offsets and positions
    assert len(pickle.dumps(one)) == before < 300
    assert pickle.loads(pickle.dumps(one)) == one


def test_flat_tensors_pickle_as_one_buffer_out_of_band() -> None:
    flat = FlatTensors.from_tensors({"w": torch.randn(10_000)})
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(flat, protocol=5, buffer_callback=buffers.append)
    assert len(inside) < 500
    assert len(buffers) == 1
    back = pickle.loads(inside, buffers=buffers)
    assert np.shares_memory(back.vector, flat.vector)
    assert torch.equal(back["w"], flat["w"])


def test_errors_say_what_is_needed() -> None:
    layout, vector = flatten(example())
    with pytest.raises(ValueError, match=r"the vector has shape \(8,\), not \(9,\)"):
        layout.views(vector[:8])
    with pytest.raises(ValueError, match=r"contiguous float32 vector of 9 elements is needed, not float64"):
        FlatTensors(layout, vector.astype(np.float64))
    with pytest.raises(ValueError, match=r"contiguous float32 vector of 9 elements"):
        FlatTensors(layout, np.zeros(18, np.float32)[::2])
    with pytest.raises(ValueError, match="one shape for each name: 2 names, 1 shapes"):
        Layout(("a", "b"), ((1,),))
    with pytest.raises(ValueError, match="names each tensor once"):
        Layout(("a", "a"), ((1,), (1,)))
    with pytest.raises(TypeError, match="'c' is torch.complex64: send its real and imaginary parts"):
        flatten({"c": torch.zeros(2, dtype=torch.complex64)})


def test_what_lies_on_a_gpu_is_joined_there_and_read_once() -> None:
    """Joined as on a GPU, but here: the same vector, of whatever types, shapes and strides."""
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


def test_the_vector_is_moved_to_a_device_once() -> None:
    flat = FlatTensors.from_tensors({"a": torch.ones(2, 3), "b": torch.zeros(4)})
    assert flat.to(torch.device("cpu")).data_ptr() == flat.whole.data_ptr()
    elsewhere = torch.device("meta")
    moved = flat.to(elsewhere)
    assert (moved.device, moved.shape) == (elsewhere, (10,))
    assert flat.to(elsewhere) is moved
    own = OwnTensors(flat, elsewhere)
    assert own["a"].device == elsewhere
    assert own["a"]._base is not None
    assert own["a"]._base is not moved, "a client's own copy is one of its own"
    assert pickle.loads(pickle.dumps(flat))._moved is None


@pytest.mark.parametrize(
    ("device", "asked", "same"), [("cuda:0", "cuda", True), ("cuda:1", "cuda:0", False), ("cpu", "cuda", False)]
)
def test_a_device_without_a_number_is_any_of_its_kind(device: str, asked: str, same: bool) -> None:
    assert tensors_module._is_on(torch.device(device), torch.device(asked)) == same
