"""Named arrays in a safetensors file, read without a copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

_DTYPES = {"BOOL": np.bool_, "U8": np.uint8, "I32": np.int32, "I64": np.int64, "F32": np.float32, "F64": np.float64}


def map_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Map the arrays of a safetensors file as read-only views (the library itself copies them); with its metadata.

    Raises:
        ValueError: the file is not of that format, or not whole.
    """
    whole = np.asarray(np.memmap(path, np.uint8, "r"))
    start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    header = json.loads(whole[8:start].tobytes())
    metadata = header.pop("__metadata__")
    ends = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if start + ends != len(whole):
        raise ValueError(f"it has {len(whole)} bytes instead of {start + ends}")
    arrays = {}
    for name, entry in header.items():
        first, stop = (start + offset for offset in entry["data_offsets"])
        arrays[name] = whole[first:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata


def digest(arrays: Mapping[str, np.ndarray], leave_out: Collection[str] = ()) -> str:
    """Return the hexadecimal digest of arrays: of their names, types, shapes and values.

    Args:
        leave_out: names of arrays that it does not depend on.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        if name not in leave_out:
            found.update(f"{name} {array.dtype} {array.shape};".encode())
            found.update(array.tobytes())
    return found.hexdigest()
