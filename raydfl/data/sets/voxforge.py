"""VoxForge (voxforge.org): sentences that volunteers read, in several languages; the class is the language.

Laid out as it is mirrored: ``{language}/Trunk/Audio/Main/16kHz_16bit/{speaker}-{date}-{letters}/wav/*.wav`` or ``.flac``, each
submission in a folder of its own; what stands between language and submission does not matter. Where ``test_split.txt`` names
files, these are the test set and all others for training (FedSTAR's list names 30,397 of six languages); without it there is no
split.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_audio, manifest_of, read_lines, wrong_layout

_LIST = "test_split.txt"
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_SUBMISSION = re.compile(r"(?P<speaker>.+?)-\d{8}(?:-.*)?")


@dataclass(frozen=True, kw_only=True)
class VoxForge(Dataset):
    """Read sentences in several languages."""

    card: ClassVar[Card] = Card(
        title="VoxForge",
        layout="one folder for each language (de, en ...) with {speaker}-{date}-{letters}/wav/*.wav below it",
        licence="GPL 3",
        url="http://www.voxforge.org",
    )

    root: Annotated[
        Path, Field(description="folder that holds the languages' folders, and test_split.txt if there is one")
    ]
    languages: Annotated[
        tuple[str, ...],
        Field(description="only these languages, by the names of their folders; none: all that are there"),
    ] = ()

    def manifest(self) -> pa.Table:
        """List the recordings. Groups are speakers within a language. Extra column: ``submission``.

        Raises:
            DataError: there are no recordings, a language is not there, or no recording is on the list.
        """
        root = find_root(self.root, self.card)
        rows = []
        for name in list_audio(root, (".wav", ".flac")):
            parts = name.split("/")
            if len(parts) < 4 or parts[-2] not in ("wav", "flac") or not _LANGUAGE.fullmatch(parts[0]):
                continue
            if not self.languages or parts[0] in self.languages:
                found = _SUBMISSION.fullmatch(parts[-3])
                speaker = parts[-3] if found is None else found["speaker"]
                rows.append(
                    {"clip": name, "label": parts[0], "group": f"{parts[0]}/{speaker}", "submission": parts[-3]}
                )
        if not rows and not self.languages:
            raise wrong_layout(root, self.card, "there is no language's folder with recordings")
        for language in self.languages:
            if not any(row["label"] == language for row in rows):
                raise wrong_layout(root, self.card, f"there is no folder {language}/ with recordings")
        if (root / _LIST).is_file():
            listed = {line.partition("\t")[0].strip() for line in read_lines(root / _LIST, self.card)}
            if not any(row["clip"] in listed for row in rows):
                raise DataError(f"{self.card.title}: none of the recordings in {root} is on {root / _LIST}")
            rows = [{**row, "split": "test" if row["clip"] in listed else "train"} for row in rows]
        return manifest_of(rows, root, self.card)
