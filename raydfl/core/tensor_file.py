"""Deterministic writing of safetensors files, without a copy in memory. The library itself reads them.

The library keeps metadata in a hash map whose order differs between processes. It also copies all tensors twice, which takes three
to four times as long as writing them. So this module writes the header itself.
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
    """Return the content of a safetensors file as consecutive parts: the header, then each tensor.

    Contiguous CPU tensors are not copied: change none of them before all parts are written. Equal tensors and metadata give equal
    bytes.

    Raises:
        ConfigError: safetensors cannot hold one of the tensors (:func:`has_a_format`).
    """
    for name, value in tensors.items():
        if not has_a_format(value):
            raise ConfigError(
                f"{name!r} is a {value.layout} tensor of {value.dtype}, which no file can hold. Use float32."
            )
    # Wide types first keep every tensor aligned; the library uses the same order.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    ends = list(itertools.accumulate((tensors[name].nbytes for name in names), initial=0))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    for name, offsets in zip(names, itertools.pairwise(ends), strict=True):
        value = tensors[name]
        header[name] = {"dtype": _format(value.dtype), "shape": list(value.shape), "data_offsets": list(offsets)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the library aligns tensors to 8 bytes
    return [len(text).to_bytes(8, "little") + text, *(_memory(tensors[name]) for name in names)]


def to_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialise tensors and metadata in the safetensors format. Equal inputs give equal bytes."""
    return b"".join(parts_of_safetensors(tensors, metadata))


def has_a_format(value: Tensor) -> bool:
    """Return whether safetensors can hold a tensor of this layout and dtype."""
    return value.layout is torch.strided and bool(_format(value.dtype))


@functools.cache
def _format(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the format; empty if it is not supported."""
    try:
        content = safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    except (SafetensorError, KeyError, RuntimeError, ValueError, TypeError):
        return ""
    return str(json.loads(content[8:])[""]["dtype"])


def _memory(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
