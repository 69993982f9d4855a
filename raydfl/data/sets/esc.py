"""ESC-50 and ESC-10 (K. Piczak, ACM Multimedia 2015): environmental sounds of 5 s in five folds, in both published layouts.

ESC-50 includes ESC-10 (``esc10_only``); the earlier, separate ESC-10 has a folder for each class. Clips have no owner (group is
null): partition by label or by recording.

    raydfl data info jobs/tiny.yaml data='{name: esc, root: PATH/TO/ESC-10, test_folds: [4],
      partition: {by: dirichlet, column: recording, clients: 4, alpha: 0.5}}'
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, add_test_split, read_rows

_TABLE = "meta/esc50.csv"
_COLUMNS = ("filename", "fold", "category", "esc10", "src_file", "take")


@dataclass(frozen=True, kw_only=True)
class ESC(FileDataset):
    """Environmental sounds.

    Extra columns: ``fold`` (int64), ``recording`` (the Freesound id) and ``take``. Keep the clips of a recording in the same
    set. The set has no official split; the official protocol is cross-validation over the folds.
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

    esc10_only: Annotated[bool, Field(description="Read only the ten classes of ESC-10.")] = False
    test_folds: Annotated[tuple[int, ...], Field(description="Folds (1 to 5) in the test set. Empty: no split.")] = ()

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips of either layout."""
        rows = self._list_esc50(root) if (root / _TABLE).is_file() else super().rows(root)
        return add_test_split(rows, "fold", self.test_folds, self.card)

    def _list_esc50(self, root: Path) -> list[dict[str, Any]]:
        rows = []
        for row in read_rows(root, _TABLE, _COLUMNS, self.card):
            if self.esc10_only and row["esc10"].lower() != "true":
                continue
            if not row["fold"].isdigit():
                raise DataError(
                    f"{self.card.title}: {row['filename']} has the fold {row['fold']!r} in {_TABLE}, not a number"
                )
            clip = {"clip": f"audio/{row['filename']}", "label": row["category"], "fold": int(row["fold"])}
            rows.append({**clip, "recording": row["src_file"], "take": row["take"]})
        return sorted(rows, key=lambda row: str(row["clip"]))
