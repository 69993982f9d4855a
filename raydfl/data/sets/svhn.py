"""SVHN (Y. Netzer et al., Reading Digits in Natural Images, NIPS workshop 2011), format 2: digits of house numbers.

One MATLAB file for training and one for the test; either may be missing, and ``extra_32x32.mat`` is not read. The class of a 0 is
10 in the files.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar

import numpy as np
import scipy.io

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.data.dataset import Card
from raydfl.data.sets._arrays import ArraySet, check_arrays, read_once

_SIZE = (32, 32, 3)


class SVHN(ArraySet):
    """Images of house numbers' digits; nobody owns them."""

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
        """See :class:`ArraySet`."""
        return read_once(_read, file)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [images, 32, 32, 3] and labels int64 [images]."""
    packed = io.BytesIO(read_regular(path))
    try:
        content = scipy.io.loadmat(packed, variable_names=["X", "y"])
    except Exception as error:  # a file that ends too early or is something else, in the many ways in which it can
        raise DataError(
            f"{path}: this is no MATLAB file of version 4 to 7, or it is truncated or damaged ({error}); fetch it again"
        ) from error
    for name in ("X", "y"):
        if name not in content:
            raise DataError(f"{path}: the file has no {name!r}: X are the images and y the labels; fetch it again")
    x, y = content["X"], content["y"].ravel()
    images, labels = check_arrays(path, np.ascontiguousarray(np.moveaxis(x, -1, 0)) if x.ndim == 4 else x, y, _SIZE)
    return images, labels % 10
