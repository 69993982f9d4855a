"""VoxForge (voxforge.org): sentences that volunteers read, in several languages; the class is the language.

Laid out as it is mirrored: ``{language}/Trunk/Audio/Main/16kHz_16bit/{speaker}-{date}-{letters}/wav/*.wav`` or ``.flac``, each
submission in a folder of its own; what stands between language and submission does not matter. Where ``test_split.txt`` names
files, these are the test set and all others for training (FedSTAR's list names 30,397 of six languages); without it there is no
split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, read_text, wrong_layout

_LIST = "test_split.txt"


@dataclass(frozen=True, kw_only=True)
class VoxForge(FileDataset):
    """Read sentences in several languages. Groups are speakers within a language. Extra column: ``submission``."""

    card: ClassVar[Card] = Card(
        title="VoxForge",
        layout="one folder for each language (de, en ...) with {speaker}-{date}-{letters}/wav/*.wav below it, and "
        f"{_LIST} if there is one",
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
        Field(description="only these languages, by the names of their folders; none: all that are there"),
    ] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the recordings of the chosen languages, divided by the list if there is one."""
        rows = [row for row in super().rows(root) if not self.languages or row["label"] in self.languages]
        for language in self.languages:
            if not any(row["label"] == language for row in rows):
                raise wrong_layout(root, self.card, f"there is no folder {language}/ with recordings")
        for row in rows:
            row["group"] = f"{row['label']}/{row['group']}"
        if (root / _LIST).is_file():
            lines = read_text(root, _LIST, self.card).splitlines()
            listed = {line.partition("\t")[0].strip() for line in lines}
            if not any(row["clip"] in listed for row in rows):
                raise DataError(f"{self.card.title}: none of the recordings in {root} is on {root / _LIST}")
            rows = [{**row, "split": "test" if row["clip"] in listed else "train"} for row in rows]
        return rows
