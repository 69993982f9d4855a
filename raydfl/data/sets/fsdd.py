"""Free Spoken Digit Dataset (Z. Jackson and others): ten digits, six speakers, 50 takes of each, at 8 kHz.

The published split: takes 0 to 4 of each speaker and digit are the test set. Clone the repository of the source to get the set.

    data:
      name: fsdd
      root: PATH/TO/fsdd
      features: {sample_rate: 8000, seconds: 1.0}
      partition: {by: group, shards: 10}

The same partition on the command line:

    raydfl data info jobs/tiny.yaml data='{name: fsdd, root: PATH/TO/fsdd, partition: {shards: 10}}'
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset


@dataclass(frozen=True, kw_only=True)
class FSDD(FileDataset):
    """Spoken digits.

    Groups are speakers. Extra column: ``take`` (int64).
    """

    card: ClassVar[Card] = Card(
        title="Free Spoken Digit Dataset",
        layout="recordings/{digit}_{speaker}_{take}.wav",
        licence="CC BY-SA 4.0",
        url="https://github.com/Jakobovski/free-spoken-digit-dataset",
        classes=10,
    )
    files: ClassVar = r"recordings/.*\.wav"
    pattern: ClassVar = r"recordings/(?P<label>\d)_(?P<group>[^_]+)_(?P<take>\d+)\.wav"
    codes: ClassVar = {"take": int}

    test_takes: Annotated[
        int, Field(ge=0, description="Number of each speaker's first takes of a digit in the test set. 0: no split.")
    ] = 5

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the takes, split into training and test."""
        rows = super().rows(root)
        for row in rows if self.test_takes else ():
            row["split"] = "test" if row["take"] < self.test_takes else "train"
        return rows
