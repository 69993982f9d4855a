"""Your own recordings, listed in a CSV or Parquet file: which file, which class, and if known whose it is and which split.

Relative paths are taken from the folder of the list, or from ``root``. The files are of any kind that libsndfile decodes, of any
rate and channel count, or films (extra ``video``). With the columns ``start`` and ``stop`` (seconds) a clip is a part of its file,
with ``file_channel`` (counted from 0) a channel of it. Further columns are kept.
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
from raydfl.data.audio import read_audio
from raydfl.data.csv_file import read_csv
from raydfl.data.dataset import Card, Dataset
from raydfl.data.images import read_image
from raydfl.data.manifest import make_manifest
from raydfl.data.packed import resolve_address, split_address
from raydfl.data.sets._files import SPLIT_OF, absolute, known_splits

_PART = ("start", "stop")
CHANNEL = "file_channel"
"""Column with the only channel of the file that belongs to the clip, counted from 0."""
_RESERVED = ("clip", "path", "label", "group", "split", *_PART)


@dataclass(frozen=True, kw_only=True)
class Manifest(Dataset):
    """A list of recordings."""

    card: ClassVar[Card] = Card(
        title="A list of your own recordings",
        layout="a CSV (header line, UTF-8, separated by commas, semicolons or tabs) or Parquet file with the columns path, label "
        "and optionally group, split, start and stop",
    )

    file: Annotated[Path, Field(description="the list, *.csv or *.parquet")]
    root: Annotated[Path | None, Field(description="folder that relative paths start from; null: the list's own")] = (
        None
    )
    path_column: Annotated[str, Field(description="column with the paths")] = "path"
    label_column: Annotated[str, Field(description="column with the classes")] = "label"
    group_column: Annotated[
        str | None, Field(description="column with the owner of a clip; null: 'group', if present")
    ] = None
    split_column: Annotated[
        str | None,
        Field(description=f"column with {', '.join(SPLIT_OF)}; null: 'split' if there is one"),
    ] = None

    def manifest(self) -> pa.Table:
        """List the rows in the order of the file. Extra columns: those that are not mapped; ``start`` and ``stop`` as float64.

        A clip's id is its path, relative to the root if it lies below it; for a part of a file followed by ``@start-stop``.

        Raises:
            DataError: also when none of the files exists; a part of them missing is found when they are read.
        """
        file = absolute(self.file)
        table = self._read(file)
        twice = [name for name, count in Counter(table.column_names).items() if count > 1]
        if twice:
            raise DataError(
                f"{file} has more than one column {twice[0]!r}; its columns: {', '.join(table.column_names)}. Rename or remove one"
            )
        root = file.parent if self.root is None else absolute(self.root)
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
        paths = self._paths(columns["path"].to_pylist(), file, root)
        columns["path"] = pa.array(paths, pa.string())
        channels = table.column(CHANNEL).to_pylist() if CHANNEL in table.column_names else [None] * len(paths)
        clips = [_clip(path, root) for path in paths]
        parts = [name for name in _PART if name in table.column_names]
        if parts:
            starts, stops = (_seconds(table, name, file) for name in _PART)
            for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                clips[row] += _place(start, stop, None)
                if stop is not None and stop <= (start or 0.0):
                    raise DataError(
                        f"{file}: row {row + 1} stops at {stop:g} s, which is not after its start at {start or 0.0:g} s"
                    )
            lengths = [
                None if stop is None else stop - (start or 0.0) for start, stop in zip(starts, stops, strict=True)
            ]
            columns["seconds"] = pa.array(lengths, pa.float64())
            columns |= {name: pa.array({"start": starts, "stop": stops}[name], pa.float64()) for name in parts}
        named = (clip + _place(None, None, channel) for clip, channel in zip(clips, channels, strict=True))
        columns["clip"] = pa.array(named, pa.string())
        if "split" in columns:
            splits = known_splits(columns["split"].to_pylist(), lambda row: f"{file}: row {row + 1}")
            columns["split"] = pa.array(splits, pa.string())
        extra = {name: table.column(name) for name in table.column_names if name not in {*mapped.values(), *_RESERVED}}
        return make_manifest(extra | columns, str(file))

    def file_of(self, row: Mapping[str, Any], column: str) -> str | None:
        """See :class:`Dataset`: relative paths begin where those of the recordings do."""
        root = absolute(self.file).parent if self.root is None else absolute(self.root)
        value = row[column]
        return resolve_address(str(value), root) if value else None

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the file, or the part and the channel of it."""
        return read_audio(row["path"], row.get("start") or 0.0, row.get("stop"), row.get(CHANNEL))

    def image(self, row: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Read the image, or the middle of the film or of the part of it."""
        image: npt.NDArray[np.uint8] = read_image(row["path"], row.get("start") or 0.0, row.get("stop"))
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return ``@start-stop#channel``, as far as that is given."""
        return _place(row.get("start"), row.get("stop"), row.get(CHANNEL)) or None

    def _read(self, file: Path) -> pa.Table:
        try:
            if not file.is_file():
                raise DataError(f"there is no list of recordings {file}; expected {self.card.layout}")
            if file.suffix.lower() == ".parquet":
                return pa.parquet.read_table(file)
            if file.suffix.lower() == ".csv":
                names = (
                    self.path_column,
                    self.label_column,
                    self.group_column or "group",
                    self.split_column or "split",
                    *_PART,
                )
                return read_csv(file, names)
        except (OSError, pa.ArrowException) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise DataError(f"{file} cannot be read: {reason}; expected {self.card.layout}") from error
        raise DataError(f"{file} is neither *.csv nor *.parquet; expected {self.card.layout}")

    def _paths(self, values: list[object], file: Path, root: Path) -> list[str]:
        """Return absolute paths."""
        for number, value in enumerate(values, start=1):
            if not isinstance(value, str) or not value or "\0" in value:
                raise DataError(f"{file}: row {number} has no path (column {self.path_column!r} is {value!r})")
        paths = [resolve_address(str(value), root) for value in values]
        if paths and not any(os.path.exists(split_address(path)[0]) for path in paths):  # noqa: PTH110  (pathlib's raises where it may not look)
            raise DataError(
                f"{file}: not one of its {len(paths)} files exists, the first is {paths[0]}; set root to the folder that the paths "
                "start from"
            )
        return paths


def _clip(path: str, root: Path) -> str:
    found = Path(path)
    return found.relative_to(root).as_posix() if found.is_relative_to(root) else found.as_posix()


def _seconds(table: pa.Table, name: str, file: Path) -> list[float | None]:
    """Read a column of times, ``None`` where there is none."""
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
                f"{file}: row {number} has the {name} {value!r}; it must be a number of seconds from the beginning of the file, "
                f"such as 1.5. If the column means something else, rename it"
            )
    return values


def _place(start: float | None, stop: float | None, channel: int | None) -> str:
    """Return the part of a clip's id after the file; empty for all of the file."""
    part = f"@{_number(start or 0.0)}-{'' if stop is None else _number(stop)}" if start or stop is not None else ""
    return part if channel is None else f"{part}#{channel}"


def _number(value: float) -> str:
    """Write all digits that a float64 has, and no more: ``3`` and ``0.1``."""
    return repr(value).removesuffix(".0")
