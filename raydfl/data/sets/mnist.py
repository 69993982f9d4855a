"""MNIST (Y. LeCun, C. Cortes, C. Burges), and sets in its layout: Fashion-MNIST, Kuzushiji-MNIST, notMNIST.

Grey images of 28 x 28, in idx files of images and of labels: a pair for training and a pair for the test, the official split.
Either pair may be missing; the set then has no split. An idx file is often compressed with gzip. It consists of two zero bytes,
a byte for the type (8: unsigned bytes) and a byte for the number of dimensions, the dimensions as 32-bit integers (big-endian),
and the values. docs/recordings.md#images has an example with MNIST. For notMNIST:

    raydfl data info jobs/tiny.yaml models.model=cnn_small data='{name: mnist, root: PATH/TO/notmnist,
      names: [A, B, C, D, E, F, G, H, I, J], features: {kind: image, size: 28},
      split: {test: {by: clip, fraction: 0.1}}, partition: {by: iid, clients: 10}}'
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.core.isolation import reading
from raydfl.data.dataset import Card
from raydfl.data.sets._arrays import ArraySet, read_cached
from raydfl.data.sets._files import make_layout_error

_IMAGES, _LABELS = "-images-idx3-ubyte", "-labels-idx1-ubyte"
_UNSIGNED_BYTES = 8


class MNIST(ArraySet):
    """Images of handwritten digits, without owners.

    Images have no owner (group is null). Extra column: ``number`` (int64).
    """

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
        """Read images, and their labels from a file next to them."""
        name = file.name.removesuffix(".gz").replace(_IMAGES, _LABELS)
        for labels in (file.with_name(name), file.with_name(f"{name}.gz")):
            if labels.is_file():
                return read_idx(file, 3), read_idx(labels, 1)
        raise make_layout_error(file.parent, self.card, f"there is no {name} next to the images")


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes: uint8, read-only.

    Args:
        path: the file, optionally compressed with gzip.
        dimensions: expected number of dimensions.

    Raises:
        DataError: the file is missing, truncated, or of another type.
    """
    return read_cached(_read, path, dimensions)


def _read(path: Path, dimensions: int) -> np.ndarray:
    content = read_regular(path)
    if content[:2] == b"\x1f\x8b":
        with reading(path, "the gzip file is truncated or damaged", "Download it again"):
            content = gzip.decompress(content)
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(
            f"{path}: truncated: {len(content)} bytes are too few for an idx header of {start}. Download the file again"
        )
    magic = bytes([0, 0, _UNSIGNED_BYTES, dimensions])
    if content[:4] != magic:
        raise DataError(
            f"{path}: not an idx file of unsigned bytes with {dimensions} dimensions: it starts with {content[:4].hex()}, not "
            f"{magic.hex()}. Check whether images and labels are exchanged, or download the file again"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size = math.prod(shape)
    if len(content) - start != size:
        raise DataError(
            f"{path}: truncated or damaged: the header announces {' x '.join(map(str, shape))} = {size} bytes, but "
            f"{len(content) - start} follow. Download the file again"
        )
    return np.frombuffer(content, np.uint8, size, start).reshape(shape)
