"""Tables of clients and clips written by the user, in place of steps.

The table of clients has a row for each client. It may describe millions of clients: only the needed columns are read, and Arrow
files are memory-mapped. ``first`` and ``clips`` belong to ``data.partition.by: table``, where clients may share clips.

====================== ======= ====================================================================================
column                 type    meaning
====================== ======= ====================================================================================
client                 string  id, also as an integer; default of ``by: table``: ``client-0``, ``client-1`` ...
first                  integer row of the client's first clip in the list of clips, from 0; the list has no clips of
                       ``data.leave_out``
clips                  integer number of the client's clips, in consecutive rows
noisy, label_errors    bool    clients with noise or wrong labels in their training clips, in place of a draw
====================== ======= ====================================================================================

Further columns are for ``data.profile``. The table of clips has a row for each used clip:

====================== ======= ====================================================================================
column                 type    meaning
====================== ======= ====================================================================================
clip                   string  name in the list of clips
role                   string  train, validation, client_test, server_validation or test; in place of ``data.split``
pool                   string  pool of a training clip, null for held-out clips; in place of ``data.pools``
client                 string  owner, null for the server; in place of ``data.partition``
====================== ======= ====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from pydantic import Field

from raydfl.core.errors import DataError, nearest
from raydfl.core.files import check_regular
from raydfl.core.isolation import call_isolated, reading
from raydfl.core.settings import Settings
from raydfl.data.client_ids import ClientIds, to_numbers
from raydfl.data.csv_file import read_csv
from raydfl.data.steps.listing import TRAIN, UNLABELLED, Assignment
from raydfl.data.tables import ROLES, encode

_ROLES = ROLES[:5]
_CLIPS_FILE, _CLIENTS_FILE = "data.tables.clips", "data.tables.clients"
_FIRST, _CLIPS, _CLIENT = "first", "clips", "client"
_FLAGS = ("noisy", "label_errors")
_KINDS = (".parquet", ".arrow", ".feather", ".csv")


class TableSettings(Settings):
    """Tables of clips and clients, in place of steps: Parquet, Arrow or CSV files."""

    clips: Path | None = Field(
        None,
        description="Table with a row for each clip: its role, pool and client, in place of split, pools and partition. Clips "
        "without a row are left out. null: none.",
    )
    clients: Path | None = Field(
        None,
        description="Table with a row for each client: its id, and columns for profile. Sets the clients' order. null: none.",
    )


def keep_named_clips(manifest: pa.Table, path: Path) -> pa.Table:
    """Select the clips of a list that are in a user's table.

    Raises:
        DataError: the table is invalid, has a clip twice, or has a clip outside the list.
    """
    table = _read_table(path, _CLIPS_FILE, {"clip": _CLIPS_FILE}, ())
    names = _to_text(table.column("clip"), "clip", path, _CLIPS_FILE)
    known = manifest.column("clip").combine_chunks().cast(pa.large_string())
    position = to_numbers(pc.index_in(names, value_set=known).fill_null(-1))
    _check_rows(position < 0, "is not on the list of clips", path, names)
    order = np.argsort(position, kind="stable")
    repeated = np.zeros(len(position), bool)
    repeated[order[1:]] = position[order[1:]] == position[order[:-1]]
    problem = "has a row already: a clip has one role and one client (only data.partition.by: table shares clips)"
    _check_rows(repeated, problem, path, names)
    return manifest.take(pa.array(np.sort(position)))


def _check_rows(wrong: np.ndarray, problem: str, path: Path, names: pa.LargeStringArray) -> None:
    """Raise an error for the first wrong row of a table of clips."""
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{_CLIPS_FILE}: row {row + 1} of {path}, clip {names[row].as_py()!r}, {problem}; rows to correct: {wrong.sum():,}"
        )


def add_clip_columns(tables: Assignment, path: Path) -> Assignment:
    """Add the columns ``role``, ``pool`` and ``client`` of a user's table of clips.

    Raises:
        DataError: the table is invalid.
    """
    table = _read_table(path, _CLIPS_FILE, {"clip": _CLIPS_FILE}, ("role", "pool", _CLIENT))
    texts = {name: _to_text(table.column(name), name, path, _CLIPS_FILE) for name in table.column_names}
    for name in [name for name in ("pool", _CLIENT) if name in texts]:
        empty = to_numbers(pc.equal(texts[name], "").fill_null(False))
        _check_rows(empty, f"has an empty {name}; fill it in, or write null", path, texts["clip"])
    if "role" in texts:
        role = to_numbers(pc.index_in(texts["role"], value_set=pa.array(_ROLES, pa.large_string())).fill_null(-1))
        _check_rows(role < 0, f"has an unknown role, not one of {', '.join(_ROLES)}", path, texts["clip"])
        for name, owned in (("pool", role == 0), (_CLIENT, role < _ROLES.index("server_validation"))):
            if name in texts:
                absent = np.asarray(texts[name].is_null())
                _check_rows(owned & absent, f"has no {name}, but its role needs it", path, texts["clip"])
                _check_rows(~owned & ~absent, f"has a {name}, but its role excludes it", path, texts["clip"])
    clips = tables.clips.column("clip").dictionary.cast(pa.large_string())
    rows = to_numbers(pc.index_in(clips, value_set=texts["clip"]))[tables.codes("clip")]
    columns: dict[str, pa.Array] = {}
    if "role" in texts:
        columns["role"] = encode(role[rows].astype(np.int8), ROLES)
    if "pool" in texts:
        # A method without a plan trains on the first pool, which must have labels.
        pools = sorted(texts["pool"].unique().drop_null().to_pylist(), key=lambda name: name == UNLABELLED)
        pool = to_numbers(pc.index_in(texts["pool"], value_set=pa.array(pools, pa.large_string())).fill_null(-1))
        columns["pool"] = encode(pool[rows], pools)
    if _CLIENT in texts:
        columns[_CLIENT] = texts[_CLIENT].take(pa.array(rows))
    return tables.set_clips(**columns)


def match_clients(tables: Assignment, path: Path, columns: Iterable[str]) -> Assignment:
    """Sort the clients by a user's table of clients, and add its columns.

    Args:
        columns: optional columns to read.

    Raises:
        DataError: the table is invalid, or its clients differ from the partition's.
    """
    where = _CLIENTS_FILE
    table = _read_table(path, where, {_CLIENT: where}, (*_FLAGS, *columns))
    ids, former_ids = _read_ids(table, path, where), tables.ids
    for names, known, problem in (
        (former_ids, ids, f"{path} has no row for client {{!r}}"),
        (ids, former_ids, f"{path} has the client {{!r}}, who has no clips"),
    ):
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            raise DataError(f"{where}: {problem.format(unknown)}. {nearest(unknown, known)}")
    position = np.array([ids.index(name) for name in former_ids], np.int32)
    client = tables.codes(_CLIENT)
    client = np.where(client < 0, -1, position[client]).astype(np.int32)
    order = np.argsort(np.where(client < 0, len(ids), client), kind="stable")
    clients = ids.columns()
    if "group" in tables.clients.schema.names:
        clients["group"] = tables.clients.column("group").take(pa.array(np.argsort(position)))
    clients |= _get_columns(table, [name for name in table.column_names if name != _CLIENT], path, where)
    result = replace(tables, clients=pa.record_batch(clients)).set_clips(client=encode(client, ids.column))
    return result.select(order)


def share_clips(tables: Assignment, path: Path, where: str, minimum: int, profiles: Mapping[str, str]) -> Assignment:
    """Assign clips to clients by a table in which clients may share clips.

    The table of clients gets the ranges ``first`` and ``stop`` of rows of training clips. Held-out clips leave these ranges.

    Args:
        where: the setting with the table's path.
        minimum: smallest number of training clips of a client.
        profiles: additional columns to read, with the settings that require them.

    Raises:
        DataError: the table is invalid, or leaves a client below the minimum.
    """
    if _CLIENT in tables.clips.schema.names:
        raise DataError(
            "data.tables.clips: its column 'client' and data.partition.by: table both assign clips to clients; leave one out"
        )
    trained = tables.has_role("train")
    held_out = [f"role {role!r}" for role in ("validation", "client_test") if tables.has_role(role).any()]
    _check_shareable(_CLIPS_FILE, ["column 'pool'"] if tables.pools != [TRAIN] else held_out)
    flags = _FLAGS if where == _CLIENTS_FILE else ()  # data.partition.file may have any columns
    rows, listed = tables.codes("clip")[trained], len(tables.clips.column("clip").dictionary)
    table = _read_table(path, where, {_FIRST: where, _CLIPS: where, **profiles}, (_CLIENT, *flags))
    _check_shareable(where, [f"column {name!r}" for name in flags if name in table.column_names])
    before = np.searchsorted(rows, np.arange(listed + 1)).astype(np.int32)
    first, stop = (before[bound] for bound in _find_ranges(table, listed, path, where))
    counts = stop - first
    if counts.min() < minimum:
        row = int(counts.argmin())
        raise DataError(
            f"{where}: {int((counts < minimum).sum()):,} of {len(table):,} clients have fewer than "
            f"data.partition.minimum {minimum} clips to train on; the client in row {row + 1} of {path} has {counts[row]}, because "
            f"data.split holds its clips out or they cannot be read. Give it more clips, or lower the minimum"
        )
    # A clip is owned if more ranges start at or before it than end there.
    started, ended = (np.cumsum(np.bincount(bound, minlength=len(rows) + 1)) for bound in (first, stop))
    owned = (started > ended)[:-1]
    position = np.concatenate([[0], np.cumsum(owned)]).astype(np.int32)
    ids = _read_ids(table, path, where)
    clients = {**ids.columns(), "first": pa.array(position[first]), "stop": pa.array(position[stop])}
    clients |= _get_columns(table, profiles, path, where)
    order = np.concatenate([np.flatnonzero(trained)[owned], np.flatnonzero(~trained)])
    result = replace(tables.select(order), clients=pa.record_batch(clients))
    result = result.set_clips(client=encode(np.full(len(order), -1, np.int32), ids.column))
    if owned.all():
        return result
    return result.add_message(f"{(~owned).sum()} training clips belong to no client of {path}")


def _check_shareable(where: str, obstacles: Sequence[str]) -> None:
    """Raise an error for the first column or role that excludes shared clips."""
    if obstacles:
        raise DataError(
            f"{where}: its {obstacles[0]} needs a single owner of each clip, but clients may share clips with data.partition.by: "
            f"table. Remove it, or choose another partition"
        )


def _get_columns(table: pa.Table, names: Iterable[str], path: Path, where: str) -> dict[str, pa.Array]:
    """Return columns of a table of clients under their names in an assignment, after checking the flags."""
    for name in names:
        if name in _FLAGS and not pa.types.is_boolean(table.column(name).type):
            kind = table.column(name).type
            raise DataError(f"{where}: column {name!r} of {path} has the type {kind}; write booleans")
    return {f"column:{name}": table.column(name).combine_chunks() for name in names}


def _read_table(path: Path, where: str, needed: Mapping[str, str], optional: Iterable[str]) -> pa.Table:
    """Read columns of a table.

    Args:
        path: ``*.parquet``, ``*.arrow``, ``*.feather`` or ``*.csv``.
        where: the setting with the file's path.
        needed: required columns, with the settings that require them.
        optional: columns to read if the file has them.
    """
    kind, row_of = path.suffix.lower(), "clip" if where == _CLIPS_FILE else "client"
    requested = [*dict.fromkeys([*needed, *optional])]
    if kind not in _KINDS:
        raise DataError(
            f"{where}: {path} has an unknown ending. Write the table of {row_of}s to a file that ends in {', '.join(_KINDS)}"
        )
    remedy = f"It must be a Parquet, Arrow or CSV file with a row for each {row_of}"
    table, names = call_isolated(_read_columns, path, requested, f"{where}: {path}", remedy, where=f"{where}: {path}")
    if table is None:
        table, names = _map_columns(path, requested)
    if not table.num_rows:
        raise DataError(f"{where}: {path} has no rows. Write a row for each {row_of}")
    present = [name for name in requested if name in needed or name in names]
    for name in present:
        setting = needed.get(name, where)
        if names.count(name) != 1:
            hint = "Several columns have this name." if name in names else nearest(name, names)
            raise DataError(f"{setting}: the table of {row_of}s {path} has no single column {name!r}. {hint}")
        column = table.column(name)
        if column.null_count and (row_of == "client" or name == "clip"):
            row = pc.index(pc.is_null(column), True).as_py()
            raise DataError(
                f"{setting}: row {row + 1} of {path} has no {name!r}; rows to fill in: {column.null_count:,}"
            )
    return table.select(present)


def _read_columns(
    path: Path, requested: Sequence[str], place: str, remedy: str
) -> tuple[pa.Table | None, Sequence[str]]:
    """Read and validate columns of a table, and return them with the names of all columns.

    An Arrow file gives no columns: the caller can map the valid file without copying it.
    """
    kind = path.suffix.lower()
    with reading(place, remedy=remedy):
        check_regular(path.stat())
        if kind == ".parquet":
            file = pa.parquet.ParquetFile(path, memory_map=True)
            names = file.schema_arrow.names
            table = file.read([name for name in requested if name in names])
        elif kind == ".csv":
            table = read_csv(path, ["clip", "role", "pool", _CLIENT])
            names = table.column_names
        else:
            table, names = _map_columns(path, requested)
        table.validate(full=True)  # Damaged offsets end the process when a value is read.
    return table if kind in (".parquet", ".csv") else None, names


def _map_columns(path: Path, requested: Iterable[str]) -> tuple[pa.Table, list[str]]:
    """Memory-map columns of an Arrow file, and return the names of all its columns."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        names: list[str] = reader.schema.names
        chosen = [number for number, name in enumerate(names) if name in requested]
        # read_all would copy, and reading by batch decompresses a single batch at a time.
        batches = [reader.get_batch(number).select(chosen) for number in range(reader.num_record_batches)]
        return pa.Table.from_batches(batches, pa.schema([reader.schema.field(number) for number in chosen])), names


def _find_ranges(table: pa.Table, clips: int, path: Path, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients' ranges of rows in the list of clips, first and stop: int32 [clients] each.

    Args:
        clips: number of rows of the list.
    """
    first, count = (_to_integers(table.column(name), name, path, where) for name in (_FIRST, _CLIPS))
    stop = first + count
    wrong = (first < 0) | (first > clips) | (count < 1) | (count > clips) | (stop > clips)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{where}: row {row + 1} of {path} has first {first[row]} and clips {count[row]}, but clips "
            f"must be at least 1 and the list has the rows 0 to {clips - 1}; rows to correct: {int(wrong.sum()):,}"
        )
    return first.astype(np.int32), stop.astype(np.int32)


def _to_integers(column: pa.ChunkedArray, name: str, path: Path, where: str) -> np.ndarray:
    if not pa.types.is_integer(column.type):
        raise DataError(f"{where}: column {name!r} of {path} has the type {column.type}; write integers")
    try:
        integers: np.ndarray = column.cast(pa.int64()).to_numpy()
    except pa.ArrowException as error:
        raise DataError(f"{where}: column {name!r} of {path}: {error}") from error
    return integers


def _read_ids(table: pa.Table, path: Path, where: str) -> ClientIds:
    if _CLIENT not in table.column_names:
        large = pa.large_string()
        numbers = pa.array(np.arange(len(table))).cast(large)
        width = len(str(len(table) - 1))  # padding gives text and numbers the same order
        padded = pc.utf8_lpad(numbers, width, "0")
        return ClientIds.from_strings(
            pc.binary_join_element_wise(pa.scalar("client", large), padded, pa.scalar("-", large))
        )
    column = _to_text(table.column(_CLIENT), _CLIENT, path, where)
    empty = pc.index(column, pa.scalar("", column.type)).as_py()
    if empty >= 0:
        raise DataError(f"{where}: the id in row {empty + 1} of {path} is empty. Give every client an id")
    ids = ClientIds.from_strings(column)
    duplicate = ids.find_duplicate()
    if duplicate is not None:
        raise DataError(
            f"{where}: several rows of {path} have the client {duplicate!r}. Write a single row for each client"
        )
    return ids


def _to_text(column: pa.ChunkedArray, name: str, path: Path, where: str) -> pa.LargeStringArray:
    """Return a column of strings or integers as strings."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if not texts and not (name == _CLIENT and pa.types.is_integer(kind)):
        expected = "strings or integers" if name == _CLIENT else "strings"
        raise DataError(f"{where}: column {name!r} of {path} has the type {column.type}; write {expected}")
    column = column.cast(kind).cast(pa.large_string())
    # combine_chunks would copy even a single chunk.
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
