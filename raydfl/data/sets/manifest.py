"""Your own recordings, listed in a CSV or Parquet file: which file, which class, and if known whose it is and which split.

Relative paths are taken from the folder of the list, or from ``root``. The files are wav, flac or ogg, of any rate and
channel count. Further columns are kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.data.clips import make_manifest
from raydfl.data.dataset import Card, Dataset
from raydfl.data.sets._splits import SPLIT_OF
from raydfl.errors import DataError, nearest

_RESERVED = ("clip", "path", "label", "group", "split")


@dataclass(frozen=True, kw_only=True)
class Manifest(Dataset):
    """A list of recordings."""

    card: ClassVar[Card] = Card(
        title="A list of your own recordings",
        layout="a CSV (comma, header line, UTF-8) or Parquet file with the columns path, label and optionally group and split",
    )

    file: Annotated[Path, Field(description="the list, *.csv or *.parquet")]
    root: Annotated[Path | None, Field(description="folder that relative paths start from; null: the list's own")] = (
        None
    )
    path_column: Annotated[str, Field(description="column with the paths")] = "path"
    label_column: Annotated[str, Field(description="column with the classes")] = "label"
    group_column: Annotated[
        str | None, Field(description="column that says whose clip it is; null: 'group' if there is one")
    ] = None
    split_column: Annotated[
        str | None,
        Field(description=f"column with {', '.join(SPLIT_OF)}; null: 'split' if there is one"),
    ] = None

    def manifest(self) -> pa.Table:
        """The rows in the order of the list. Extra columns: those that are not mapped.

        A clip's id is its path, relative to the root if it lies below it.

        Raises:
            DataError: also when none of the files exists; a part of them missing is found when they are read.
        """
        file = self.file.expanduser().resolve()
        table = self._read(file)
        root = file.parent if self.root is None else self.root.expanduser().resolve()
        mapped = {"path": self.path_column, "label": self.label_column}
        for name, given in (("group", self.group_column), ("split", self.split_column)):
            if given is not None or name in table.column_names:
                mapped[name] = given or name
        for name, column in mapped.items():
            if column not in table.column_names:
                raise DataError(
                    f"{file} has no column {column!r}; its columns: {', '.join(table.column_names) or 'none'}. "
                    f"Name the right one with {name}_column"
                )
        columns = {name: table.column(column) for name, column in mapped.items()}
        paths = self._paths(columns["path"].to_pylist(), file, root)
        columns["path"] = pa.array(paths, pa.string())
        columns["clip"] = pa.array([_clip(path, root) for path in paths], pa.string())
        if "split" in columns:
            columns["split"] = _splits(columns["split"].to_pylist(), file)
        extra = {name: table.column(name) for name in table.column_names if name not in {*mapped.values(), *_RESERVED}}
        return make_manifest(columns | extra, str(file))

    def _read(self, file: Path) -> pa.Table:
        if not file.is_file():
            raise DataError(f"there is no list of recordings {file}; expected {self.card.layout}")
        try:
            if file.suffix.lower() == ".parquet":
                return pa.parquet.read_table(file)
            if file.suffix.lower() == ".csv":
                # Mapped columns stay text: a speaker 007 is not the number 7.
                names = (
                    self.path_column,
                    self.label_column,
                    self.group_column or "group",
                    self.split_column or "split",
                )
                return pa.csv.read_csv(
                    file,
                    convert_options=pa.csv.ConvertOptions(
                        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
                    ),
                )
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file} cannot be read: {error}; expected {self.card.layout}") from error
        raise DataError(f"{file} is neither *.csv nor *.parquet; expected {self.card.layout}")

    def _paths(self, values: list[object], file: Path, root: Path) -> list[str]:
        """Absolute paths."""
        for number, value in enumerate(values, start=1):
            if not isinstance(value, str) or not value:
                raise DataError(f"{file}: row {number} has no path (column {self.path_column!r} is {value!r})")
        paths = [os.path.normpath(root / Path(str(value)).expanduser()) for value in values]
        if paths and not any(Path(path).is_file() for path in paths):
            raise DataError(
                f"{file}: not one of its {len(paths)} files exists, the first is {paths[0]}; set root to the folder that the paths "
                "start from"
            )
        return paths


def _clip(path: str, root: Path) -> str:
    found = Path(path)
    return found.relative_to(root).as_posix() if found.is_relative_to(root) else found.as_posix()


def _splits(values: list[object], file: Path) -> pa.Array:
    for number, value in enumerate(values, start=1):
        if value is not None and str(value).lower() not in SPLIT_OF:
            raise DataError(f"{file}: row {number} has the unknown split {value!r}; {nearest(str(value), SPLIT_OF)}")
    return pa.array([None if value is None else SPLIT_OF[str(value).lower()] for value in values], pa.string())
