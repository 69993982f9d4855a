"""Named arrays in a safetensors file, read without a copy and written one after another."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_DTYPES = {"BOOL": np.bool_, "U8": np.uint8, "I32": np.int32, "I64": np.int64, "F32": np.float32, "F64": np.float64}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}
_ORDER = ("I64", "F64", "F32", "I32", "U8", "BOOL")
"""Types in the order in which the library writes them, so that all begin where numbers of their size may."""
_CHUNK = 1 << 22


def map_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Map the arrays of a safetensors file as read-only views (the library itself copies them); with its metadata.

    Raises:
        ValueError: the file is not of that format, or not whole.
    """
    whole = np.asarray(np.memmap(path, np.uint8, "r"))
    with path.open("rb") as file:
        start, header, metadata = _read_header(file)
    ends = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if start + ends != len(whole):
        raise ValueError(f"it has {len(whole)} bytes instead of {start + ends}")
    arrays = {}
    for name, entry in header.items():
        first, stop = (start + offset for offset in entry["data_offsets"])
        arrays[name] = whole[first:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata


def _read_header(file: BinaryIO) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return where the arrays begin, what is said of each, and the metadata."""
    length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if length > size:
        raise ValueError(f"it has {size} bytes and says that {length} of them are its header")
    header = json.loads(file.read(length))
    return 8 + length, header, header.pop("__metadata__")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays to a safetensors file, byte for byte as the library does, but without a copy of them in memory."""
    kinds = {name: _NAMES[array.dtype] for name, array in arrays.items()}
    names = sorted(arrays, key=lambda name: (_ORDER.index(kinds[name]), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        start, end = end, end + arrays[name].nbytes
        header[name] = {"dtype": kinds[name], "shape": list(arrays[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes_of(arrays[name]))


def digest(arrays: Mapping[str, np.ndarray], leave_out: Collection[str] = ()) -> str:
    """Return the hexadecimal digest of arrays: of their names, types, shapes and values.

    Args:
        leave_out: names of arrays that it does not depend on.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        if name not in leave_out:
            found.update(f"{name} {array.dtype} {array.shape};".encode())
            found.update(_bytes_of(array))
    return found.hexdigest()


def file_digest(path: Path, leave_out: Collection[str] = ()) -> str:
    """Return what :func:`digest` says of the arrays in a file, of which no more than some megabytes are in memory at a time."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        start, header, _ = _read_header(file)
        for name, entry in sorted(header.items()):
            if name in leave_out:
                continue
            found.update(f"{name} {np.dtype(_DTYPES[entry['dtype']])} {tuple(entry['shape'])};".encode())
            first, stop = entry["data_offsets"]
            file.seek(start + first)
            for place in range(first, stop, _CHUNK):
                found.update(file.read(min(_CHUNK, stop - place)))
    return found.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
