"""Your own recordings in a tree with one folder for each class: ``{class}/.../file``.

The files are of any kind that libsndfile decodes (wav, flac, ogg, opus, mp3, aiff ...), of any rate and channel count. When the
folders of the root are named like splits (``train``, ``validation`` or ``val`` or ``dev``, ``test`` ...), they are the splits and
the classes are the folders below them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card, Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.sets._files import SPLIT_OF, check_name, find_root, list_recordings, wrong_layout


@dataclass(frozen=True, kw_only=True)
class Folder(Dataset):
    """A folder of recordings, sorted into one folder for each class."""

    card: ClassVar[Card] = Card(
        title="A folder of your own recordings",
        layout="{class}/.../*.wav (or .flac, .ogg, .opus, .mp3, .aiff ...), or {train,validation,test}/{class}/.../*",
    )

    root: Annotated[Path, Field(description="folder that holds the classes' folders, or the splits' folders")]
    group_pattern: Annotated[
        str | None,
        Field(
            description="regular expression with a part (?P<group>...), searched in the path below the class's folder "
            "(name of the file, and of folders between), which says whose clip it is; null: nobody's"
        ),
    ] = None
    split_folders: Annotated[
        bool | None,
        Field(
            description="whether the root's folders are splits; null: yes if all are named like splits and one is train"
        ),
    ] = None

    @field_validator("group_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern).groupindex
            except re.error as error:
                raise ValueError(f"is no regular expression: {error}") from error
            if "group" not in groups:
                raise ValueError(r"has no part named group, as in '(?P<group>[^_]+)_\d+'")
        return pattern

    def manifest(self) -> pa.Table:
        """Return the clips, with the names of their folders as labels. A remark says which other files there are.

        Raises:
            DataError: also for an audio file that lies outside the classes' folders, or one that ``group_pattern`` does not fit.
        """
        root = find_root(self.root, self.card)
        files, left_out = list_recordings(root)
        if not files:
            error = wrong_layout(root, self.card, f"there are no {', '.join(AUDIO_SUFFIXES)} files")
            raise DataError(f"{error}. {left_out}") if left_out else error
        splits = self._has_splits({name.split("/")[0] for name in files if "/" in name})
        depth = 2 if splits else 1
        rows = []
        for name in files:
            check_name(name, root)
            parts = name.split("/", depth)
            if len(parts) <= depth:
                raise wrong_layout(root, self.card, f"{name!r} lies in no class's folder; move it into one")
            rows.append(
                {
                    "clip": name,
                    "path": str(root / name),
                    "label": parts[depth - 1],
                    "group": self._group(parts[depth], name),
                    "split": self._split(parts[0]) if splits else None,
                }
            )
        return make_manifest(rows, f"{self.card.title}, {root}", [left_out] if left_out else ())

    def _has_splits(self, folders: set[str]) -> bool:
        if self.split_folders is not None:
            return self.split_folders
        named = [SPLIT_OF.get(folder.lower()) for folder in folders]
        return None not in named and "train" in named

    def _split(self, folder: str) -> str:
        if folder.lower() not in SPLIT_OF:
            raise DataError(
                f"{self.card.title}, {self.root}: split_folders is true and {folder!r} is no split; known names: "
                f"{', '.join(SPLIT_OF)}"
            )
        return SPLIT_OF[folder.lower()]

    def _group(self, path: str, name: str) -> str | None:
        if self.group_pattern is None:
            return None
        found = re.search(self.group_pattern, path)
        if found is None or not found["group"]:
            raise DataError(
                f"{self.card.title}, {self.root}: group_pattern {self.group_pattern!r} finds no group in {path!r} (of {name!r})"
            )
        return found["group"]
