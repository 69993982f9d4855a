"""Tables of the library ``datasets``: Parquet and Arrow files with recordings in their cells, and lists of files.

Columns are read completely, except for recordings: only their addresses are read.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from raydfl.core.errors import DataError
from raydfl.core.files import check_regular
from raydfl.core.isolation import reading
from raydfl.data.packed import cell_address, span_address

LISTS = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of lists: tables of the files next to them."""
_FILE_NAME = "file_name"
"""Column of a list with the names of the files."""
_RESERVED = ("clip", "path", "label", "group")
"""Columns with a special meaning in raydfl."""
_MAGIC = b"ARROW1"
"""First bytes of an Arrow file with a footer."""
_PLAIN = (pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)


@dataclass(frozen=True, slots=True)
class Table:
    """A Parquet or Arrow file with recordings in its cells, or a list of files."""

    path: Path
    schema: pa.Schema
    features: Mapping[str, Mapping[str, Any]]
    """The library's description of the columns: ``_type``, ``names`` ..."""
    load: Callable[[list[str]], pa.Table]
    """Function that reads columns. Columns of an Arrow file point into ``mapping``."""
    mapping: pa.Buffer | None = None
    """The memory-mapped Arrow file."""

    @property
    def media(self) -> list[str]:
        """Names of the columns of files: recordings or images."""
        if self.path.name in LISTS:
            return [name for name in self.schema.names if name == _FILE_NAME or name.endswith(f"_{_FILE_NAME}")]
        return [field.name for field in self.schema if _is_media(field.type)]

    def find_audio_column(self, option: str | None) -> str:
        """Return the name of the column with the recordings.

        Args:
            option: ``audio_column``.

        Raises:
            DataError: the column is missing, or several columns qualify.
        """
        typed = [name for name in self.media if self.features.get(name, {}).get("_type") == "Audio"]
        candidates = typed or [name for name in self.media if name == "audio"] or self.media
        if option is not None:
            candidates = [option] if option in self.media else []
        if len(candidates) != 1:
            problem = "no column has recordings"
            if candidates:
                problem = f"the columns {', '.join(candidates)} may all be recordings"
            if option is not None:
                problem = f"column {option!r} has no recordings"
            raise DataError(
                f"{self.path}: {problem} (bytes, or a struct with bytes or with array and sampling_rate). Set data.audio_column to "
                f"one of {', '.join(self.schema.names) or 'none'}"
            )
        return candidates[0]

    def find_class_column(self) -> str:
        """Return the column with the classes: ``label``, or else the only column of the library's type ``ClassLabel``."""
        typed = [name for name in self.schema.names if self.features.get(name, {}).get("_type") == "ClassLabel"]
        return typed[0] if len(typed) == 1 and "label" not in self.schema.names else "label"

    def read(self, *chosen: str | None) -> pa.Table:
        """Read the columns of text, numbers and booleans, and the chosen columns as text or lists.

        Class numbers are replaced by the names of the classes.

        Raises:
            DataError: a class has no name.
        """
        names = [
            field.name
            for field in self.schema
            if (field.name in chosen and not pa.types.is_struct(field.type))
            or (field.name not in (*_RESERVED, *self.media) and any(kind(field.type) for kind in _PLAIN))
        ]
        table = self.load(names)
        columns = {name: self._name_classes(name, table.column(name)) for name in names}
        for name in set(chosen) & set(names):
            if not pa.types.is_nested(columns[name].type):
                columns[name] = columns[name].cast(pa.string())
        return pa.table(columns)

    def _name_classes(self, column: str, values: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
        feature = self.features.get(column, {})
        feature = feature["feature"] if isinstance(feature.get("feature"), Mapping) else feature
        if feature.get("names") is None:
            return values
        # The library writes -1 for an unknown class.
        names = {number: str(name) for number, name in enumerate(feature["names"])} | {None: None, -1: None}

        def replace_number(value: Any, row: int) -> Any:
            if isinstance(value, list):
                return [replace_number(item, row) for item in value]
            if not isinstance(value, str) and value not in names:
                raise DataError(
                    f"{self.path}: row {row} has the class {value} in column {column!r}, which has {len(names) - 2} names"
                )
            return names.get(value, value)

        nested = pa.types.is_nested(values.type)
        named_values = [replace_number(value, row) for row, value in enumerate(values.to_pylist())]
        return pa.array(named_values, pa.list_(pa.string()) if nested else pa.string())

    def list_addresses(self, column: str) -> list[str]:
        """List the location of each row's recording: an address in this file, or the path of another file.

        Raises:
            DataError: a row has neither bytes nor a path, or an Arrow file contains samples.
        """
        packed = self.path.suffix.lower() == ".parquet" and self.path.name not in LISTS
        if packed:
            metadata = pq.read_metadata(self.path)
            if not _lacks_bytes(metadata, column):
                return [cell_address(str(self.path), column, row) for row in range(metadata.num_rows)]
        addresses: list[str] = []
        for values in self.load([f"{column}.path" if packed else column]).column(0).chunks:
            fields = {field.name for field in values.type} if pa.types.is_struct(values.type) else set()
            if "array" in fields and "bytes" not in fields:
                raise DataError(
                    f"{self.path}: column {column!r} contains samples, which can only be read from Parquet. Save the set as Parquet"
                )
            content = values.field("bytes") if "bytes" in fields else values
            first = len(addresses)
            spans = self._list_spans(content, column, first) if _is_binary(content.type) else [None] * len(values)
            if fields:
                spans = [
                    span if valid else None for span, valid in zip(spans, values.is_valid().to_pylist(), strict=True)
                ]
            texts = values.field("path") if "path" in fields else None if fields else values
            paths = (
                [None] * len(values) if texts is None or _is_binary(texts.type) else texts.cast(pa.string()).to_pylist()
            )
            for span, path in zip(spans, paths, strict=True):
                if not span and not path:
                    row = len(addresses)
                    raise DataError(f"{self.path}: row {row} has neither bytes nor a path in column {column!r}")
                addresses.append(span or os.path.normpath(self.path.parent / str(path)))
        return addresses

    def _list_spans(self, content: pa.Array, column: str, first: int) -> list[str | None]:
        """List the addresses of the cells in a batch of an Arrow file; ``None`` for null.

        Args:
            first: number of the batch's first row in the file.
        """
        _, offsets, data = content.buffers()
        width = np.int64 if pa.types.is_large_binary(content.type) else np.int32
        bounds = np.frombuffer(offsets, width)[content.offset : content.offset + len(content) + 1].astype(np.int64)
        # Bounds count from the start of a buffer, addresses from the start of the file.
        bounds += 0 if data is None or self.mapping is None else data.address - self.mapping.address
        spans = enumerate(itertools.pairwise(bounds.tolist()), start=first)
        valid = content.is_valid().to_pylist()
        return [
            span_address(str(self.path), f"{column}[{row}]", start, stop - start) if valid[row - first] else None
            for row, (start, stop) in spans
        ]


def open_table(path: Path) -> Table:
    """Open a Parquet file, an Arrow file or a list of files, depending on its name.

    Raises:
        DataError: the file is damaged, truncated, or of another type.
    """
    with readable_table(path):
        check_regular(path.stat())
        if path.name in LISTS:
            rows = _read_list(path)
            return Table(path, rows.schema, {_FILE_NAME: {"_type": "Audio"}}, rows.select)
        if path.suffix.lower() == ".parquet":
            parquet = pq.ParquetFile(path)
            return Table(path, parquet.schema_arrow, _read_features(path, parquet.schema_arrow), parquet.read)
        with pa.memory_map(str(path)) as file:
            mapping = file.read_buffer(file.size())
        schema = _open_arrow(mapping).schema
        return Table(path, schema, _read_features(path, schema), functools.partial(_read_arrow, path, mapping), mapping)


def readable_table(path: Path) -> AbstractContextManager[None]:
    """Name a table in the errors of its reader."""
    return reading(path, "the file is damaged, truncated, or of another type")


def _read_list(path: Path) -> pa.Table:
    if path.suffix == ".csv":
        return pa.csv.read_csv(path, convert_options=pa.csv.ConvertOptions(strings_can_be_null=True, null_values=[""]))
    if path.suffix == ".parquet":
        table = pq.ParquetFile(path).read()
        table.validate(full=True)
        return table
    return pa.Table.from_pylist([json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()])


def _open_arrow(mapping: pa.Buffer) -> Any:
    return pa.ipc.open_file(mapping) if mapping[: len(_MAGIC)] == _MAGIC else pa.ipc.open_stream(mapping)


def _read_arrow(path: Path, mapping: pa.Buffer, columns: list[str]) -> pa.Table:
    """Return columns of a memory-mapped Arrow file without copying them."""
    reader = _open_arrow(mapping)
    stream = isinstance(reader, pa.RecordBatchReader)
    batches = []
    for batch in reader if stream else map(reader.get_batch, range(reader.num_record_batches)):
        batches.append(batch.select(columns))
        batches[-1].validate(full=True)  # Damaged offsets end the process when a value is read.
        for buffer in itertools.chain.from_iterable(column.buffers() for column in batches[-1]):
            if buffer is not None and buffer.size and not 0 <= buffer.address - mapping.address < mapping.size:
                raise DataError(
                    f"{path}: the file is compressed, so single recordings cannot be read. Save it without compression"
                )
    return pa.Table.from_batches(batches, pa.schema([reader.schema.field(name) for name in columns]))


def _lacks_bytes(metadata: Any, column: str) -> bool:
    """Return true if all rows of a Parquet file have paths in place of bytes, by the statistics of its row groups."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
        statistics = chunks[f"{column}.bytes"].statistics if f"{column}.path" in chunks else None
        if statistics is None or not statistics.has_null_count or statistics.null_count < group.num_rows:
            return False
    return bool(metadata.num_rows)


def _read_features(path: Path, schema: pa.Schema) -> Mapping[str, Mapping[str, Any]]:
    """Read the library's description of the columns, from the file or from dataset_info.json next to it."""
    text, info_file = (schema.metadata or {}).get(b"huggingface"), path.parent / "dataset_info.json"
    if text is not None:
        info = json.loads(text).get("info", {})
    else:
        info = json.loads(info_file.read_text("utf-8")) if info_file.is_file() else {}
    return {name: feature for name, feature in (info.get("features") or {}).items() if isinstance(feature, Mapping)}


def _is_media(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return ("bytes" in fields and _is_binary(fields["bytes"])) or {"array", "sampling_rate"} <= set(fields)
    return _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
