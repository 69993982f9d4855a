"""Safetensors files whose bytes depend on what is in them alone."""

from __future__ import annotations

import json
from collections.abc import Mapping

import safetensors.torch
from torch import Tensor


def to_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a safetensors file: equal tensors and metadata give equal bytes.

    Args:
        tensors: contiguous, on the CPU.
        metadata: any number of entries.
    """
    content = safetensors.torch.save(dict(tensors), dict(metadata))
    # The library orders tensors, but keeps metadata in a hash map that has another order in each process: so the header is written
    # again. Offsets in it count from its end, which may move.
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header = {
        "__metadata__": dict(sorted(metadata.items())),
        **{k: v for k, v in header.items() if k != "__metadata__"},
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    return len(text).to_bytes(8, "little") + text + content[8 + length :]
