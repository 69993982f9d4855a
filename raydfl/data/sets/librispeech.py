"""LibriSpeech (V. Panayotov and others, ICASSP 2015): 1,000 hours of read English books at 16 kHz. The label is the transcript.

Unpack archives such as train-clean-100, dev-clean and test-clean in one folder. Folders named ``train...`` are for training,
``dev...`` for validation and ``test...`` for tests. Without such folders the set has no split. Multilingual LibriSpeech has another
layout. No sample was available: the reader is tested on small trees in this layout.

    data:
      name: librispeech
      root: PATH/TO/LibriSpeech
      label_sequences: {units: characters, keep: "'"}
      partition: {by: group}
    objective: transcribe
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import SPLIT_OF, FileDataset, list_files, make_layout_error, read_text

_SUFFIX = ".trans.txt"


@dataclass(frozen=True, kw_only=True)
class LibriSpeech(FileDataset):
    """Read English books.

    Groups are speakers. Extra columns: ``chapter`` and ``subset``.
    """

    card: ClassVar[Card] = Card(
        title="LibriSpeech",
        layout="{subset}/{speaker}/{chapter}/{speaker}-{chapter}-{number}.flac with {speaker}-{chapter}.trans.txt beside them",
        licence="CC BY 4.0",
        url="https://www.openslr.org/12",
    )

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the sentences of all transcript files.

        Raises:
            DataError: there is no transcript, or a line has no text.
        """
        rows: list[dict[str, Any]] = []
        for name in list_files(root):
            if not name.endswith(_SUFFIX):
                continue
            *above, speaker, chapter, _ = ["", "", *name.split("/")]
            subset = above[-1]
            for number, line in enumerate(read_text(root, name, self.card).splitlines(), start=1):
                clip, _, text = line.strip().partition(" ")
                if not text:
                    raise DataError(
                        f"{self.card.title}: line {number} of {root / name} is {line!r}. Expected a name and a text"
                    )
                folder = name.rpartition("/")[0]
                rows.append(
                    {
                        "clip": f"{folder}/{clip}.flac" if folder else f"{clip}.flac",
                        "label": text,
                        "group": speaker or None,
                        "split": SPLIT_OF.get(subset.partition("-")[0]),
                        "chapter": chapter,
                        "subset": subset,
                    }
                )
        if not rows:
            raise make_layout_error(root, self.card, f"there is no file *{_SUFFIX}")
        if any(row["split"] is None for row in rows):
            rows = [{**row, "split": None} for row in rows]
        return rows
