"""Tensor files. Oracle: the bytes of the safetensors library."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.core.tensor_file import parts_of_safetensors, to_safetensors


def make_tensors() -> dict[str, Tensor]:
    """Make tensors of all element sizes, in an order that differs from the file."""
    return {
        "model/weight": torch.randn(3, 5),
        "counts": torch.arange(4),
        "kept": torch.tensor([True, False, True]),
        'a "name" with é': torch.randn(2, 3).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "another weight": torch.randn(7, requires_grad=True),
    }


@pytest.mark.parametrize("metadata", [None, {}, {"raydfl": '{"round": 3}'}])
def test_the_bytes_match_the_library(metadata: dict[str, str] | None) -> None:
    assert to_safetensors(tensors_ := make_tensors(), metadata) == safetensors.torch.save(tensors_, metadata)


def test_the_bytes_do_not_depend_on_the_order() -> None:
    tensors, metadata = make_tensors(), {name: name.upper() for name in "qwertyuiop"}
    forward = to_safetensors(tensors, metadata)
    backward = to_safetensors(dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert forward == backward
    read = safetensors.torch.load(forward)
    torch.testing.assert_close(read, {name: value.detach() for name, value in tensors.items()}, rtol=0, atol=0)


def test_tensors_may_be_strided() -> None:
    value = torch.randn(6, 4)
    tensors = {"turned": value.t(), "every other": value[::2, 1:], "repeated": torch.ones(1).expand(3), "one": value[1]}
    torch.testing.assert_close(safetensors.torch.load(to_safetensors(tensors)), tensors, rtol=0, atol=0)


def test_a_file_may_be_empty() -> None:
    assert safetensors.torch.load(to_safetensors({}, {"of": "nothing"})) == {}


def test_tensors_are_not_copied() -> None:
    value = torch.zeros(5)
    _, part = parts_of_safetensors({"value": value})
    value += 1
    assert bytes(part) == torch.ones(5).numpy().tobytes()


@pytest.mark.parametrize("value", [torch.zeros(2, dtype=torch.complex128), torch.zeros(2, 2).to_sparse()])
def test_unsupported_tensors_are_rejected(value: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"'state:odd' is a torch\.\w+ tensor of torch\.\w+, which no file can hold"):
        to_safetensors({"state:odd": value})
