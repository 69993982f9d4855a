"""Folders of the library ``datasets`` (Hugging Face), read without it: Parquet, ``save_to_disk``, and folders of files.

- Parquet files with the recordings in them, as the hub has them: ``data/train-00000-of-00002.parquet``, or other names.
- What ``save_to_disk`` writes: Arrow files, one folder for each split where there are several.
- ``audiofolder``: files beside a ``metadata.csv``, ``metadata.jsonl`` or ``metadata.parquet`` with a column ``file_name``. Without
  a list the set is as :mod:`raydfl.data.sets.folder`.

Recordings stay where they are: a clip's path is an address in the file (:mod:`raydfl.data.packed`). The library itself would copy
each recording into its cache, and does not return where a recording is stored.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card
from raydfl.data.sets._files import absolute, find_root, list_files, wrong_layout
from raydfl.data.sets._packed import PackedSet, find_files, find_splits, named, with_split
from raydfl.data.sets._tables import LISTS, open_table, readable_table
from raydfl.data.sets.folder import Folder


@dataclass(frozen=True, kw_only=True)
class HuggingFace(PackedSet):
    """A folder of the library datasets.

    Extra columns: those of text, numbers and truth values; and for each further one with recordings or images where these lie, for
    ``data.views``. A clip's id is the file's path below the root and the number of the row, as in
    ``data/train-00000-of-00002.parquet/12``; in a list of files that of the recording.
    """

    card: ClassVar[Card] = Card(
        title="A folder of Hugging Face datasets",
        layout="*.parquet with recordings in them, or what save_to_disk wrote (*.arrow), or recordings beside a metadata.csv or "
        "metadata.jsonl, or {class}/*.wav",
    )

    files: Annotated[
        str | None,
        Field(
            description="which files below the root, such as en/{train,test}-*.parquet; null: all of them, *.parquet before *.arrow"
        ),
    ] = None
    audio_column: Annotated[
        str | None,
        Field(description="column with the recordings (or images); null: the only one, or audio"),
    ] = None
    label_column: Annotated[
        str | None, Field(description="column with the classes; null: label, or the only one of the type ClassLabel")
    ] = None
    group_column: Annotated[
        str | None, Field(description="column with the owner of a clip; null: group, if present")
    ] = None

    def manifest(self) -> pa.Table:
        """List the rows, file by file."""
        root, files = self._files()
        if not files:
            return Folder(root=root).manifest()
        if PurePosixPath(files[0]).name not in LISTS:
            return self.read_files(root, files)
        # The folders of the recordings state the splits; a list may name recordings of several.
        tables = [self.clips(root, file) for file in files]
        folders = [[f"{PurePosixPath(clip).parent}/" for clip in table["clip"].to_pylist()] for table in tables]
        splits = find_splits(itertools.chain(*folders), self.splits, f"{self.card.title} in {root}")
        for number, own in enumerate(folders):
            table = tables[number].filter(pa.array([folder in splits for folder in own], pa.bool_()))
            tables[number] = with_split(table, [splits[folder] for folder in own if folder in splits])
        return self.join(tables, root)

    def _files(self) -> tuple[Path, list[str]]:
        """Return the folder, and the files with recordings in them, or the lists of recordings; none: folders are classes."""
        place = absolute(self.root)
        if self.files is not None or place.is_file():
            return find_files(self.root, self.files or place.name, self.card)
        root = find_root(self.root, self.card)
        names = list_files(root)
        # Files that begin with "cache-" are what the library computed of the others.
        tables = [name for name in names if not PurePosixPath(name).name.startswith(("cache-", *LISTS))]
        found = (
            [name for name in tables if name.lower().endswith(".parquet")]
            or [name for name in tables if name.lower().endswith(".arrow")]
            or [name for name in names if PurePosixPath(name).name in LISTS]
        )
        if not found and not any(name.lower().endswith(AUDIO_SUFFIXES) for name in names):
            raise wrong_layout(root, self.card, "there are no recordings, and no files with recordings in them,")
        return root, found

    def clips(self, root: Path, file: str) -> pa.Table:
        """See :class:`PackedSet`."""
        table = open_table(root / file)
        audio, label = table.recordings(self.audio_column), self.label_column or table.class_column()
        group = self.group_column or ("group" if "group" in table.schema.names else None)
        with readable_table(root / file):
            columns = {name: pa.array(table.places(name), pa.string()) for name in (audio, *table.media)}
            values = named(table.read(label, group), label, group, str(root / file))
        places = columns.pop(audio).to_pylist()
        listed = PurePosixPath(file).name in LISTS
        clips = [os.path.relpath(path, root) if listed else f"{file}/{row}" for row, path in enumerate(places)]
        columns |= {"clip": pa.array(clips, pa.string()), "path": pa.array(places, pa.string())}
        return pa.table(columns | dict(zip(values.column_names, values.columns, strict=True)))
