"""Files of tensors against the library's own, to the byte."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.core.tensor_file import parts_of_safetensors, to_safetensors


def tensors() -> dict[str, Tensor]:
    """Of every size of a number, in an order that is not the file's."""
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
def test_the_bytes_are_the_librarys(metadata: dict[str, str] | None) -> None:
    assert to_safetensors(tensors_ := tensors(), metadata) == safetensors.torch.save(tensors_, metadata)


def test_equal_content_gives_equal_bytes_in_any_order() -> None:
    given, metadata = tensors(), {name: name.upper() for name in "qwertyuiop"}
    there = to_safetensors(given, metadata)
    back = to_safetensors(dict(reversed(given.items())), dict(reversed(metadata.items())))
    assert there == back
    read = safetensors.torch.load(there)
    torch.testing.assert_close(read, {name: value.detach() for name, value in given.items()}, rtol=0, atol=0)


def test_tensors_may_lie_anyhow_in_memory() -> None:
    value = torch.randn(6, 4)
    given = {"turned": value.t(), "every other": value[::2, 1:], "repeated": torch.ones(1).expand(3), "one": value[1]}
    torch.testing.assert_close(safetensors.torch.load(to_safetensors(given)), given, rtol=0, atol=0)


def test_there_need_not_be_any() -> None:
    assert safetensors.torch.load(to_safetensors({}, {"of": "nothing"})) == {}


def test_nothing_is_copied() -> None:
    value = torch.zeros(5)
    _, part = parts_of_safetensors({"value": value})
    value += 1
    assert bytes(part) == torch.ones(5).numpy().tobytes()


@pytest.mark.parametrize("value", [torch.zeros(2, dtype=torch.complex128), torch.zeros(2, 2).to_sparse()])
def test_what_no_file_can_hold_is_refused(value: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"'state:odd' is a torch\.\w+ tensor of torch\.\w+, which no file can hold"):
        to_safetensors({"state:odd": value})
