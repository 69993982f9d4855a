"""Tables of the library ``datasets``: Parquet and Arrow files with recordings in their cells, and lists of files.

All columns are read but those with recordings: of these only where each recording is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from raydfl.core.errors import DataError
from raydfl.core.files import check_regular
from raydfl.data.packed import cell_address, span_address

LISTS = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of tables that list the files beside them."""
_FILE_NAME = "file_name"
"""Column of such a table with the names of the files."""
_RESERVED = ("clip", "path", "label", "group")
"""Names of columns that mean something else here."""
_MAGIC = b"ARROW1"
"""The beginning of an Arrow file with a footer."""
_PLAIN = (pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)


@dataclass(frozen=True, slots=True)
class Table:
    """A Parquet or Arrow file with recordings in its cells, or a list of files."""

    path: Path
    schema: pa.Schema
    features: Mapping[str, Mapping[str, Any]]
    """Types of its columns as the library describes them: ``_type``, ``names`` ..."""
    load: Callable[[list[str]], pa.Table]
    """Read some columns; of an Arrow file they are parts of a map of it."""
    whole: pa.Buffer | None = None
    """The map of an Arrow file."""

    @property
    def media(self) -> list[str]:
        """The columns that hold files: recordings or images."""
        if self.path.name in LISTS:
            return [name for name in self.schema.names if name == _FILE_NAME or name.endswith(f"_{_FILE_NAME}")]
        return [field.name for field in self.schema if _is_media(field.type)]

    def recordings(self, given: str | None) -> str:
        """Return the name of the column with the recordings.

        Args:
            given: the option ``audio_column``.

        Raises:
            DataError: there is no such column, or there are several.
        """
        typed = [name for name in self.media if self.features.get(name, {}).get("_type") == "Audio"]
        found = typed or [name for name in self.media if name == "audio"] or self.media
        if given is not None:
            found = [given] if given in self.media else []
        if len(found) != 1:
            problem = f"the columns {', '.join(found)} may all be recordings" if found else "no column has recordings"
            if given is not None:
                problem = f"column {given!r} has no recordings"
            raise DataError(
                f"{self.path}: {problem} (bytes, a struct with bytes, or one with array and sampling_rate). Choose a column with "
                f"data.audio_column; there are {', '.join(self.schema.names) or 'none'}"
            )
        return found[0]

    def class_column(self) -> str:
        """Return the name of the column with the classes: ``label``, or the only one that the library describes as such."""
        typed = [name for name in self.schema.names if self.features.get(name, {}).get("_type") == "ClassLabel"]
        return typed[0] if len(typed) == 1 and "label" not in self.schema.names else "label"

    def read(self, *chosen: str | None) -> pa.Table:
        """Read the columns of text, numbers and truth values, and the chosen ones as text or lists, with the names of classes.

        Raises:
            DataError: a class has no name.
        """
        wanted = [
            field.name
            for field in self.schema
            if (field.name in chosen and not pa.types.is_struct(field.type))
            or (field.name not in (*_RESERVED, *self.media) and any(kind(field.type) for kind in _PLAIN))
        ]
        table = self.load(wanted)
        columns = {name: self._with_names(name, table.column(name)) for name in wanted}
        for name in set(chosen) & set(wanted):
            if not pa.types.is_nested(columns[name].type):
                columns[name] = columns[name].cast(pa.string())
        return pa.table(columns)

    def _with_names(self, column: str, values: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
        about = self.features.get(column, {})
        about = about["feature"] if isinstance(about.get("feature"), Mapping) else about
        if about.get("names") is None:
            return values
        known = {number: str(name) for number, name in enumerate(about["names"])} | {None: None, -1: None}

        def name_of(value: Any, row: int) -> Any:
            if isinstance(value, list):
                return [name_of(each, row) for each in value]
            if not isinstance(value, str) and value not in known:
                raise DataError(
                    f"{self.path}: row {row} has the class {value} in column {column!r}, which has {len(known) - 2} names"
                )
            return known.get(value, value)

        nested = pa.types.is_nested(values.type)
        named_values = [name_of(value, row) for row, value in enumerate(values.to_pylist())]
        return pa.array(named_values, pa.list_(pa.string()) if nested else pa.string())

    def places(self, column: str) -> list[str]:
        """Return where the recording of each row is: an address in this file, or the path of a file that the row names.

        Raises:
            DataError: a row has neither bytes nor a path; or an Arrow file holds samples.
        """
        packed = self.path.suffix.lower() == ".parquet" and self.path.name not in LISTS
        if packed:
            metadata = pq.read_metadata(self.path)
            if not _bytes_are_missing(metadata, column):
                return [cell_address(str(self.path), column, row) for row in range(metadata.num_rows)]
        places: list[str] = []
        for values in self.load([f"{column}.path" if packed else column]).column(0).chunks:
            fields = {field.name for field in values.type} if pa.types.is_struct(values.type) else set()
            if "array" in fields and "bytes" not in fields:
                raise DataError(
                    f"{self.path}: column {column!r} holds samples, not bytes; save the set as Parquet, of which these are read"
                )
            content = values.field("bytes") if "bytes" in fields else values
            spans = self._spans(content, column, len(places)) if _is_binary(content.type) else [None] * len(values)
            if fields:
                spans = [
                    span if there else None for span, there in zip(spans, values.is_valid().to_pylist(), strict=True)
                ]
            texts = values.field("path") if "path" in fields else None if fields else values
            paths = (
                [None] * len(values) if texts is None or _is_binary(texts.type) else texts.cast(pa.string()).to_pylist()
            )
            for span, path in zip(spans, paths, strict=True):
                if not span and not path:
                    raise DataError(f"{self.path}: row {len(places)} has neither bytes nor a path in column {column!r}")
                places.append(span or os.path.normpath(self.path.parent / str(path)))
        return places

    def _spans(self, content: pa.Array, column: str, first: int) -> list[str | None]:
        """Return the addresses of the bytes in a batch of an Arrow file, whose first row has this number in the file."""
        _, offsets, data = content.buffers()
        width = np.int64 if pa.types.is_large_binary(content.type) else np.int32
        bounds = np.frombuffer(offsets, width)[content.offset : content.offset + len(content) + 1].astype(np.int64)
        bounds += 0 if data is None or self.whole is None else data.address - self.whole.address
        spans = enumerate(itertools.pairwise(bounds.tolist()), start=first)
        there = content.is_valid().to_pylist()
        return [
            span_address(str(self.path), f"{column}[{row}]", start, stop - start) if there[row - first] else None
            for row, (start, stop) in spans
        ]


def open_table(path: Path) -> Table:
    """Open a Parquet or an Arrow file, or a list of files, by its name.

    Raises:
        DataError: it is damaged, truncated, or something else.
    """
    with readable_table(path):
        check_regular(path.stat())
        if path.name in LISTS:
            rows = _read_list(path)
            return Table(path, rows.schema, {_FILE_NAME: {"_type": "Audio"}}, rows.select)
        if path.suffix.lower() == ".parquet":
            file = pq.ParquetFile(path)
            return Table(path, file.schema_arrow, _features(path, file.schema_arrow), file.read)
        with pa.memory_map(str(path)) as opened:
            whole = opened.read_buffer(opened.size())
        schema = _arrow_reader(whole).schema
        return Table(path, schema, _features(path, schema), functools.partial(_read_arrow, path, whole), whole)


@contextlib.contextmanager
def readable_table(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into a DataError that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, pa.ArrowException) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"{path}: it is damaged, truncated, or something else: {reason}") from error


def _read_list(path: Path) -> pa.Table:
    if path.suffix == ".csv":
        return pa.csv.read_csv(path, convert_options=pa.csv.ConvertOptions(strings_can_be_null=True, null_values=[""]))
    if path.suffix == ".parquet":
        return pq.ParquetFile(path).read()
    return pa.Table.from_pylist([json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()])


def _arrow_reader(whole: pa.Buffer) -> Any:
    return pa.ipc.open_file(whole) if whole[: len(_MAGIC)] == _MAGIC else pa.ipc.open_stream(whole)


def _read_arrow(path: Path, whole: pa.Buffer, columns: list[str]) -> pa.Table:
    """Return columns of an Arrow file as parts of a map of it."""
    reader = _arrow_reader(whole)
    stream = isinstance(reader, pa.RecordBatchReader)
    batches = []
    for batch in reader if stream else map(reader.get_batch, range(reader.num_record_batches)):
        batches.append(batch.select(columns))
        for buffer in itertools.chain.from_iterable(column.buffers() for column in batches[-1]):
            if buffer is not None and buffer.size and not 0 <= buffer.address - whole.address < whole.size:
                raise DataError(
                    f"{path}: it is compressed, so a recording in it cannot be reached by itself; save it without compression"
                )
    return pa.Table.from_batches(batches, pa.schema([reader.schema.field(name) for name in columns]))


def _bytes_are_missing(metadata: Any, column: str) -> bool:
    """Return whether no row of a Parquet file has bytes but may have a path, by the statistics of its row groups."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
        about = chunks[f"{column}.bytes"].statistics if f"{column}.path" in chunks else None
        if about is None or not about.has_null_count or about.null_count < group.num_rows:
            return False
    return bool(metadata.num_rows)


def _features(path: Path, schema: pa.Schema) -> Mapping[str, Mapping[str, Any]]:
    """Return the library's description of the columns, in the file or beside it."""
    text, beside = (schema.metadata or {}).get(b"huggingface"), path.parent / "dataset_info.json"
    if text is not None:
        found = json.loads(text).get("info", {})
    else:
        found = json.loads(beside.read_text("utf-8")) if beside.is_file() else {}
    return {name: each for name, each in (found.get("features") or {}).items() if isinstance(each, Mapping)}


def _is_media(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return ("bytes" in fields and _is_binary(fields["bytes"])) or {"array", "sampling_rate"} <= set(fields)
    return _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
