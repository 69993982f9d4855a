"""A table of clients: a row for each, which says which clips it has, and what else is known of it.

Millions of clients are described so: columns are read one at a time and stay arrays, and an Arrow file is mapped into memory. A CSV
file is parsed whole for each column, so it is for fewer.
Two clients may have the same clips, which are then kept once. The columns:

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

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from raydfl.core.errors import DataError, nearest
from raydfl.data.csv_file import read_csv
from raydfl.data.names import Names

FIRST, CLIPS, CLIENT = "first", "clips", "client"
"""Names of the columns with a meaning."""

_ARROW = (".arrow", ".feather")
_KINDS = (".parquet", *_ARROW, ".csv")


class ClientTable:
    """A Parquet, Arrow or CSV file with a row for each client.

    Args:
        path: ``*.parquet``, ``*.arrow``, ``*.feather`` or ``*.csv``.

    Raises:
        DataError: it is not there, cannot be read, or has no rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix.lower() not in _KINDS:
            raise DataError(
                f"data.partition.file: the name of {path} must end in one of {', '.join(_KINDS)}; write the table of clients as "
                f"such a file"
            )
        about = self._read(None)
        self.columns: tuple[str, ...] = tuple(about.column_names)
        """Names of the columns."""
        if not about.num_rows:
            raise DataError(f"data.partition.file: {path} has no rows; it must have one for each client")
        self._rows: int = about.num_rows

    def __len__(self) -> int:
        return self._rows

    def _read(self, column: str | None) -> pa.Table:
        """Return one column, or for ``None`` names and number of rows alone."""
        try:
            if self.path.suffix.lower() == ".parquet":
                if column is not None:
                    return pa.parquet.read_table(self.path, columns=[column], memory_map=True)
                about = pa.parquet.ParquetFile(self.path, memory_map=True)
                return _empty(about.schema_arrow.names, about.metadata.num_rows)
            if self.path.suffix.lower() == ".csv":
                table = read_csv(self.path, [CLIENT], [] if column is None else [column])
                return table if column is not None else _empty(table.column_names, table.num_rows)
            with pa.memory_map(str(self.path)) as file, pa.ipc.open_file(file) as reader:
                # Batch by batch: nothing of them is copied, or where they are compressed only one is unpacked at a time.
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
                if column is None:
                    return _empty(reader.schema.names, sum(batch.num_rows for batch in batches))
                kind = reader.schema.field(column).type
                return pa.table({column: pa.chunked_array([batch.column(column) for batch in batches], kind)})
        except (OSError, pa.ArrowException) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            raise DataError(
                f"data.partition.file: {self.path} cannot be read: {reason}; it must be a Parquet, Arrow or CSV file with a "
                f"row for each client"
            ) from error

    def column(self, name: str, where: str) -> pa.ChunkedArray:
        """Return a column in which every row has a value.

        Args:
            where: the setting that asks for it, for the messages.

        Raises:
            DataError: there is none of that name, or several, or a row has no value.
        """
        if self.columns.count(name) != 1:
            hint = "it is there several times" if name in self.columns else nearest(name, self.columns)
            raise DataError(f"{where}: the table of clients {self.path} has no single column {name!r}; {hint}")
        found = self._read(name).column(0)
        if found.null_count:
            row = pc.index(pc.is_null(found), True).as_py()
            raise DataError(
                f"{where}: row {row + 1} of {self.path} has no {name!r}; {found.null_count:,} such rows; fill them in"
            )
        return found

    def ranges(self, clips: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the row at which each client's clips begin, and the one behind its last: int32 [clients] each.

        Args:
            clips: rows of the list of clips.

        Raises:
            DataError: one of the two columns is missing or holds something else than integers, or a client has no rows, or such as
                are not on the list.
        """
        first, count = (self._integers(name) for name in (FIRST, CLIPS))
        stop = first + count
        wrong = (first < 0) | (first > clips) | (count < 1) | (count > clips) | (stop > clips)
        if wrong.any():
            row = int(wrong.argmax())
            raise DataError(
                f"data.partition.file: row {row + 1} of {self.path} says first {first[row]} and clips {count[row]}, but clips "
                f"must be at least 1 and the list has the rows 0 to {clips - 1}; {int(wrong.sum()):,} such rows"
            )
        return first.astype(np.int32), stop.astype(np.int32)

    def _integers(self, name: str) -> np.ndarray:
        """Return int64 [clients]."""
        column = self.column(name, "data.partition.file")
        if not pa.types.is_integer(column.type):
            raise DataError(
                f"data.partition.file: column {name!r} of {self.path} is of the type {column.type}; it must hold integers"
            )
        try:
            found: np.ndarray = column.cast(pa.int64()).to_numpy()
        except pa.ArrowException as error:
            raise DataError(f"data.partition.file: column {name!r} of {self.path}: {error}") from error
        return found

    def ids(self) -> Names:
        """Return the clients' ids.

        Raises:
            DataError: the column holds something else than texts, or an empty one, or one twice.
        """
        if CLIENT not in self.columns:
            return Names.numbered("client-", len(self))
        column = self.column(CLIENT, "data.partition.file")
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_string_view(kind)
            or pa.types.is_integer(kind)
        ):
            raise DataError(
                f"data.partition.file: column {CLIENT!r} of {self.path} is of the type {column.type}; ids must be strings or "
                f"integers"
            )
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            column = column.cast(kind).cast(pa.large_string())
        empty = pc.index(column, pa.scalar("", column.type)).as_py()
        if empty >= 0:
            raise DataError(
                f"data.partition.file: the id in row {empty + 1} of {self.path} is empty; give every client one"
            )
        names = Names.of_column(column)
        twice = names.repeated()
        if twice is not None:
            raise DataError(
                f"data.partition.file: more than one row of {self.path} has the client {twice!r}; a client is one row"
            )
        del column
        pa.default_memory_pool().release_unused()
        return names


def _empty(names: list[str], rows: int) -> pa.Table:
    """Return a table with columns of these names and so many nulls each."""
    return pa.table([pa.nulls(rows)] * len(names), names) if names else pa.table({})
