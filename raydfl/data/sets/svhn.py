"""SVHN (Y. Netzer et al., Reading Digits in Natural Images, NIPS workshop 2011), format 2: digits of house numbers.

Colour images of 32 x 32: 73,257 for training and 26,032 for the test, the official split. Either file may be missing; the set
then has no split. ``extra_32x32.mat`` is not read. In the files, the class of the digit 0 is 10. The reader is tested on small
files in this layout, not on the whole set.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar

import numpy as np
import scipy.io

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.core.isolation import reading
from raydfl.data.dataset import Card
from raydfl.data.sets._arrays import ArraySet, check_arrays, read_cached

_SIZE = (32, 32, 3)


class SVHN(ArraySet):
    """Images of the digits of house numbers, without owners.

    Images have no owner (group is null). Extra column: ``number`` (int64).
    """

    card: ClassVar[Card] = Card(
        title="Street View House Numbers",
        layout="{train,test}_32x32.mat",
        licence="for non-commercial use",
        url="http://ufldl.stanford.edu/housenumbers/",
        classes=10,
    )
    parts: ClassVar = {"train": "train", "test": "test"}
    endings: ClassVar = ("_32x32.mat",)
    published: ClassVar = "0123456789"

    def read_arrays(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read the images and labels of a MATLAB file."""
        return read_cached(_read, file)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images, uint8 [images, 32, 32, 3], and labels, int64 [images]."""
    file = io.BytesIO(read_regular(path))
    with reading(path, "truncated, damaged, or not a MATLAB file of version 4 to 7", "Download the file again"):
        content = scipy.io.loadmat(file, variable_names=["X", "y"])
    for name in ("X", "y"):
        if name not in content:
            raise DataError(f"{path}: the file has no {name!r} (X: images, y: labels). Download it again")
    x, y = content["X"], content["y"].ravel()
    images, labels = check_arrays(path, np.ascontiguousarray(np.moveaxis(x, -1, 0)) if x.ndim == 4 else x, y, _SIZE)
    return images, labels % 10  # class 10 is the digit 0
