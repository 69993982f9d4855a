"""Free Spoken Digit Dataset (Z. Jackson and others): ten digits, six speakers, 50 takes of each.

The published split: takes 0 to 4 of each speaker and digit are the test set.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_folder, manifest_of, match_name

_NAME = re.compile(r"(?P<digit>\d)_(?P<speaker>[^_]+)_(?P<take>\d+)\.wav")
_FORM = "{digit}_{speaker}_{take}.wav"


@dataclass(frozen=True, kw_only=True)
class FSDD(Dataset):
    """Spoken digits; a group is a speaker."""

    card: ClassVar[Card] = Card(
        title="Free Spoken Digit Dataset",
        layout=f"recordings/{_FORM}",
        licence="CC BY-SA 4.0",
        url="https://github.com/Jakobovski/free-spoken-digit-dataset",
        classes=10,
    )

    root: Annotated[Path, Field(description="folder that holds recordings/")]
    test_takes: Annotated[int, Field(ge=0, description="takes with a lower number are the test set; 0: no split")] = 5

    def manifest(self) -> pa.Table:
        """Extra column: ``take`` (int64)."""
        root = find_root(self.root, self.card)
        rows = []
        for name in list_folder(root, "recordings", self.card):
            found = match_name(_NAME, name, self.card, _FORM)
            take = int(found["take"])
            split = ("test" if take < self.test_takes else "train") if self.test_takes else None
            rows.append(
                {
                    "clip": f"recordings/{name}",
                    "label": found["digit"],
                    "group": found["speaker"],
                    "split": split,
                    "take": take,
                }
            )
        return manifest_of(rows, root, self.card)
