"""EMNIST (G. Cohen, S. Afshar, J. Tapson, A. van Schaik, arXiv:1702.05373): digits and letters, in MNIST's format.

Grey images of 28 x 28, with an official split if both pairs of files are present. The published images are transposed: rows are
columns. raydfl keeps them transposed, like torchvision. The reader is tested on small files in this layout, not on the whole
set.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card
from raydfl.data.sets.mnist import MNIST

_BY_CLASS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_BY_MERGE = string.digits + string.ascii_uppercase + "abdefghnqrt"
_NAMES = {
    "byclass": _BY_CLASS,
    "bymerge": _BY_MERGE,
    "balanced": _BY_MERGE,
    "letters": "-" + string.ascii_lowercase,  # numbered from 1
    "digits": string.digits,
    "mnist": string.digits,
}


@dataclass(frozen=True, kw_only=True)
class EMNIST(MNIST):
    """Images of handwritten digits and letters, without owners.

    Images have no owner (group is null). Extra column: ``number`` (int64).
    """

    card: ClassVar[Card] = Card(
        title="EMNIST",
        layout="emnist-{variant}-{train,test}-images-idx3-ubyte and ...-labels-idx1-ubyte, packed with gzip (.gz) or not",
        licence="CC BY-SA 3.0",
        url="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        classes=62,
    )
    parts: ClassVar = {"emnist-{variant}-train": "train", "emnist-{variant}-test": "test"}
    below: ClassVar = ("gzip", "raw", "EMNIST/raw")

    variant: Annotated[
        Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"],
        Field(
            description="Files to read: byclass (62 classes), bymerge or balanced (47, similar small and capital letters merged), "
            "letters (26, all small and capital letters merged), digits or mnist (10)."
        ),
    ] = "byclass"

    def class_names(self) -> Sequence[str]:
        """Return the characters of the variant."""
        return _NAMES[self.variant] if self.names is None else self.names
