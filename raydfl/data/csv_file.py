"""Reading of users' CSV files: UTF-8 with a header line, separated by commas, semicolons or tabs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from raydfl.core.errors import DataError


def read_csv(file: Path, texts: Iterable[str]) -> pa.Table:
    """Read a CSV file. Empty cells become null.

    Args:
        file: path of the file.
        texts: columns to read as text, so that a speaker 007 does not become 7.

    Raises:
        DataError: the file is not UTF-8 text.
        OSError, pa.ArrowException: the file cannot be read.
    """
    return pa.csv.read_csv(
        file,
        parse_options=pa.csv.ParseOptions(delimiter=_find_delimiter(file)),
        convert_options=pa.csv.ConvertOptions(
            column_types=dict.fromkeys(texts, pa.string()),
            strings_can_be_null=True,
            null_values=[""],
        ),
    )


def _find_delimiter(file: Path) -> str:
    """Find the delimiter in the header line. Spreadsheets in many languages write semicolons."""
    with file.open("rb") as stream:
        header = stream.readline()
    try:
        header.decode()
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text. Save it as UTF-8") from None
    return next((mark for mark in (";", "\t") if mark.encode() in header and b"," not in header), ",")
