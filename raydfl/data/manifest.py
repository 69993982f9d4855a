"""The manifest of a data set: a table with a row for each clip.

A manifest is a ``pyarrow.Table``. Its first six columns are the same for all data sets:

========= ======= =====================================================================================================
column    type    meaning
========= ======= =====================================================================================================
clip      string  unique id: POSIX path relative to the set's root, or a generated name
path      string  absolute path of the file; null for generated clips
label     string  the class; null for an unlabelled clip
group     string  natural owner of the clip (speaker, actor, device ...); null if unknown
split     string  "train", "validation" or "test"; null in all rows if the set has no official split
seconds   float64 duration; null if unknown without opening the file
========= ======= =====================================================================================================

Further columns (fold, session, recording, take) follow. Remarks are messages about the set, such as ignored files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError, nearest

SPLITS = ("train", "validation", "test")

SOUNDFILE_SUFFIXES = {
    "WAV": (".wav", ".wave"),
    "RF64": (".rf64",),
    "W64": (".w64",),
    "FLAC": (".flac",),
    "OGG": (".ogg", ".oga", ".opus"),
    "MP3": (".mp3", ".mp2"),
    "AIFF": (".aiff", ".aif", ".aifc"),
    "AU": (".au", ".snd"),
    "CAF": (".caf",),
    "NIST": (".sph", ".nist"),
    "VOC": (".voc",),
    "IRCAM": (".sf",),
    "SVX": (".iff", ".svx", ".8svx"),
    "AVR": (".avr",),
    "PAF": (".paf",),
    "PVF": (".pvf",),
    "SDS": (".sds",),
    "WVE": (".wve",),
}
"""Suffixes of recordings, by libsndfile's name of the format. Ambiguous suffixes are missing (.mat, .htk, .mpc, .xi), as is RAW,
because it stores neither rate nor channels."""
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".wmv", ".mpg", ".mpeg", ".m4v", ".flv", ".ogv")
"""Suffixes of videos."""
FFMPEG_SUFFIXES = (".m4a", ".m4b", ".aac", ".wma", ".amr", ".3gp", ".ape", ".wv", ".ac3", ".mka", *VIDEO_SUFFIXES)
"""Suffixes of recordings and videos that need ffmpeg, because libsndfile does not support them."""
_REMARKS = b"raydfl remarks"

_TYPES = {
    "clip": pa.string(),
    "path": pa.string(),
    "label": pa.string(),
    "group": pa.string(),
    "split": pa.string(),
    "seconds": pa.float64(),
}
_REQUIRED = ("clip", "path", "label")
# Seconds by which the stop of a clip may exceed its file, because annotation tools round to milliseconds or coarser.
_ROUNDING = 0.01


def make_manifest(
    rows_or_columns: Sequence[Mapping[str, Any]] | Mapping[str, Any] | pa.Table, where: str, remarks: Sequence[str] = ()
) -> pa.Table:
    """Make a validated manifest from rows, columns or a table.

    ``clip``, ``path`` and ``label`` are required, but ``path`` may contain nulls. ``group``, ``split`` and ``seconds`` default to
    null. The order of the rows is preserved. Further columns follow the six standard columns.

    Args:
        rows_or_columns: rows, arrays by column, or a table.
        where: name of the manifest in messages: the set's name and root, or a file.
        remarks: messages to the user, for :func:`read_remarks`.

    Raises:
        DataError: no rows, a missing column, a value of the wrong type, a missing clip name, an empty label, duplicate clip names,
            an unknown split, or a split in some rows only.
    """
    table = _as_table(rows_or_columns, where)
    for name in _REQUIRED:
        if name not in table.column_names:
            raise DataError(
                f"{where}: the manifest has no column {name!r}. Its columns: {', '.join(table.column_names) or 'none'}"
            )
    if table.num_rows == 0:
        raise DataError(f"{where}: the manifest is empty. Check the root folder and the options that select clips")
    columns = {name: _standard_column(table, name, kind, where) for name, kind in _TYPES.items()}
    columns |= {name: table.column(name) for name in table.column_names if name not in _TYPES}
    manifest = pa.table(columns)
    _check_rows(manifest, where)
    return manifest.replace_schema_metadata({_REMARKS: json.dumps(remarks)}) if remarks else manifest


def read_remarks(manifest: pa.Table) -> list[str]:
    """Read the messages to the user in a manifest."""
    remarks: list[str] = json.loads((manifest.schema.metadata or {}).get(_REMARKS, b"[]"))
    return remarks


def add_remarks(manifest: pa.Table, remarks: Sequence[str]) -> pa.Table:
    """Return a manifest with further messages to the user."""
    return manifest.replace_schema_metadata({_REMARKS: json.dumps([*read_remarks(manifest), *remarks])})


def find_samples(start: float, stop: float | None, samples: int, rate: int, name: str) -> tuple[int, int]:
    """Convert the start and stop of a clip in seconds to a range of samples (first, stop).

    Raises:
        DataError: the clip exceeds the file, or is empty.
    """
    if stop is not None and stop > samples / rate + _ROUNDING:
        raise DataError(
            f"{name}: the clip's stop, {stop:g} s, is after the end of the file, which is {samples / rate:g} s long. Correct the "
            f"stop"
        )
    first, last = round(start * rate), samples if stop is None else min(round(stop * rate), samples)
    if first >= last and (start or stop is not None):
        raise DataError(
            f"{name}: no sample is between the clip's start, {start:g} s, and its stop, "
            f"{'the end of the file' if stop is None else f'{stop:g} s'}: the file is {samples / rate:g} s long, at {rate} Hz. "
            f"Correct start and stop"
        )
    return first, last


def escape_path(path: str | os.PathLike[str]) -> str:
    r"""Convert a path to printable text. Bytes that are not UTF-8 become escape sequences.

    >>> escape_path(os.fsdecode(b"caf\xe9.wav"))
    'caf\\xe9.wav'
    """
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _as_table(rows_or_columns: Sequence[Mapping[str, Any]] | Mapping[str, Any] | pa.Table, where: str) -> pa.Table:
    if isinstance(rows_or_columns, pa.Table):
        return rows_or_columns
    try:
        if isinstance(rows_or_columns, Mapping):
            return pa.table(dict(rows_or_columns))
        if not rows_or_columns:
            return pa.schema(_TYPES).empty_table()
        names = dict.fromkeys(name for row in rows_or_columns for name in row)
        return pa.table({name: [row.get(name) for row in rows_or_columns] for name in names})
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{where}: the manifest has values of several types, or of unequal number: {error}") from error


def _standard_column(table: pa.Table, name: str, kind: pa.DataType, where: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, kind)])
    try:
        return table.column(name).cast(kind)
    except pa.ArrowException as error:
        raise DataError(f"{where}: column {name!r} cannot be read as {kind}: {error}") from error


def _check_rows(manifest: pa.Table, where: str) -> None:
    for name in ("clip", "label"):
        column = manifest.column(name)
        blank = pc.fill_null(pc.equal(column, ""), name == "clip")  # a null label means an unlabelled clip
        if pc.any(blank).as_py():
            index = pc.index(blank, True).as_py()
            raise DataError(
                f"{where}: row {index + 1} (clip {manifest.column('clip')[index].as_py()!r}) has no {name}. Rows without {name}: "
                f"{pc.sum(blank).as_py()}. Fill in the column, or remove these rows"
            )
    counts = pc.value_counts(manifest.column("clip"))
    duplicates = [entry["values"] for entry in counts.to_pylist() if entry["counts"] > 1]
    if duplicates:
        raise DataError(
            f"{where}: {len(duplicates)} clips are named more than once, the first {duplicates[0]!r}. Make each name unique"
        )
    split = manifest.column("split")
    for value in pc.unique(split).to_pylist():
        if value is not None and value not in SPLITS:
            raise DataError(f"{where}: unknown split {value!r}. {nearest(value, SPLITS)}")
    if 0 < split.null_count < len(split):
        index = pc.index(pc.is_null(split), True).as_py()
        raise DataError(
            f"{where}: row {index + 1} (clip {manifest.column('clip')[index].as_py()!r}) has no split. Rows without split: "
            f"{split.null_count} of {len(split)}. Set it in all rows ({', '.join(SPLITS)}), or leave the column empty"
        )
