"""Safetensors files whose bytes depend on what is in them alone, and which are written without a copy in memory.

The header is made here: the library keeps metadata in a hash map that has another order in each process, and makes two copies of
all tensors, which takes three to four times as long as to write them. What is read, the library reads.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from raydfl.core.errors import ConfigError


def parts_of_safetensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """Return the content of a safetensors file in parts, which are to be written one after the other.

    The first is the header; the others are the tensors' own memory, where that is contiguous and on the CPU: a tensor that changes
    before it is written is written as it is then. Equal tensors and metadata give equal bytes.

    Args:
        tensors: any number.
        metadata: any number of entries.

    Raises:
        ConfigError: safetensors cannot hold one of the tensors (:func:`has_a_format`).
    """
    for name, value in tensors.items():
        if not has_a_format(value):
            raise ConfigError(
                f"{name!r} is a {value.layout} tensor of {value.dtype}, which no file can hold; use float32"
            )
    # Large numbers first keep all aligned; rising names are what the library has too.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    ends = list(itertools.accumulate((tensors[name].nbytes for name in names), initial=0))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    for name, offsets in zip(names, itertools.pairwise(ends), strict=True):
        value = tensors[name]
        header[name] = {"dtype": _format(value.dtype), "shape": list(value.shape), "data_offsets": list(offsets)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(_memory(tensors[name]) for name in names)]


def to_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a safetensors file in one piece; see :func:`parts_of_safetensors`."""
    return b"".join(parts_of_safetensors(tensors, metadata))


def has_a_format(value: Tensor) -> bool:
    """Return whether safetensors can hold such a tensor."""
    return value.layout is torch.strided and bool(_format(value.dtype))


@functools.cache
def _format(dtype: torch.dtype) -> str:
    """Return the format's name of a data type; empty: it has none."""
    try:
        content = safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    except (SafetensorError, KeyError, RuntimeError, ValueError, TypeError):
        return ""
    return str(json.loads(content[8:])[""]["dtype"])


def _memory(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
