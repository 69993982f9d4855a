"""VoxForge (voxforge.org): sentences read by volunteers in several languages. The class is the language.

The mirrors have the layout ``{language}/Trunk/Audio/Main/16kHz_16bit/{speaker}-{date}-{letters}/wav/*.wav`` or ``.flac``, with
a folder for each submission. The folders between language and submission are arbitrary. If ``test_split.txt`` exists, with the
name of a file on each line, its files are the test set and all remaining files are for training (FedSTAR's list has 30,397
files of six languages). Without this list, the set has no split. No sample was available: the reader is tested on small trees
in this layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, make_layout_error, read_text

_LIST = "test_split.txt"


@dataclass(frozen=True, kw_only=True)
class VoxForge(FileDataset):
    """Sentences in several languages.

    Groups are speakers within a language. Extra column: ``submission``.
    """

    card: ClassVar[Card] = Card(
        title="VoxForge",
        layout="a folder for each language (de, en ...) with {speaker}-{date}-{letters}/wav/*.wav below it, and optionally "
        f"{_LIST}",
        licence="GPL 3",
        url="http://www.voxforge.org",
    )
    pattern: ClassVar = (
        r"(?P<label>[a-z]{2,3})/(?:.*/)?(?P<submission>(?P<group>[^/]+?)(?:-\d{8}(?:-[^/]*)?)?)/(?:wav|flac)/"
        r"[^/]+\.(?i:wav|flac)"
    )
    files: ClassVar = pattern

    languages: Annotated[
        tuple[str, ...],
        Field(description="Languages to read, by the names of their folders. Empty: all languages in the root."),
    ] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the recordings of the chosen languages, split by the list if it exists."""
        rows = [row for row in super().rows(root) if not self.languages or row["label"] in self.languages]
        for language in self.languages:
            if not any(row["label"] == language for row in rows):
                raise make_layout_error(root, self.card, f"there is no folder {language}/ with recordings")
        for row in rows:
            row["group"] = f"{row['label']}/{row['group']}"  # names repeat between languages
        if (root / _LIST).is_file():
            lines = read_text(root, _LIST, self.card).splitlines()
            listed = {line.partition("\t")[0].strip() for line in lines}
            if not any(row["clip"] in listed for row in rows):
                raise DataError(
                    f"{self.card.title}: no recording in {root} is on {root / _LIST}. Correct the paths, or remove the list"
                )
            rows = [{**row, "split": "test" if row["clip"] in listed else "train"} for row in rows]
        return rows
