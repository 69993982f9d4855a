"""CIFAR-10 (A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009), the version for Python: small photographs.

Five pickles of 10,000 images each for training and one for the test; the five, or the one, may be missing. They are read without
executing code that they name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._arrays import ArrayFile, ArraySet, checked_images, checked_labels, once_for_each_file
from raydfl.data.sets._files import wrong_layout
from raydfl.data.sets._pickle import read_arrays

_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_PLANES, _SIDE = 3, 32


@dataclass(frozen=True, kw_only=True)
class CIFAR10(ArraySet):
    """Photographs of animals and vehicles; nobody owns them."""

    card: ClassVar[Card] = Card(
        title="CIFAR-10",
        layout="data_batch_1 ... data_batch_5 and test_batch, or a folder cifar-10-batches-py that holds them",
        licence="none given; published for research",
        url="https://www.cs.toronto.edu/~kriz/cifar.html",
        classes=10,
    )
    below: ClassVar[tuple[str, ...]] = ("cifar-10-batches-py",)

    @property
    def published(self) -> tuple[str, ...]:
        """See :class:`ArraySet`."""
        return _NAMES

    def files(self, folder: Path) -> Iterator[ArrayFile]:
        """See :class:`ArraySet`."""
        missing = [name for name in _BATCHES if not (folder / name).is_file()]
        if missing and len(missing) < len(_BATCHES):
            raise wrong_layout(folder, self.card, f"there is no {missing[0]}")
        names = [*(() if missing else _BATCHES), "test_batch"]
        for file in (folder / name for name in names if (folder / name).is_file()):
            yield ArrayFile(file, file, file.name, "test" if file.name == "test_batch" else "train")

    def read_images(self, file: Path) -> np.ndarray:
        """See :class:`ArraySet`."""
        return _read(file)[0]

    def read_labels(self, file: Path) -> np.ndarray:
        """See :class:`ArraySet`."""
        return _read(file)[1]


@once_for_each_file
def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [images, 32, 32, 3] and labels int64 [images]."""
    content = read_arrays(path)
    found = {name.decode() if isinstance(name, bytes) else name: value for name, value in _items(content)}
    for name in ("data", "labels"):
        if name not in found:
            raise DataError(f"{path}: the batch has no {name!r}; fetch it again")
    rows = checked_images(path, found["data"], (_PLANES * _SIDE * _SIDE,))
    images = rows.reshape(-1, _PLANES, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return images, checked_labels(path, found["labels"])


def _items(content: object) -> list[tuple[object, object]]:
    """Return the entries of a mapping, none of anything else."""
    return [*content.items()] if isinstance(content, dict) else []
