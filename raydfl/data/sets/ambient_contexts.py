"""Ambient Acoustic Contexts (C. Park et al., MobileHCI 2020): sounds of everyday places, cut from videos in pieces of 1 s.

Laid out as FedSTAR's lists have it: ``train_split.txt`` and ``test_split.txt`` name a file and its class in each line, and the
files ``id_{video}_{begin}_{end}_{second}.wav`` lie anywhere below the root, as a rule in ``Data/Train`` and ``Data/Test``. The
published lists name 3,936 and 697 files of nine classes, where the paper says ten. Nobody owns a clip (group is null).
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
from raydfl.data.sets._files import find_root, list_audio, manifest_of, match_name, read_lines, wrong_layout

_LISTS = {"train_split.txt": "train", "test_split.txt": "test"}
_NAME = re.compile(r"id_(?P<recording>.+)_\d+_\d+_(?P<take>\d+)\.wav")
_FORM = "id_{video}_{begin}_{end}_{second}.wav"


@dataclass(frozen=True, kw_only=True)
class AmbientContexts(Dataset):
    """Sounds of everyday places."""

    card: ClassVar[Card] = Card(
        title="Ambient Acoustic Contexts",
        layout=f"{' and '.join(_LISTS)}, and their files {_FORM} below it",
        licence="of the videos, which differ",
        url="https://www.esense.io/datasets/ambientacousticcontext/index.html",
    )

    root: Annotated[Path, Field(description="folder that holds both lists and, at any depth, the files")]

    def manifest(self) -> pa.Table:
        """List the files on the lists. Extra columns: ``recording`` (the video) and ``take`` (int64, its second).

        Raises:
            DataError: a list is missing, a line is no file and class, or a file is not there or there twice.
        """
        root = find_root(self.root, self.card)
        places: dict[str, list[str]] = {}
        for name in list_audio(root):
            places.setdefault(name.rpartition("/")[2], []).append(name)
        rows = [row for name, split in _LISTS.items() for row in self._listed(root, name, split, places)]
        return manifest_of(sorted(rows, key=lambda row: str(row["clip"])), root, self.card)

    def _listed(self, root: Path, name: str, split: str, places: dict[str, list[str]]) -> list[dict[str, Any]]:
        if not (root / name).is_file():
            raise wrong_layout(root, self.card, f"there is no {name}")
        rows = []
        for line in read_lines(root / name, self.card):
            file, tab, label = line.partition("\t")
            if not tab or not label.strip():
                raise DataError(f"{self.card.title}: {root / name}: {line!r} is not a file, a tab and a class")
            found = match_name(_NAME, file.rpartition("/")[2].strip(), self.card, _FORM)
            there = places.get(found.group(), [])
            if len(there) != 1:
                where = "not there" if not there else f"there {len(there)} times: {', '.join(there[:3])}"
                raise DataError(
                    f"{self.card.title}: {found.group()!r} of {name} is {where}; below {root} it must be once"
                )
            row = {"clip": there[0], "label": label.strip(), "split": split}
            rows.append({**row, "recording": found["recording"], "take": int(found["take"])})
        return rows
