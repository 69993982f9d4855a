"""Ambient Acoustic Contexts (C. Park et al., MobileHCI 2020): sounds of everyday places, cut from videos into clips of 1 s.

Each line of FedSTAR's lists has a file, a tab and a class. The published lists have 3,936 and 697 files of nine classes, while
the paper reports ten classes. The lists are the official split. Clips have no owner (group is null). No sample was available:
the reader is tested on small trees in this layout.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

from raydfl.core.errors import DataError
from raydfl.data.dataset import Card
from raydfl.data.sets._files import FileDataset, read_text

_LISTS = {"train_split.txt": "train", "test_split.txt": "test"}
_FORM = "id_{video}_{begin}_{end}_{second}.wav"


class AmbientContexts(FileDataset):
    """Sounds of everyday places.

    Extra columns: ``recording`` (the video) and ``take`` (int64, its second).
    """

    card: ClassVar[Card] = Card(
        title="Ambient Acoustic Contexts",
        layout=f"{' and '.join(_LISTS)}, and their files {_FORM} at any depth",
        licence="of the videos, which differ",
        url="https://www.esense.io/datasets/ambientacousticcontext/index.html",
    )
    pattern: ClassVar = r"(?:.*/)?id_(?P<recording>[^/]+)_\d+_\d+_(?P<take>\d+)\.wav"
    files: ClassVar = pattern
    codes: ClassVar = {"take": int}

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the files in the lists."""
        rows_of = defaultdict(list)
        for row in super().rows(root):
            rows_of[Path(row["clip"]).name].append(row)
        rows: list[dict[str, Any]] = []
        for name, split in _LISTS.items():
            for line in filter(str.strip, read_text(root, name, self.card).splitlines()):
                file, _, label = line.partition("\t")
                if not label.strip():
                    raise DataError(f"{self.card.title}: {root / name}: {line!r} is not a file, a tab and a class")
                file = file.rpartition("/")[2].strip()  # the lists' folders need not match the root's
                if len(matches := rows_of[file]) != 1:
                    clips = ", ".join(row["clip"] for row in matches[:3])
                    problem = f"is there {len(matches)} times: {clips}" if matches else "is missing"
                    raise DataError(
                        f"{self.card.title}: {file!r} of {name} {problem}. Keep a single copy below {root}, named {_FORM}"
                    )
                rows.append({"clip": matches[0]["clip"], "label": label.strip(), "split": split, **matches[0]})
        return sorted(rows, key=lambda row: str(row["clip"]))
