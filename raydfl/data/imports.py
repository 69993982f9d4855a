"""Import of recordings in common formats, as a list for the data set ``manifest``. The recordings are not copied."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from raydfl.core.errors import DataError, InputError, nearest
from raydfl.core.files import write_atomically
from raydfl.core.registry import build
from raydfl.core.remote import is_uri
from raydfl.data.dataset import Dataset, find_dataset
from raydfl.data.manifest import read_remarks
from raydfl.data.remote import fetch_recordings
from raydfl.data.sets._files import list_files, resolve_path
from raydfl.data.sets._tables import LISTS
from raydfl.data.sets.manifest import CHANNEL
from raydfl.data.source import list_isolated
from raydfl.data.steps.listing import STANDARD

FORMATS = ("audiofolder", "huggingface", "lhotse", "webdataset")
"""Supported formats. Except ``audiofolder``, they are also names of data sets."""
OWNERS = ("speaker", "client_id", "speaker_id")
"""Common columns with the owner of a clip."""
NOBODY = "none"
"""Value of ``client`` for clips without an owner."""


def import_recordings(
    kind: str, source: str, out: Path, client: str | None = None, options: Mapping[str, Any] | None = None
) -> list[str]:
    """Write a list of recordings in a common format.

    Args:
        kind: a format of :data:`FORMATS`.
        source: a folder, a file, or a URI. Recordings at a URI are copied to the cache.
        out: path of the list, ``*.csv`` or ``*.parquet``.
        client: column with the owner of a clip. ``None``: the only column of :data:`OWNERS`. :data:`NOBODY`: no owner.
        options: options of the data set for the format.

    Returns:
        Messages to the user.

    Raises:
        InputError: an argument is invalid, or the recordings cannot be listed.
    """
    if kind not in FORMATS:
        raise InputError(f"unknown format {kind!r}. {nearest(kind, FORMATS)}")
    if out.suffix not in (".csv", ".parquet"):
        raise InputError(f"--out {out}: the name must end in .csv or .parquet")
    if out.exists():
        raise InputError(f"--out {out}: the file exists already. Remove it, or choose another name")
    root = fetch_recordings(source, None) if is_uri(source) else resolve_path(Path(source))
    settings: dict[str, Any] = {"root": root} | dict(options or {})
    if client not in (None, NOBODY):
        settings["group_column"] = client
    dataset, settings = _find_reader(kind, root, settings)
    make = functools.partial(build, dataset, settings, "import")
    make()  # Invalid options are errors of the command, not of the recordings.
    try:
        table = list_isolated(make, str(root))
    except DataError as error:  # the message has the options of a configuration, not of the command line
        text = re.sub(rf"\bdata\.(?={'|'.join(dataset.__dataclass_fields__)})", "", str(error))
        raise DataError(text.replace("group_column", "--client")) from error
    remarks = read_remarks(table)
    table, choice = _choose_owners(table, client, "speaker" if kind == "lhotse" else "group")
    classes, clients = (pc.count_distinct(table.column(name)).as_py() for name in ("label", "group"))
    if kind == "lhotse":
        table = table.rename_columns([CHANNEL if name == "channel" else name for name in table.column_names])
    _write(table, resolve_path(out))
    return [*remarks, f"{table.num_rows:,} clips of {classes:,} classes and {clients:,} clients", choice]


def _find_reader(kind: str, root: Path, options: dict[str, Any]) -> tuple[type[Dataset], dict[str, Any]]:
    """Return the data set for a format, and its options."""
    if kind == "audiofolder":
        lists = {PurePosixPath(name).name for name in list_files(root)} & {*LISTS} if root.is_dir() else ()
        if lists:
            options = {"files": f"**/{{{','.join(sorted(lists))}}}"} | options
        kind = "huggingface" if lists else "folder"
    return find_dataset(kind), options


def _choose_owners(table: pa.Table, client: str | None, default: str) -> tuple[pa.Table, str]:
    """Set the owners of clips (the column ``group``).

    Args:
        table: the clips.
        client: column with the owners, :data:`NOBODY`, or ``None`` for a known column.
        default: the data set's default column, for messages.

    Returns:
        The clips, and a message about the choice.

    Raises:
        InputError: several columns may contain the owners.
    """
    known = [name for name in OWNERS if name in table.column_names]
    place = table.column_names.index("group")
    if client == NOBODY or (client is None and not known and table.column("group").null_count == table.num_rows):
        names = ", ".join(sorted({*table.column_names} - {*STANDARD}))
        table = table.set_column(place, "group", pa.nulls(table.num_rows, pa.string()))
        hint = f" Use --client with one of {names} to name them." if names else ""
        return table, f"no clip has an owner.{hint}"
    if client is None and table.column("group").null_count == table.num_rows:
        if len(known) > 1:
            raise InputError(
                f"the columns {', '.join(known)} may contain the owner of a clip. Choose a column with --client COLUMN, or no "
                f"owners with --client {NOBODY}"
            )
        client = known[0]
        table = table.set_column(place, "group", table.column(client).cast(pa.string()))
    return table, (
        f"clients are taken from {client or default}. Choose a different column with --client COLUMN, or no owners with "
        f"--client {NOBODY}"
    )


def _write(table: pa.Table, out: Path) -> None:
    """Write the list. Paths below its folder become relative, so that list and recordings can be moved together."""
    prefix = f"{out.parent}/".replace("//", "/")
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for name, values in columns.items():
        if pa.types.is_string(values.type) and pc.all(pc.starts_with(values, prefix), min_count=1).as_py():
            columns[name] = pc.utf8_slice_codeunits(values, len(prefix))
    content = pa.table(
        {name: values for name, values in columns.items() if name == "label" or values.null_count < len(values)}
    )
    write = pq.write_table if out.suffix == ".parquet" else pa.csv.write_csv
    write_atomically(out, functools.partial(write, content))
