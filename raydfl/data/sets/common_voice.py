"""Common Voice (R. Ardila and others, LREC 2020): sentences read by volunteers in many languages. The label is the transcript.

Unpack the archive of a language and set ``root`` to its folder. ``train.tsv``, ``dev.tsv`` and ``test.tsv`` are the official
splits. Their speakers are disjoint, so training has no clips of test speakers. No sample was available: the reader is tested on
small trees in this layout.

    data:
      name: common_voice
      root: PATH/TO/cv-corpus/cy
      label_sequences: {units: characters}
      partition: {by: group}
    objective: transcribe
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, parse_splits, read_text

_NEEDED = ("client_id", "path", "sentence")


@dataclass(frozen=True, kw_only=True)
class CommonVoice(FileDataset):
    """Sentences read by volunteers.

    Groups are the volunteers (``client_id``).
    """

    card: ClassVar[Card] = Card(
        title="Common Voice",
        layout="train.tsv, dev.tsv and test.tsv with the columns client_id, path and sentence, and clips/{path}",
        licence="CC0",
        url="https://commonvoice.mozilla.org/datasets",
    )

    lists: Annotated[
        tuple[str, ...],
        Field(
            min_length=1, description="Lists to read, without .tsv. All lists except train, dev and test have no split."
        ),
    ] = ("train", "dev", "test")

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the sentences of the lists.

        Raises:
            DataError: a list is missing, lacks a column, or has a line without a value.
        """
        rows: list[dict[str, Any]] = []
        for name in self.lists:
            path = root / f"{name}.tsv"
            text = read_text(root, path.name, self.card)
            lines = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
            missing = [column for column in _NEEDED if column not in (lines.fieldnames or [])]
            if missing:
                raise DataError(f"{self.card.title}: {path} has no column {missing[0]!r}. Download it again")
            is_official = name in ("train", "dev", "test")
            for number, line in enumerate(lines, start=2):
                if any(not line[column] for column in _NEEDED):
                    raise DataError(f"{self.card.title}: line {number} of {path} lacks one of {', '.join(_NEEDED)}")
                rows.append(
                    {
                        "clip": f"clips/{line['path']}",
                        "label": line["sentence"],
                        "group": line["client_id"],
                        "split": parse_splits([name], str)[0] if is_official else None,
                    }
                )
        if len({row["split"] is None for row in rows}) > 1:
            raise DataError(
                f"{self.card.title}: data.lists mixes official splits with another list: {', '.join(self.lists)}. Read either of "
                f"them"
            )
        return rows
