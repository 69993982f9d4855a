"""The idx format, in which MNIST is published: a magic number, the size of each dimension, then bytes; often packed with gzip.

The format: two zero bytes, one for the type (8: unsigned bytes), one for the number of dimensions; then each dimension as a 32-bit
number, most significant byte first.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.data.sets._arrays import once_for_each_file

_UNSIGNED_BYTES = 8


@once_for_each_file
def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes: uint8, read-only.

    Args:
        path: of the file, packed or not.
        dimensions: that it must have.

    Raises:
        DataError: the file is missing, truncated, or something else.
    """
    content = read_regular(path)
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: the packed file is truncated or damaged ({error}); fetch it again") from error
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(
            f"{path}: truncated: {len(content)} bytes are too few for an idx header of {start}; fetch it again"
        )
    magic = bytes([0, 0, _UNSIGNED_BYTES, dimensions])
    if content[:4] != magic:
        raise DataError(
            f"{path}: it begins with {content[:4].hex()} and not {magic.hex()}: this is no idx file of unsigned bytes with "
            f"{dimensions} dimensions; are images and labels exchanged?"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    wanted = math.prod(shape)
    if len(content) - start != wanted:
        raise DataError(
            f"{path}: its header announces {' x '.join(map(str, shape))} bytes, and {len(content) - start} of {wanted} follow; the "
            f"file is truncated or damaged: fetch it again"
        )
    return np.frombuffer(content, np.uint8, wanted, start).reshape(shape)
