"""MNIST (Y. LeCun, C. Cortes, C. Burges), and every set in its layout: Fashion-MNIST, Kuzushiji-MNIST, notMNIST.

Grey images and their labels, in two idx files for training and two for the test; either pair may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card, Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.sets._files import find_root, wrong_layout
from raydfl.data.sets._idx import read_idx

_PAIRS = {"train": "train", "t10k": "test"}


@dataclass(frozen=True, kw_only=True)
class MNIST(Dataset):
    """Images of digits; nobody owns them."""

    images: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        title="MNIST",
        layout="{train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, packed with gzip (.gz) or not",
        licence="CC BY-SA 3.0",
        url="http://yann.lecun.com/exdb/mnist/",
        classes=10,
    )

    root: Annotated[Path, Field(description="folder that holds the idx files")]
    names: Annotated[
        tuple[str, ...] | None,
        Field(description="names of the classes, in the order of their numbers; null: the numbers"),
    ] = None

    def manifest(self) -> pa.Table:
        """Extra column: ``number`` (int64), of the image in its file. Official split where both pairs are there."""
        root = find_root(self.root, self.card)
        rows: list[dict[str, Any]] = []
        pairs = {prefix: split for prefix, split in _PAIRS.items() if _file(root, f"{prefix}-images-idx3-ubyte")}
        if not pairs:
            raise wrong_layout(root, self.card, "there is no file of images")
        for prefix, split in pairs.items():
            images = _file(root, f"{prefix}-images-idx3-ubyte")
            labels = _file(root, f"{prefix}-labels-idx1-ubyte")
            if images is None or labels is None:
                raise wrong_layout(root, self.card, f"there is no {prefix}-labels-idx1-ubyte beside the images")
            numbers, count = read_idx(labels, 1), len(read_idx(images, 3))
            if len(numbers) != count:
                raise DataError(
                    f"{images} holds {count} images and {labels} {len(numbers)} labels: they do not belong together; fetch both"
                )
            rows += [
                {
                    "clip": f"{prefix}/{number:05d}",
                    "path": str(images),
                    "label": self._name(label, labels),
                    "split": split if len(pairs) > 1 else None,
                    "number": number,
                }
                for number, label in enumerate(numbers.tolist())
            ]
        return make_manifest(rows, f"{self.card.title} in {root}")

    def _name(self, label: int, file: Path) -> str:
        if self.names is None:
            return str(label)
        if label >= len(self.names):
            raise DataError(
                f"{file} has the label {label}, and data.names has {len(self.names)} names; give one for each class"
            )
        return self.names[label]

    def image(self, row: Mapping[str, Any]) -> np.ndarray:
        """See :class:`Dataset`."""
        image: np.ndarray = read_idx(Path(row["path"]), 3)[row["number"]]
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """See :class:`Dataset`."""
        return str(row["number"])


def _file(root: Path, name: str) -> Path | None:
    """Return the file of that name, packed or not; ``None``: there is none."""
    return next((path for path in (root / name, root / f"{name}.gz") if path.is_file()), None)
