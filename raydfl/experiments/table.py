"""Tables of many runs: numbers as text, and the files that they are written to."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from raydfl.core.files import write_durably
from raydfl.experiments.plan import label_of


def shown(value: float | None) -> str:
    """Return a number as a table shows it; ``-`` when there is none."""
    return "-" if value is None or np.isnan(value) else f"{value:.2f}"


def markdown_table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    rows = [headings, ["---"] * len(headings), *body]
    return "\n".join(f"| {' | '.join(text.replace('|', '/') for text in row)} |" for row in rows)


def to_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return rows as a table. Settings that are numbers in some trials and text in others become text."""
    found: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1 and not kinds <= {int, float}:
            values = [None if value is None else label_of(value) for value in values]
        elif kinds == {int, float}:
            values = [None if value is None else float(value) for value in values]
        found[name] = values
    return pa.table(found)


def to_csv(table: pa.Table) -> bytes:
    """Return a table as comma-separated values."""
    buffer = io.BytesIO()
    pa.csv.write_csv(table, buffer)
    return buffer.getvalue()


def to_parquet(table: pa.Table) -> bytes:
    """Return a table as a Parquet file's content."""
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer)
    return buffer.getvalue()


def write_files(contents: Mapping[Path, bytes], advice: str) -> list[Path]:
    """Write files durably; return their paths.

    Args:
        advice: what to do where they cannot be written.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    for path, content in contents.items():
        write_durably(path, content, advice)
    return list(contents)
