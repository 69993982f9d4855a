"""MNIST (Y. LeCun, C. Cortes, C. Burges), and every set in its layout: Fashion-MNIST, Kuzushiji-MNIST, notMNIST.

Grey images and their labels, in two idx files for training and two for the test; either pair may be missing. An idx file is often
packed with gzip: two zero bytes, one for the type (8: unsigned bytes), one for the number of dimensions; then each dimension as a
32-bit number, most significant byte first; then the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.data.dataset import Card
from raydfl.data.sets._arrays import ArraySet, read_once
from raydfl.data.sets._files import wrong_layout

_IMAGES, _LABELS = "-images-idx3-ubyte", "-labels-idx1-ubyte"
_UNSIGNED_BYTES = 8


class MNIST(ArraySet):
    """Images of digits; nobody owns them."""

    card: ClassVar[Card] = Card(
        title="MNIST",
        layout="{train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, packed with gzip (.gz) or not",
        licence="CC BY-SA 3.0",
        url="http://yann.lecun.com/exdb/mnist/",
        classes=10,
    )
    parts: ClassVar = {"train": "train", "t10k": "test"}
    endings: ClassVar = (_IMAGES, f"{_IMAGES}.gz")
    below: ClassVar[tuple[str, ...]] = ("raw", "MNIST/raw")

    def read_arrays(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read images, and the labels in the file beside them."""
        name = file.name.removesuffix(".gz").replace(_IMAGES, _LABELS)
        for labels in (file.with_name(name), file.with_name(f"{name}.gz")):
            if labels.is_file():
                return read_idx(file, 3), read_idx(labels, 1)
        raise wrong_layout(file.parent, self.card, f"there is no {name} beside the images")


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes: uint8, read-only.

    Args:
        path: of the file, packed or not.
        dimensions: that it must have.

    Raises:
        DataError: the file is missing, truncated, or something else.
    """
    return read_once(_read, path, dimensions)


def _read(path: Path, dimensions: int) -> np.ndarray:
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
