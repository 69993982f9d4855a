"""Your own recordings in a folder for each class: ``{class}/.../file``, or ``{owner}/{class}/.../file`` with ``owner_folders``.

Folders of the root with the names of splits (``train``, ``validation`` or ``val`` or ``dev``, ``test`` ...) are splits, with
the folders of the classes or owners inside. Hidden files are ignored, and links to folders are followed. docs/data.md#folder
has an example.

All files with an ending known to libsndfile are clips: ``.wav``, ``.flac``, ``.ogg``, ``.oga``, ``.opus``, ``.mp3``, ``.aiff``,
``.aif``, ``.au``, ``.caf``, ``.w64`` and rarer endings, with any rate and number of channels. ``raydfl data info``, ``prepare``
and ``run`` report the remaining files: their number by ending, and the first names. For files that ffmpeg decodes (``.m4a``,
``.aac``, ``.wma``, ``.mp4`` ...) the message includes a command for their conversion to wav. A recording in two formats
(``a.mp3`` and ``a.wav``) counts as two clips; list the files to use in a manifest (docs/data.md#manifest). In a folder without
recordings, all videos are clips (extra ``video``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card, Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.sets._files import SPLIT_OF, check_name, find_root, list_recordings, make_layout_error
from raydfl.data.video import has_decoder


@dataclass(frozen=True, kw_only=True)
class Folder(Dataset):
    """Recordings sorted into a folder for each class."""

    card: ClassVar[Card] = Card(
        title="A folder of your own recordings",
        layout="{class}/.../*.wav (or .flac, .ogg, .opus, .mp3, .aiff ...), or {train,validation,test}/{class}/.../*",
    )

    root: Annotated[Path, Field(description="Folder with the folders of the classes or splits.")]
    group_pattern: Annotated[
        str | None,
        Field(
            description="Regular expression for the owner of a clip, with a named group (?P<group>...), searched in the path "
            "below the class's folder. null: clips have no owner."
        ),
    ] = None
    owner_folders: Annotated[
        bool,
        Field(
            description="Whether the folders of the root or of a split are owners (speakers, machines), with the folders of the "
            "classes inside. Excludes group_pattern."
        ),
    ] = False
    split_folders: Annotated[
        bool | None,
        Field(
            description="Whether the root's folders are splits. null: yes if all have names of splits, including train."
        ),
    ] = None

    @field_validator("group_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern).groupindex
            except re.error as error:
                raise ValueError(f"is not a regular expression: {error}") from error
            if "group" not in groups:
                raise ValueError(r"needs a group named group, as in '(?P<group>[^_]+)_\d+'")
        return pattern

    @model_validator(mode="after")
    def _check_owners(self) -> Folder:
        if self.owner_folders and self.group_pattern is not None:
            raise ValueError("group_pattern and owner_folders both set the owners. Remove one")
        return self

    def manifest(self) -> pa.Table:
        """List the clips, with the names of their folders as labels. A message describes the unlisted files.

        Raises:
            DataError: the root is missing, an audio file is outside the classes' folders, or ``group_pattern`` does not match.
        """
        root = find_root(self.root, self.card)
        files, unlisted = list_recordings(root)
        if not files:
            videos, rest = list_recordings(root, films=True)
            if not videos or not has_decoder():
                error = make_layout_error(root, self.card, f"there are no {', '.join(AUDIO_SUFFIXES)} files")
                install = "To read the videos, install the extra: pip install 'raydfl[video]'" if videos else ""
                raise DataError(". ".join(filter(None, [str(error), install, unlisted])))
            files, unlisted = videos, rest
        splits = self._has_splits({name.split("/")[0] for name in files if "/" in name})
        above = [*(["split"] if splits else []), *(["owner"] if self.owner_folders else []), "class"]
        depth = len(above)
        rows = []
        for name in files:
            check_name(name, root)
            parts = name.split("/", depth)
            if len(parts) <= depth:
                raise make_layout_error(
                    root, self.card, f"{name!r} is outside the folders of the classes; move it into one"
                )
            folders = dict(zip(above, parts, strict=False))
            rows.append(
                {
                    "clip": name,
                    "path": str(root / name),
                    "label": folders["class"],
                    "group": folders.get("owner") or self._find_group(parts[depth], name),
                    "split": self._get_split(parts[0]) if splits else None,
                }
            )
        return make_manifest(rows, f"{self.card.title}, {root}", [unlisted] if unlisted else ())

    def _has_splits(self, folders: set[str]) -> bool:
        if self.split_folders is not None:
            return self.split_folders
        splits = [SPLIT_OF.get(folder.lower()) for folder in folders]
        return None not in splits and "train" in splits

    def _get_split(self, folder: str) -> str:
        if folder.lower() not in SPLIT_OF:
            raise DataError(
                f"{self.card.title}, {self.root}: split_folders is true, but {folder!r} is not the name of a split. Use one of "
                f"{', '.join(SPLIT_OF)}"
            )
        return SPLIT_OF[folder.lower()]

    def _find_group(self, path: str, name: str) -> str | None:
        if self.group_pattern is None:
            return None
        match = re.search(self.group_pattern, path)
        if match is None or not match["group"]:
            raise DataError(
                f"{self.card.title}, {self.root}: group_pattern {self.group_pattern!r} finds no group in {path!r} (of {name!r}). "
                f"Change the pattern, or rename the file"
            )
        return match["group"]
