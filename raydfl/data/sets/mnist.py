"""MNIST (Y. LeCun, C. Cortes, C. Burges), and every set in its layout: Fashion-MNIST, Kuzushiji-MNIST, notMNIST.

Grey images and their labels, in two idx files for training and two for the test; either pair may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card
from raydfl.data.sets._arrays import ArrayFile, ArraySet
from raydfl.data.sets._files import wrong_layout
from raydfl.data.sets._idx import read_idx


@dataclass(frozen=True, kw_only=True)
class MNIST(ArraySet):
    """Images of digits; nobody owns them."""

    card: ClassVar[Card] = Card(
        title="MNIST",
        layout="{train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, packed with gzip (.gz) or not",
        licence="CC BY-SA 3.0",
        url="http://yann.lecun.com/exdb/mnist/",
        classes=10,
    )
    below: ClassVar[tuple[str, ...]] = ("raw", "MNIST/raw")

    root: Annotated[Path, Field(description="folder that holds the idx files, or torchvision's folder above it")]
    names: Annotated[
        tuple[str, ...] | None,
        Field(description="names of the classes, in the order of their numbers; null: the numbers"),
    ] = None

    @property
    def prefixes(self) -> Mapping[str, str]:
        """Beginnings of the files' names, and the split of each."""
        return {"train": "train", "t10k": "test"}

    def files(self, folder: Path) -> Iterator[ArrayFile]:
        """See :class:`ArraySet`."""
        for prefix, split in self.prefixes.items():
            images = _file(folder, f"{prefix}-images-idx3-ubyte")
            if images is None:
                continue
            labels = _file(folder, f"{prefix}-labels-idx1-ubyte")
            if labels is None:
                raise wrong_layout(folder, self.card, f"there is no {prefix}-labels-idx1-ubyte beside the images")
            yield ArrayFile(images, labels, prefix, split)

    def read_images(self, file: Path) -> np.ndarray:
        """See :class:`ArraySet`."""
        return read_idx(file, 3)

    def read_labels(self, file: Path) -> np.ndarray:
        """See :class:`ArraySet`."""
        return read_idx(file, 1)


def _file(root: Path, name: str) -> Path | None:
    """Return the file of that name, packed or not; ``None``: there is none."""
    return next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)
