"""Your own recordings, listed in a CSV or Parquet file with their classes, and optionally owners and splits.

Relative paths start at the folder of the list, or at ``root``. Files may have any format of libsndfile (wav, flac, ogg, opus,
mp3, aiff, au, caf and more), any rate and any number of channels, or be videos (docs/data.md#videos). A clip's id is its path
below the root. Mapped columns are renamed to ``path``, ``label``, ``group`` and ``split``. Further columns keep their names,
and are available to splits and partitions. docs/data.md#manifest has examples.

With the columns ``start`` and ``stop``, in seconds, a clip is a part of its file. An empty cell means the beginning or the end
of the file. A file may have any number of clips. The id of a part is ``PATH@START-STOP``, as in ``day1.wav@12.5-14``. A stop
may exceed the end of the file by at most 10 ms (to allow for rounding), and no file may have the same part twice. If these
columns have another meaning in your list, rename them.

With the column ``file_channel`` a clip is a single channel of its file, counted from 0. An empty cell means all channels. The
channel is in the id, as in ``day1.wav#1``.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.core.isolation import reading
from raydfl.data.audio import read_audio
from raydfl.data.csv_file import read_csv
from raydfl.data.dataset import Card, Dataset
from raydfl.data.images import read_image
from raydfl.data.manifest import make_manifest
from raydfl.data.packed import resolve_address, split_address
from raydfl.data.sets._files import SPLIT_OF, parse_splits, resolve_path

_SEGMENT = ("start", "stop")
CHANNEL = "file_channel"
"""Column with the channel of the clip in its file, from 0. null: all channels."""
_RESERVED = ("clip", "path", "label", "group", "split", *_SEGMENT)


@dataclass(frozen=True, kw_only=True)
class Manifest(Dataset):
    """A list of recordings."""

    card: ClassVar[Card] = Card(
        title="A list of your own recordings",
        layout="a CSV (header line, UTF-8, separated by commas, semicolons or tabs) or Parquet file with the columns path, label "
        "and optionally group, split, start and stop",
    )

    file: Annotated[Path, Field(description="The list, *.csv or *.parquet.")]
    root: Annotated[Path | None, Field(description="Base folder for relative paths. null: the folder of the list.")] = (
        None
    )
    path_column: Annotated[str, Field(description="Column with the paths.")] = "path"
    label_column: Annotated[str, Field(description="Column with the classes.")] = "label"
    group_column: Annotated[
        str | None, Field(description="Column with the owner of a clip. null: group, if present.")
    ] = None
    split_column: Annotated[
        str | None,
        Field(description=f"Column with the split of a clip ({', '.join(SPLIT_OF)}). null: split, if present."),
    ] = None

    def manifest(self) -> pa.Table:
        """List the rows in the order of the file.

        Extra columns: all columns without an option, and ``start`` and ``stop`` as float64. A clip's id is its path, relative to
        the root if possible. A segment adds ``@start-stop``.

        Raises:
            DataError: the list is invalid, or none of its files exists. Single missing files raise an error when they are read.
        """
        file = resolve_path(self.file)
        table = self._read_table(file)
        repeated = [name for name, count in Counter(table.column_names).items() if count > 1]
        if repeated:
            raise DataError(
                f"{file} has several columns {repeated[0]!r}; its columns: {', '.join(table.column_names)}. Rename or remove one"
            )
        root = file.parent if self.root is None else resolve_path(self.root)
        mapped = {"path": self.path_column, "label": self.label_column}
        for name, option in (("group", self.group_column), ("split", self.split_column)):
            if option is not None or name in table.column_names:
                mapped[name] = option or name
        for name, column in mapped.items():
            if column not in table.column_names:
                raise DataError(
                    f"{file} has no column {column!r}; its columns: {', '.join(table.column_names) or 'none'}. "
                    f"Name the right one with {name}_column"
                )
        columns = {name: table.column(column) for name, column in mapped.items()}
        paths = self._resolve_paths(columns["path"].to_pylist(), file, root)
        columns["path"] = pa.array(paths, pa.string())
        channels = table.column(CHANNEL).to_pylist() if CHANNEL in table.column_names else [None] * len(paths)
        clips = [_relative_to(path, root) for path in paths]
        segment = [name for name in _SEGMENT if name in table.column_names]
        if segment:
            starts, stops = (_read_seconds(table, name, file) for name in _SEGMENT)
            for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                clips[row] += _format_segment(start, stop, None)
                if stop is not None and stop <= (start or 0.0):
                    raise DataError(
                        f"{file}: row {row + 1} stops at {stop:g} s, not after its start at {start or 0.0:g} s. Correct the row"
                    )
            lengths = [
                None if stop is None else stop - (start or 0.0) for start, stop in zip(starts, stops, strict=True)
            ]
            columns["seconds"] = pa.array(lengths, pa.float64())
            columns |= {name: pa.array({"start": starts, "stop": stops}[name], pa.float64()) for name in segment}
        ids = (clip + _format_segment(None, None, channel) for clip, channel in zip(clips, channels, strict=True))
        columns["clip"] = pa.array(ids, pa.string())
        if "split" in columns:
            splits = parse_splits(columns["split"].to_pylist(), lambda row: f"{file}: row {row + 1}")
            columns["split"] = pa.array(splits, pa.string())
        extra = {name: table.column(name) for name in table.column_names if name not in {*mapped.values(), *_RESERVED}}
        return make_manifest(extra | columns, str(file))

    def file_of(self, row: Mapping[str, Any], column: str) -> str | None:
        """Return the path of another file in a row. Relative paths start at the same folder as the recordings' paths."""
        root = resolve_path(self.file).parent if self.root is None else resolve_path(self.root)
        value = row[column]
        return resolve_address(str(value), root) if value else None

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the file, or a segment or channel of it."""
        return read_audio(row["path"], row.get("start") or 0.0, row.get("stop"), row.get(CHANNEL))

    def image(self, row: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Read the image, or the frame in the middle of the video or its segment."""
        image: npt.NDArray[np.uint8] = read_image(row["path"], row.get("start") or 0.0, row.get("stop"))
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return ``@start-stop#channel`` with the given values, or ``None`` for a whole file."""
        return _format_segment(row.get("start"), row.get("stop"), row.get(CHANNEL)) or None

    def _read_table(self, file: Path) -> pa.Table:
        with reading(file, remedy=f"Expected {self.card.layout}"):
            if not file.is_file():
                raise DataError(f"there is no list of recordings {file}. Expected {self.card.layout}")
            if file.suffix.lower() == ".parquet":
                table = pa.parquet.read_table(file)
                table.validate(full=True)
                return table
            if file.suffix.lower() == ".csv":
                names = (
                    self.path_column,
                    self.label_column,
                    self.group_column or "group",
                    self.split_column or "split",
                    *_SEGMENT,
                )
                return read_csv(file, names)
        raise DataError(f"{file} is neither *.csv nor *.parquet. Expected {self.card.layout}")

    def _resolve_paths(self, values: list[object], file: Path, root: Path) -> list[str]:
        """Return absolute paths, and check the existence of at least one file."""
        for number, value in enumerate(values, start=1):
            if not isinstance(value, str) or not value or "\0" in value:
                raise DataError(
                    f"{file}: row {number} has no path (column {self.path_column!r} is {value!r}). Fill the column"
                )
        paths = [resolve_address(str(value), root) for value in values]
        if paths and not any(os.path.exists(split_address(path)[0]) for path in paths):  # noqa: PTH110  (pathlib's version raises below an unreadable folder)
            raise DataError(
                f"{file}: none of its {len(paths)} files exists, the first is {paths[0]}. Set root to the base folder of the paths"
            )
        return paths


def _relative_to(path: str, root: Path) -> str:
    file = Path(path)
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else file.as_posix()


def _read_seconds(table: pa.Table, name: str, file: Path) -> list[float | None]:
    """Read a column of times in seconds; ``None`` for missing values or a missing column."""
    if name not in table.column_names:
        return [None] * table.num_rows
    values: list[float | None] = []
    for number, value in enumerate(table.column(name).to_pylist(), start=1):
        try:
            values.append(None if value is None else float(value))
        except (TypeError, ValueError):
            values.append(math.nan)
        if values[-1] is not None and not 0 <= values[-1] < math.inf:
            raise DataError(
                f"{file}: row {number} has the {name} {value!r}. Write the number of seconds from the beginning of the file, such "
                f"as 1.5, or rename a column with a different meaning"
            )
    return values


def _format_segment(start: float | None, stop: float | None, channel: int | None) -> str:
    """Format the suffix of a clip's id for a segment or channel; empty for a whole file."""
    times = f"@{_format_number(start or 0.0)}-{'' if stop is None else _format_number(stop)}"
    segment = times if start or stop is not None else ""
    return segment if channel is None else f"{segment}#{channel}"


def _format_number(value: float) -> str:
    return repr(value).removesuffix(".0")  # the shortest text of the same float64
