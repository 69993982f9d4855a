"""Tables of the library ``datasets``: Parquet and Arrow files with recordings in their cells, and lists of files.

Read are all columns but those with recordings: of these only where each recording lies.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from raydfl.core.errors import DataError, nearest
from raydfl.core.files import check_regular
from raydfl.data.packed import cell_address, span_address

LISTS = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of lists of files, which lie beside them."""
FILE_NAME = "file_name"
"""Name of the column of such a list that holds their names."""
_MAGIC = b"ARROW1"
"""The beginning of an Arrow file with a footer."""
_PLAIN = (pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)


@dataclass(frozen=True, slots=True)
class Table:
    """A table in a file."""

    path: Path
    schema: pa.Schema
    features: Mapping[str, Mapping[str, Any]]
    """Types of its columns as the library ``datasets`` describes them: ``_type``, ``names`` ..."""
    rows: pa.Table | None = None
    """The rows of a list of files."""

    @property
    def media(self) -> list[str]:
        """The columns that hold files: recordings or images."""
        if self.rows is not None:
            return [name for name in self.schema.names if name == FILE_NAME or name.endswith(f"_{FILE_NAME}")]
        return [field.name for field in self.schema if _is_media(field.type)]

    def recordings(self, given: str | None) -> str:
        """Return the name of the column with the recordings.

        Args:
            given: the option ``audio_column``.

        Raises:
            DataError: there is none, it is not clear which, or the one given holds no files.
        """
        if given is not None:
            self.check(given, "audio_column")
            if given not in self.media:
                raise DataError(
                    f"{self.path}: column {given!r} holds {self.schema.field(given).type}, no recordings: these are bytes, or a "
                    f"struct with bytes, or with array and sampling_rate; name another with data.audio_column"
                )
            return given
        typed = [name for name in self.media if self.features.get(name, {}).get("_type") == "Audio"]
        found = typed or [name for name in self.media if name == "audio"] or self.media
        if len(found) == 1:
            return found[0]
        if found:
            raise DataError(
                f"{self.path}: the columns {', '.join(found)} may all be recordings; choose one with data.audio_column"
            )
        raise DataError(
            f"{self.path}: it has no column with recordings: bytes, or a struct with bytes, or with array and sampling_rate; its "
            f"columns: {self._described()}"
        )

    def labels(self, given: str | None) -> str:
        """Return the name of the column with the classes.

        Args:
            given: the option ``label_column``.

        Raises:
            DataError: there is none.
        """
        if given is None and "label" not in self.schema.names:
            typed = [name for name, about in self.features.items() if about.get("_type") == "ClassLabel"]
            if len(typed) == 1 and typed[0] in self.schema.names:
                return typed[0]
        return self.check(given or "label", "label_column")

    def check(self, column: str, option: str) -> str:
        """Return the name of a column that must be there.

        Raises:
            DataError: it is not; those that are there are named.
        """
        if column not in self.schema.names:
            raise DataError(
                f"{self.path}: it has no column {column!r} (data.{option}); {nearest(column, self.schema.names)}"
            )
        return column

    def _described(self) -> str:
        return ", ".join(field.name for field in self.schema) or "none"

    def plain(self) -> list[str]:
        """Return the names of the columns of text, numbers, and truth values."""
        return [field.name for field in self.schema if any(kind(field.type) for kind in _PLAIN)]

    def texts(self, column: str, values: pa.ChunkedArray) -> pa.Array:
        """Return the values of a column as text: numbers of classes by their names, several values joined by ``|``.

        Raises:
            DataError: they are no text, no numbers and no lists of these, or a class has no name.
        """
        about = self.features.get(column, {})
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            inner = about.get("feature", about)
            names = inner.get("names") if isinstance(inner, Mapping) else None
            joined = [
                None if row is None else "|".join(self._named(pa.chunked_array([pa.array(row)]), names, column)) or "|"
                for row in values.to_pylist()
            ]
            return pa.array(joined, pa.string())
        return pa.array(self._named(values, about.get("names"), column), pa.string())

    def _named(self, values: pa.ChunkedArray, names: Sequence[str] | None, column: str) -> list[Any]:
        if names is None or not pa.types.is_integer(values.type):
            try:
                return list(values.cast(pa.string()).to_pylist())
            except pa.ArrowException as error:
                raise DataError(
                    f"{self.path}: column {column!r} holds {values.type}, which is no class; name another with data.label_column"
                ) from error
        known = {number: str(name) for number, name in enumerate(names)} | {
            None: None,
            -1: None,
        }  # -1: nobody has labelled it
        found = values.to_pylist()
        for row, number in enumerate(found):
            if number not in known:
                raise DataError(
                    f"{self.path}: row {row} has the class {number} in column {column!r}, which has {len(names)} names"
                )
        return [known[number] for number in found]

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns."""
        if self.rows is not None:
            return self.rows.select(list(columns))
        if self.path.suffix.lower() == ".parquet":
            return pq.ParquetFile(self.path).read(columns=list(columns))
        schema = pa.schema([self.schema.field(name) for name in columns])
        return pa.Table.from_batches([batch.select(list(columns)) for batch, _ in _batches(self.path)], schema)

    def places(self, column: str) -> list[str]:
        """Return where the recording of each row lies: an address in this file, or the path of one that the row names.

        Raises:
            DataError: a row has neither bytes nor a path.
        """
        if self.rows is not None:
            paths = self.rows.column(column).cast(pa.string()).to_pylist()
        elif self.path.suffix.lower() != ".parquet":
            places: list[str] = []
            for batch, whole in _batches(self.path):
                places += self._places(batch.column(column), column, len(places), whole)
            return places
        else:
            with pq.ParquetFile(self.path) as file:
                if not _bytes_are_missing(file.metadata, column):
                    return [cell_address(str(self.path), column, row) for row in range(file.metadata.num_rows)]
                paths = pc.struct_field(file.read(columns=[f"{column}.path"]).column(0), "path").to_pylist()
        return [self._beside(path, row, column) for row, path in enumerate(paths)]

    def _places(self, values: pa.Array, column: str, first: int, whole: pa.Buffer) -> list[str]:
        """Return the places of the recordings of a batch of an Arrow file.

        Args:
            first: the number of its first row in the file.
            whole: the file.
        """
        nested = pa.types.is_struct(values.type)
        fields = {field.name for field in values.type} if nested else set()
        if nested and "bytes" not in fields:
            raise DataError(
                f"{self.path}: column {column!r} holds samples, not bytes; save the set as Parquet, of which these are read"
            )
        content = values.field("bytes") if nested else values
        _, offsets, data = content.buffers()
        if (
            len(content) > content.null_count
            and data is not None
            and not whole.address <= data.address < whole.address + whole.size
        ):
            raise DataError(
                f"{self.path}: it is compressed, so a recording in it cannot be reached by itself; save it without compression"
            )
        width = np.int64 if pa.types.is_large_binary(content.type) else np.int32
        bounds = np.frombuffer(offsets, width)[content.offset : content.offset + len(content) + 1].astype(np.int64)
        bounds += 0 if data is None else data.address - whole.address
        there = (content.is_valid() if not nested else pc.and_(content.is_valid(), values.is_valid())).to_pylist()
        paths = values.field("path").to_pylist() if "path" in fields else [None] * len(values)
        return [
            span_address(str(self.path), f"{column}[{first + row}]", start, stop - start)
            if there[row]
            else self._beside(paths[row], first + row, column)
            for row, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
        ]

    def _beside(self, path: str | None, row: int, column: str) -> str:
        """Return the absolute path that a row names."""
        if not path:
            raise DataError(f"{self.path}: row {row} has neither bytes nor a path in column {column!r}")
        return os.path.normpath(self.path.parent / path)


def _bytes_are_missing(metadata: Any, column: str) -> bool:
    """Return whether no row of a Parquet file has bytes but may have a path, by what is said of its row groups."""
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
        about = chunks[f"{column}.bytes"].statistics if f"{column}.path" in chunks else None
        if about is None or not about.has_null_count or about.null_count < group.num_rows:
            return False
    return bool(metadata.num_rows)


def _read_list(path: Path) -> pa.Table:
    if path.suffix.lower() == ".csv":
        return pa.csv.read_csv(path, convert_options=pa.csv.ConvertOptions(strings_can_be_null=True, null_values=[""]))
    if path.suffix.lower() == ".parquet":
        return pq.ParquetFile(path).read()
    lines = path.read_text("utf-8").splitlines()
    return pa.Table.from_pylist([json.loads(line) for line in lines if line.strip()])


def _open_arrow(path: Path) -> tuple[Any, pa.Buffer]:
    """Open an Arrow file, a stream or with a footer; return its reader and a map of the file."""
    with pa.memory_map(str(path)) as file:
        whole = file.read_buffer(file.size())
    return (pa.ipc.open_file(whole) if whole[: len(_MAGIC)] == _MAGIC else pa.ipc.open_stream(whole)), whole


def _batches(path: Path) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
    """Yield the batches of an Arrow file, which are parts of a map of it, and that map."""
    reader, whole = _open_arrow(path)
    counted = getattr(reader, "num_record_batches", None)
    batches = reader if counted is None else map(reader.get_batch, range(counted))
    for batch in batches:
        yield batch, whole


def open_table(path: Path) -> Table:
    """Open a Parquet or an Arrow file, or a list of files, by its name.

    Raises:
        DataError: it is damaged, truncated, or something else.
    """
    with readable_table(path):
        check_regular(path.stat())
        if path.name in LISTS:
            rows = _read_list(path)
            return Table(path, rows.schema, {FILE_NAME: {"_type": "Audio"}}, rows)
        schema = pq.read_schema(path) if path.suffix.lower() == ".parquet" else _open_arrow(path)[0].schema
        return Table(path, schema, _features(path, schema))


@contextlib.contextmanager
def readable_table(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into a DataError that names it."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"{path}: it is damaged, truncated, or something else: {reason}") from error


def _features(path: Path, schema: pa.Schema) -> Mapping[str, Mapping[str, Any]]:
    """Return what the library ``datasets`` says of the columns, in the file or beside it."""
    text = (schema.metadata or {}).get(b"huggingface")
    about = path.parent / "dataset_info.json"
    if text is not None:
        found = json.loads(text).get("info", {}).get("features")
    else:
        found = json.loads(about.read_text("utf-8")).get("features") if about.is_file() else None
    return {name: each for name, each in (found or {}).items() if isinstance(each, Mapping)}


def _is_media(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return ("bytes" in fields and _is_binary(fields["bytes"])) or {"array", "sampling_rate"} <= set(fields)
    return _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
