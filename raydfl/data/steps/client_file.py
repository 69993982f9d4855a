"""Partition by a user's table of clients, with a row for each client: its clips and its profile.

Two clients may have the same clips, which are then kept once. The file may describe millions of clients: only the needed columns
are read, and an Arrow file is mapped into memory. The columns:

========= ======= ==================================================================================================
column    type    meaning
========= ======= ==================================================================================================
first     integer row of the list of clips, from 0, at which the client's clips begin; clips that ``data.leave_out``
                  leaves out are not on the list
clips     integer how many rows of the list the client has from there on
client    string  the client's id, which may be an integer; without this column they are ``client-0``, ``client-1`` ...
========= ======= ==================================================================================================

Further columns are for ``data.profile``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from raydfl.core.errors import DataError, nearest
from raydfl.data.client_ids import ClientIds
from raydfl.data.csv_file import read_csv
from raydfl.data.steps.listing import Assignment
from raydfl.data.tables import encode

_FIRST, _CLIPS, _CLIENT = "first", "clips", "client"
_WHERE = "data.partition.file"
_KINDS = (".parquet", ".arrow", ".feather", ".csv")


def share_clips(tables: Assignment, path: Path, minimum: int, profiles: Mapping[str, str]) -> Assignment:
    """Give clips to clients as a table says: the table of clients gets the ranges ``first`` and ``stop`` of training clips.

    Args:
        minimum: training clips that each client must have; clients do without their held-out clips.
        profiles: further columns to read, with the settings that name them.

    Raises:
        DataError: the table cannot be used, or leaves a client below the minimum.
    """
    trained = tables.has_role("train")
    rows, listed = tables.codes("clip")[trained], len(tables.clips.column("clip").dictionary)
    table = _read(path, {_FIRST: _WHERE, _CLIPS: _WHERE, **profiles})
    before = np.searchsorted(rows, np.arange(listed + 1)).astype(np.int32)
    first, stop = (before[bound] for bound in _find_ranges(table, listed, path))
    counts = stop - first
    if counts.min() < minimum:
        row = int(counts.argmin())
        raise DataError(
            f"{_WHERE}: {int((counts < minimum).sum()):,} of {len(table):,} clients have fewer than "
            f"data.partition.minimum {minimum} clips to train on; the one in row {row + 1} of {path} has "
            f"{counts[row]}: its other clips are held out by data.split or cannot be read; give it others"
        )
    # What no client has is left out: how many begin at or before a clip, and how many end there.
    begun, ended = (np.cumsum(np.bincount(bound, minlength=len(rows) + 1)) for bound in (first, stop))
    owned = (begun > ended)[:-1]
    place = np.concatenate([[0], np.cumsum(owned)]).astype(np.int32)
    ids = _read_ids(table, path)
    columns = {name: table.column(name).combine_chunks() for name in profiles}
    clients = {**ids.columns(), "first": pa.array(place[first]), "stop": pa.array(place[stop])}
    clients |= {f"column:{name}": column for name, column in columns.items()}
    order = np.concatenate([np.flatnonzero(trained)[owned], np.flatnonzero(~trained)])
    found = replace(tables.select(order), clients=pa.record_batch(clients))
    found = found.with_clips(client=encode(np.full(len(order), -1, np.int32), ids.column))
    if owned.all():
        return found
    return found.with_message(f"{(~owned).sum()} training clips belong to no client: none of {path} has them")


def _read(path: Path, needed: Mapping[str, str]) -> pa.Table:
    """Read columns of a table, and the clients' ids if there are any.

    Args:
        path: ``*.parquet``, ``*.arrow``, ``*.feather`` or ``*.csv``.
        needed: columns in which every row must have a value, with the settings that ask for them.
    """
    kind = path.suffix.lower()
    if kind not in _KINDS:
        raise DataError(
            f"{_WHERE}: the name of {path} must end in one of {', '.join(_KINDS)}; write the table of clients as such a file"
        )
    try:
        if kind == ".parquet":
            file = pa.parquet.ParquetFile(path, memory_map=True)
            names = file.schema_arrow.names
            table = file.read([name for name in (*needed, _CLIENT) if name in names])
        elif kind == ".csv":
            table = read_csv(path, [_CLIENT])
            names = table.column_names
        else:
            table, names = _map(path, (*needed, _CLIENT))
    except (OSError, pa.ArrowException) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise DataError(
            f"{_WHERE}: {path} cannot be read: {reason}; it must be a Parquet, Arrow or CSV file with a row for each client"
        ) from error
    if not table.num_rows:
        raise DataError(f"{_WHERE}: {path} has no rows; it must have one for each client")
    wanted = dict(needed) | ({_CLIENT: _WHERE} if _CLIENT in names else {})
    for name, where in wanted.items():
        if names.count(name) != 1:
            hint = "it is there several times" if name in names else nearest(name, names)
            raise DataError(f"{where}: the table of clients {path} has no single column {name!r}; {hint}")
        column = table.column(name)
        if column.null_count:
            row = pc.index(pc.is_null(column), True).as_py()
            raise DataError(
                f"{where}: row {row + 1} of {path} has no {name!r}; {column.null_count:,} such rows; fill them in"
            )
    return table


def _map(path: Path, wanted: tuple[str, ...]) -> tuple[pa.Table, list[str]]:
    """Map columns of an Arrow file, and return the names of all its columns."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        names: list[str] = reader.schema.names
        chosen = [number for number, name in enumerate(names) if name in wanted]
        # Batch by batch: read_all copies, and of a compressed file one batch at a time is unpacked.
        batches = [reader.get_batch(number).select(chosen) for number in range(reader.num_record_batches)]
        return pa.Table.from_batches(batches, pa.schema([reader.schema.field(number) for number in chosen])), names


def _find_ranges(table: pa.Table, clips: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranges of the clients in the list of clips, first rows and stops: int32 [clients] each.

    Args:
        clips: rows of the list of clips.
    """
    first, count = (_to_integers(table.column(name), name, path) for name in (_FIRST, _CLIPS))
    stop = first + count
    wrong = (first < 0) | (first > clips) | (count < 1) | (count > clips) | (stop > clips)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{_WHERE}: row {row + 1} of {path} says first {first[row]} and clips {count[row]}, but clips "
            f"must be at least 1 and the list has the rows 0 to {clips - 1}; {int(wrong.sum()):,} such rows"
        )
    return first.astype(np.int32), stop.astype(np.int32)


def _to_integers(column: pa.ChunkedArray, name: str, path: Path) -> np.ndarray:
    if not pa.types.is_integer(column.type):
        raise DataError(f"{_WHERE}: column {name!r} of {path} is of the type {column.type}; it must hold integers")
    try:
        found: np.ndarray = column.cast(pa.int64()).to_numpy()
    except pa.ArrowException as error:
        raise DataError(f"{_WHERE}: column {name!r} of {path}: {error}") from error
    return found


def _read_ids(table: pa.Table, path: Path) -> ClientIds:
    if _CLIENT not in table.column_names:
        large = pa.large_string()
        numbers = pa.array(np.arange(len(table))).cast(large)
        width = len(str(len(table) - 1))
        padded = pc.utf8_lpad(numbers, width, "0")
        return ClientIds.from_strings(
            pc.binary_join_element_wise(pa.scalar("client", large), padded, pa.scalar("-", large))
        )
    column = table.column(_CLIENT)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if not texts and not pa.types.is_integer(kind):
        raise DataError(
            f"{_WHERE}: column {_CLIENT!r} of {path} is of the type {column.type}; ids must be strings or integers"
        )
    column = column.cast(kind).cast(pa.large_string())
    # combine_chunks would copy a single chunk too.
    column = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    empty = pc.index(column, pa.scalar("", column.type)).as_py()
    if empty >= 0:
        raise DataError(f"{_WHERE}: the id in row {empty + 1} of {path} is empty; give every client one")
    ids = ClientIds.from_strings(column)
    twice = ids.find_duplicate()
    if twice is not None:
        raise DataError(f"{_WHERE}: more than one row of {path} has the client {twice!r}; a client is one row")
    return ids
