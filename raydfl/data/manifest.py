"""The manifest (one row for each clip) and the reading of audio files.

A manifest is a ``pyarrow.Table``. Its first six columns are the same for every data set:

========= ======= =====================================================================================================
column    type    meaning
========= ======= =====================================================================================================
clip      string  unique id: POSIX path relative to the set's root, or a made-up name for what is not a file
path      string  absolute path of the file; null for clips that are generated
label     string  the class; null where nobody has labelled the clip
group     string  speaker, actor, device ...: whoever would own the clip; null where the set does not say
split     string  "train", "validation" or "test"; null in every row when the set has no official split
seconds   float64 duration; null where it is not known without opening the file
========= ======= =====================================================================================================

What else a set knows (fold, session, recording, take) follows in columns of its own. What is to be said about the set as a whole,
such as files that it leaves out, are the manifest's remarks.
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

_SUFFIXES = {
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
"""Endings of recordings, by libsndfile's name of their format. Not here: what mostly is something else (.mat, .htk, .mpc, .xi), and
RAW, which says neither rate nor channels."""
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".wmv", ".mpg", ".mpeg", ".m4v", ".flv", ".ogv")
"""Endings of films."""
FFMPEG_SUFFIXES = (".m4a", ".m4b", ".aac", ".wma", ".amr", ".3gp", ".ape", ".wv", ".ac3", ".mka", *VIDEO_SUFFIXES)
"""Endings of recordings, and of films with sound, that libsndfile does not decode and ffmpeg does."""
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
# Seconds by which a part may be said to end after its file: what people mark parts with rounds to milliseconds or coarser.
_ROUNDING = 0.01


def make_manifest(
    rows_or_columns: Sequence[Mapping[str, Any]] | Mapping[str, Any] | pa.Table, where: str, remarks: Sequence[str] = ()
) -> pa.Table:
    """Make a validated manifest from rows, from columns, or from another table.

    ``clip``, ``path`` and ``label`` must be given (``path`` may hold nulls); ``group``, ``split`` and ``seconds`` are null
    when absent. The order of the rows is kept, further columns follow the six standard ones.

    Args:
        where: what the messages call this manifest: the set's name and root, or the manifest's file.
        remarks: what :func:`remarks_of` is to return.

    Raises:
        DataError: no rows, a missing column, a value of the wrong type, a null or empty label or clip, two clips of one
            name, an unknown split, or a split in some rows only.
    """
    table = _as_table(rows_or_columns, where)
    for name in _REQUIRED:
        if name not in table.column_names:
            raise DataError(
                f"{where}: the manifest has no column {name!r}; its columns: {', '.join(table.column_names) or 'none'}"
            )
    if table.num_rows == 0:
        raise DataError(f"{where}: the manifest is empty; check the root folder and the options that select clips")
    columns = {name: _standard_column(table, name, kind, where) for name, kind in _TYPES.items()}
    columns |= {name: table.column(name) for name in table.column_names if name not in _TYPES}
    manifest = pa.table(columns)
    _check_rows(manifest, where)
    return manifest.replace_schema_metadata({_REMARKS: json.dumps(remarks)}) if remarks else manifest


def remarks_of(manifest: pa.Table) -> list[str]:
    """Return remarks for the user about the set that a manifest lists."""
    remarks: list[str] = json.loads((manifest.schema.metadata or {}).get(_REMARKS, b"[]"))
    return remarks


def _part(start: float, stop: float | None, samples: int, rate: int, name: str) -> tuple[int, int]:
    """Return the first sample of a part of a file, and the one after its last.

    Raises:
        DataError: the file does not have that part.
    """
    if stop is not None and stop > samples / rate + _ROUNDING:
        raise DataError(
            f"{name}: the clip's stop, {stop:g} s, lies behind the end of the file: it is {samples / rate:g} s long"
        )
    first, last = round(start * rate), samples if stop is None else min(round(stop * rate), samples)
    if first >= last and (start or stop is not None):
        raise DataError(
            f"{name}: no sample lies between the clip's start, {start:g} s, and its stop, "
            f"{'the end of the file' if stop is None else f'{stop:g} s'}: the file is {samples / rate:g} s long, at {rate} Hz"
        )
    return first, last


def shown_name(path: str | os.PathLike[str]) -> str:
    r"""Return a path as text that can be printed and stored, also where its name is not UTF-8.

    >>> shown_name(os.fsdecode(b"caf\xe9.wav"))
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
        raise DataError(f"{where}: the manifest's values do not form columns: {error}") from error


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
        blank = pc.fill_null(pc.equal(column, ""), name == "clip")  # a null label: nobody has labelled the clip
        if pc.any(blank).as_py():
            index = pc.index(blank, True).as_py()
            raise DataError(
                f"{where}: row {index + 1} (clip {manifest.column('clip')[index].as_py()!r}) has no {name}; "
                f"{pc.sum(blank).as_py()} such rows"
            )
    counts = pc.value_counts(manifest.column("clip"))
    twice = [entry["values"] for entry in counts.to_pylist() if entry["counts"] > 1]
    if twice:
        raise DataError(f"{where}: {len(twice)} clips are named more than once, the first {twice[0]!r}")
    split = manifest.column("split")
    for value in pc.unique(split).to_pylist():
        if value is not None and value not in SPLITS:
            raise DataError(f"{where}: unknown split {value!r}; {nearest(value, SPLITS)}")
    if 0 < split.null_count < len(split):
        index = pc.index(pc.is_null(split), True).as_py()
        raise DataError(
            f"{where}: row {index + 1} (clip {manifest.column('clip')[index].as_py()!r}) has no split while others have; "
            f"{split.null_count} of {len(split)} rows; give every row one of {', '.join(SPLITS)}, or none any"
        )
