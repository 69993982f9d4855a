"""ESC-50 and ESC-10 (K. Piczak, ACM Multimedia 2015): environmental sounds of 5 s in five folds, in both published layouts.

ESC-50 is ``meta/esc50.csv`` with ``audio/*.wav``, and holds ESC-10 (``esc10_only``); before that ESC-10 was a set of its own,
``{nnn - Class}/{fold}-{freesound id}-{take}.ogg``. Nobody owns a clip (group is null): partition by label or by recording.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, hold_out, read_rows

_TABLE = "meta/esc50.csv"
_COLUMNS = ("filename", "fold", "category", "esc10", "src_file", "take")


@dataclass(frozen=True, kw_only=True)
class ESC(FileDataset):
    """Environmental sounds.

    Extra columns: ``fold`` (int64), ``recording`` (the Freesound id) and ``take``. Clips of one recording belong together. The
    official protocol is cross-validation over the folds.
    """

    card: ClassVar[Card] = Card(
        title="ESC-50 and ESC-10",
        layout=f"{_TABLE} and audio/*.wav (ESC-50), or {{nnn - Class}}/{{fold}}-{{freesound id}}-{{take}}.ogg (ESC-10)",
        licence="CC BY-NC 3.0 (ESC-50), CC BY 3.0 (ESC-10)",
        url="https://github.com/karolpiczak/ESC-50",
    )
    files: ClassVar = r"\d{3} - [^/]+/.*\.(ogg|wav)"
    pattern: ClassVar = r"\d{3} - (?P<label>[^/]+)/(?P<fold>\d)-(?P<recording>\d+)-(?P<take>[A-Z])\.(?:ogg|wav)"
    codes: ClassVar = {"fold": int}

    esc10_only: Annotated[bool, Field(description="only the ten classes of ESC-10")] = False
    test_folds: Annotated[
        tuple[int, ...], Field(description="these folds (1 to 5) are the test set; none: no split")
    ] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of either layout."""
        rows = self._esc50(root) if (root / _TABLE).is_file() else super().rows(root)
        return hold_out(rows, "fold", self.test_folds, self.card)

    def _esc50(self, root: Path) -> list[dict[str, Any]]:
        rows = []
        for row in read_rows(root, _TABLE, _COLUMNS, self.card):
            if self.esc10_only and row["esc10"].lower() != "true":
                continue
            if not row["fold"].isdigit():
                raise DataError(f"{self.card.title}: {row['filename']} is of fold {row['fold']!r} in {_TABLE}")
            clip = {"clip": f"audio/{row['filename']}", "label": row["category"], "fold": int(row["fold"])}
            rows.append({**clip, "recording": row["src_file"], "take": row["take"]})
        return sorted(rows, key=lambda row: str(row["clip"]))
