"""CSV files of users: with a header line, in UTF-8, and separated by commas, semicolons or tabs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from raydfl.core.errors import DataError


def read_csv(file: Path, texts: Iterable[str], columns: Iterable[str] = ()) -> pa.Table:
    """Read a CSV file. An empty cell is null.

    Args:
        file: its path.
        texts: columns that stay text: a speaker 007 is not the number 7.
        columns: the only columns to read; none: all.

    Raises:
        DataError: it is not UTF-8 text.
        OSError, pa.ArrowException: it cannot be read.
    """
    return pa.csv.read_csv(
        file,
        parse_options=pa.csv.ParseOptions(delimiter=_delimiter(file)),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict.fromkeys(texts, pa.string()),
            include_columns=[*columns],
            strings_can_be_null=True,
            null_values=[""],
        ),
    )


def _delimiter(file: Path) -> str:
    """Find what separates the columns in the header line: spreadsheets of many countries write semicolons."""
    with file.open("rb") as opened:
        header = opened.readline()
    try:
        header.decode()
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text; save it as UTF-8") from None
    return next((mark for mark in (";", "\t") if mark.encode() in header and b"," not in header), ",")
