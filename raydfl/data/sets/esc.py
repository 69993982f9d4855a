"""ESC-50 and ESC-10 (K. Piczak, ACM Multimedia 2015): environmental sounds of 5 s in five folds, in both published layouts.

ESC-50 is ``meta/esc50.csv`` with ``audio/*.wav``, and holds ESC-10 (``esc10_only``); before that ESC-10 was a set of its own,
``{nnn - Class}/{fold}-{freesound id}-{take}.ogg``. Nobody owns a clip (group is null): partition by label or by recording.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._files import find_root, list_audio, manifest_of, match_name, read_rows, wrong_layout

_FOLDER = re.compile(r"\d{3} - (?P<label>.+)")
_NAME = re.compile(r"(?P<fold>\d)-(?P<recording>\d+)-(?P<take>[A-Z])\.(?:ogg|wav)")
_FORM = "{fold}-{freesound id}-{take}.ogg"
_COLUMNS = ("filename", "fold", "category", "esc10", "src_file", "take")


@dataclass(frozen=True, kw_only=True)
class ESC(Dataset):
    """Environmental sounds."""

    card: ClassVar[Card] = Card(
        title="ESC-50 and ESC-10",
        layout=f"meta/esc50.csv and audio/*.wav (ESC-50), or {{nnn - Class}}/{_FORM} (ESC-10)",
        licence="CC BY-NC 3.0 (ESC-50), CC BY 3.0 (ESC-10)",
        url="https://github.com/karolpiczak/ESC-50",
    )

    root: Annotated[Path, Field(description="folder that holds meta/ and audio/, or the folders '001 - Dog bark' ...")]
    esc10_only: Annotated[bool, Field(description="only the ten classes of ESC-10")] = False
    test_folds: Annotated[
        tuple[int, ...], Field(description="these folds (1 to 5) are the test set; none: no split")
    ] = ()

    def manifest(self) -> pa.Table:
        """Extra columns: ``fold`` (int64), ``recording`` (the Freesound id) and ``take``.

        Clips of one recording belong together. The official protocol is cross-validation over the folds.
        """
        root = find_root(self.root, self.card)
        rows = self._esc50(root) if (root / "meta" / "esc50.csv").is_file() else self._esc10(root)
        return manifest_of(rows, root, self.card, "fold", self.test_folds)

    def _esc50(self, root: Path) -> list[dict[str, Any]]:
        table = read_rows(root / "meta" / "esc50.csv", _COLUMNS, self.card)
        if not any((root / "audio" / row["filename"]).is_file() for row in table):
            raise wrong_layout(root, self.card, "audio/ has none of the files of meta/esc50.csv")
        rows = []
        for row in sorted(table, key=lambda row: row["filename"]):
            if self.esc10_only and row["esc10"].lower() != "true":
                continue
            if not row["fold"].isdigit():
                raise DataError(f"{self.card.title}: {row['filename']} is of fold {row['fold']!r} in meta/esc50.csv")
            clip = f"audio/{row['filename']}"
            rows.append(_row(clip, row["category"], int(row["fold"]), row["src_file"], row["take"]))
        return rows

    def _esc10(self, root: Path) -> list[dict[str, Any]]:
        rows = []
        for name in list_audio(root, (".ogg", ".wav")):
            folder, _, file = name.partition("/")
            label = _FOLDER.fullmatch(folder)
            if label is not None:
                found = match_name(_NAME, file, self.card, _FORM)
                rows.append(_row(name, label["label"], int(found["fold"]), found["recording"], found["take"]))
        if not rows:
            raise wrong_layout(
                root, self.card, "there is neither meta/esc50.csv nor a folder like '001 - Dog bark' with clips"
            )
        return rows


def _row(clip: str, label: str, fold: int, recording: str, take: str) -> dict[str, Any]:
    return {"clip": clip, "label": label, "fold": fold, "recording": recording, "take": take}
