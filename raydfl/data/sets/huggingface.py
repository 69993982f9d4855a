"""Folders of the library ``datasets`` (Hugging Face), read without it: Parquet, ``save_to_disk``, and folders of files.

- Parquet files with recordings, as on the hub: ``data/train-00000-of-00002.parquet``, or similar names.
- Output of ``save_to_disk``: uncompressed Arrow files, with a folder for each of several splits.
- ``audiofolder``: files next to a ``metadata.csv``, ``metadata.jsonl`` or ``metadata.parquet`` with a column ``file_name``. Without
  a list, folders are classes, as in :mod:`raydfl.data.sets.folder`.

A recording is bytes, a struct with ``bytes``, a struct with ``array`` and ``sampling_rate`` (in Parquet), or, without bytes,
the ``path`` of a file. Numbers of the type ``ClassLabel`` are replaced by their names; -1 is unlabelled. A list of classes is
joined by ``|``. Recordings are not copied: a clip's path is an address in the file (docs/data.md#recordings-in-larger-files).
The library itself would copy each recording into its cache, and does not return the address of a recording.
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
from raydfl.data.sets._files import find_root, list_files, make_layout_error, resolve_path
from raydfl.data.sets._packed import PackedSet, find_files, find_splits, name_label_and_group, set_split
from raydfl.data.sets._tables import LISTS, open_table, readable_table
from raydfl.data.sets.folder import Folder


@dataclass(frozen=True, kw_only=True)
class HuggingFace(PackedSet):
    """A folder of the library datasets.

    Extra columns: columns of text, numbers and booleans, and the addresses in further columns of recordings or images, for
    ``data.views``. A clip's id is the file's path below the root and the number of the row, such as
    ``data/train-00000-of-00002.parquet/12``. In a list of files, the id is the recording's path.
    """

    card: ClassVar[Card] = Card(
        title="A folder of Hugging Face datasets",
        layout="*.parquet with recordings in them, or the output of save_to_disk (*.arrow), or recordings next to a metadata.csv "
        "or metadata.jsonl, or {class}/*.wav",
    )

    files: Annotated[
        str | None,
        Field(
            description="Pattern for the files below the root, such as en/{train,test}-*.parquet. null: all *.parquet, else all "
            "*.arrow."
        ),
    ] = None
    audio_column: Annotated[
        str | None,
        Field(description="Column with the recordings (or images). null: audio, or the only column of recordings."),
    ] = None
    label_column: Annotated[
        str | None,
        Field(description="Column with the classes. null: label, or the only column of the type ClassLabel."),
    ] = None
    group_column: Annotated[
        str | None, Field(description="Column with the owner of a clip. null: group, if present.")
    ] = None

    def manifest(self) -> pa.Table:
        """List the rows, file by file."""
        root, files = self._find_files()
        if not files:
            return Folder(root=root).manifest()
        if PurePosixPath(files[0]).name not in LISTS:
            return self.read_files(root, files)
        # The folders of the recordings are the splits, since a list may name recordings of several splits.
        tables = [self.clips(root, file) for file in files]
        folders = [[f"{PurePosixPath(clip).parent}/" for clip in table["clip"].to_pylist()] for table in tables]
        splits = find_splits(itertools.chain(*folders), self.splits, f"{self.card.title} in {root}")
        for number, clip_folders in enumerate(folders):
            table = tables[number].filter(pa.array([folder in splits for folder in clip_folders], pa.bool_()))
            tables[number] = set_split(table, [splits[folder] for folder in clip_folders if folder in splits])
        return self.join(tables, root)

    def _find_files(self) -> tuple[Path, list[str]]:
        """Return the folder, and its files of recordings or lists of recordings. Without files, folders are classes."""
        path = resolve_path(self.root)
        if self.files is not None or path.is_file():
            return find_files(self.root, self.files or path.name, self.card)
        root = find_root(self.root, self.card)
        names = list_files(root)
        # The library derives files that start with "cache-" from the set's files.
        tables = [name for name in names if not PurePosixPath(name).name.startswith(("cache-", *LISTS))]
        files = (
            [name for name in tables if name.lower().endswith(".parquet")]
            or [name for name in tables if name.lower().endswith(".arrow")]
            or [name for name in names if PurePosixPath(name).name in LISTS]
        )
        if not files and not any(name.lower().endswith(AUDIO_SUFFIXES) for name in names):
            raise make_layout_error(root, self.card, "there are no recordings, and no files with recordings in them,")
        return root, files

    def clips(self, root: Path, file: str) -> pa.Table:
        """Read the clips of a Parquet file, an Arrow file or a list."""
        table = open_table(root / file)
        audio, label = table.find_audio_column(self.audio_column), self.label_column or table.find_class_column()
        group = self.group_column or ("group" if "group" in table.schema.names else None)
        with readable_table(root / file):
            columns = {name: pa.array(table.list_addresses(name), pa.string()) for name in (audio, *table.media)}
            values = name_label_and_group(table.read(label, group), label, group, str(root / file))
        addresses = columns.pop(audio).to_pylist()
        listed = PurePosixPath(file).name in LISTS
        clips = [os.path.relpath(path, root) if listed else f"{file}/{row}" for row, path in enumerate(addresses)]
        columns |= {"clip": pa.array(clips, pa.string()), "path": pa.array(addresses, pa.string())}
        return pa.table(columns | dict(zip(values.column_names, values.columns, strict=True)))
