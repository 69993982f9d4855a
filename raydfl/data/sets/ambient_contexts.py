"""Ambient Acoustic Contexts (C. Park et al., MobileHCI 2020): sounds of everyday places, cut from videos in pieces of 1 s.

Laid out as FedSTAR's lists have it: ``train_split.txt`` and ``test_split.txt`` name a file and its class in each line, and the
files ``id_{video}_{begin}_{end}_{second}.wav`` lie anywhere below the root, as a rule in ``Data/Train`` and ``Data/Test``. The
published lists name 3,936 and 697 files of nine classes, where the paper says ten. Nobody owns a clip (group is null).
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
    """Sounds of everyday places. Extra columns: ``recording`` (the video) and ``take`` (int64, its second)."""

    card: ClassVar[Card] = Card(
        title="Ambient Acoustic Contexts",
        layout=f"{' and '.join(_LISTS)}, and their files {_FORM} below it",
        licence="of the videos, which differ",
        url="https://www.esense.io/datasets/ambientacousticcontext/index.html",
    )
    pattern: ClassVar = r"(?:.*/)?id_(?P<recording>[^/]+)_\d+_\d+_(?P<take>\d+)\.wav"
    files: ClassVar = pattern
    codes: ClassVar = {"take": int}

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the files on the lists."""
        places = defaultdict(list)
        for row in super().rows(root):
            places[Path(row["clip"]).name].append(row)
        rows: list[dict[str, Any]] = []
        for name, split in _LISTS.items():
            for line in filter(str.strip, read_text(root, name, self.card).splitlines()):
                file, _, label = line.partition("\t")
                if not label.strip():
                    raise DataError(f"{self.card.title}: {root / name}: {line!r} is not a file, a tab and a class")
                file = file.rpartition("/")[2].strip()
                if len(there := places[file]) != 1:
                    where = (
                        f"{len(there)} times: {', '.join(row['clip'] for row in there[:3])}" if there else "not there"
                    )
                    raise DataError(
                        f"{self.card.title}: {file!r} of {name} is {where}; below {root} it must be once, named {_FORM}"
                    )
                rows.append({"clip": there[0]["clip"], "label": label.strip(), "split": split, **there[0]})
        return sorted(rows, key=lambda row: str(row["clip"]))
