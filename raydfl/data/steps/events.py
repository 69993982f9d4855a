"""Events as labels: the classes in a clip with their times (``data.events``).

A label lists the events of a clip: ``0.5-1.25 dog|3-4 rain``, with onset and offset in seconds. ``dog|rain`` has classes without
times (a weak label), and ``|`` no event.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import Field

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.core.isolation import reading
from raydfl.core.settings import Settings
from raydfl.data.manifest import add_remarks
from raydfl.data.steps.listing import natural_order

SEPARATOR = "|"
"""Text between two events of a label. Alone, it is the label of a clip without events."""
_NO_CLASS = -1
_TIMED = re.compile(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?) (.+)", re.DOTALL)
_TIMES = re.compile(r"[\d.]+(e-?\d+)?\s*-\s*[\d.]")
"""Start of a text that was meant to have times."""
_ALWAYS = (-math.inf, math.inf)
"""Onset and offset of an event without times."""

Event = tuple[float, float, str]
"""Onset and offset in seconds, -inf and inf if unknown, and class."""


class EventSettings(Settings):
    """Settings of events as labels."""

    file: Path | None = Field(
        None,
        description="Tab-separated list of events with a header line, in DESED's format: clip (or filename, with or without "
        "folders), onset and offset in seconds, and label (or event_label). Lines without times are weak labels. A line without a "
        "label is a clip without events. Weak labels may also be a list of classes, separated by commas (event_labels). null: the "
        "labels of the data set are events.",
    )


def label_events(manifest: pa.Table, settings: EventSettings) -> pa.Table:
    """Label the clips with the events of the file, and remove clips without a label.

    Raises:
        DataError: the file is missing or invalid, or names a clip that is not on the list.
    """
    if settings.file is None:
        return manifest.filter(manifest.column("label").is_valid())
    names = manifest.column("clip").to_pylist()
    events = read_events(settings.file, "data.events.file", _find_names(names))
    labels = [events.get(name) for name in names]
    column = pa.array([None if label is None else write_events(label) for label in labels], pa.string())
    manifest = manifest.set_column(manifest.column_names.index("label"), "label", column)
    absent = labels.count(None)
    if not absent:
        return manifest
    remark = f"{absent:,} of {len(labels):,} clips have no line in {settings.file} (data.events.file) and are left out"
    return add_remarks(manifest.filter(column.is_valid()), [remark])


def _find_names(clips: Sequence[str]) -> Mapping[str, str]:
    """Return the clip of each name in the file: the clip's name, or the last part of its path if no other clip has it."""
    last = [name.rpartition("/")[2] for name in clips]
    counts = dict.fromkeys(last, 0)
    for name in last:
        counts[name] += 1
    return {short: clip for short, clip in zip(last, clips, strict=True) if counts[short] == 1} | {c: c for c in clips}


def read_events(path: Path, where: str, clips: Mapping[str, str] | None = None) -> dict[str, list[Event]]:
    """Read the events of each clip from a list in DESED's format (:class:`EventSettings`).

    Args:
        path: the file.
        where: start of messages.
        clips: the clip of each name in the file. ``None``: any names.

    Raises:
        DataError: the file cannot be read, has no lines, or an invalid line.
    """
    with reading(f"{where}: {path}", "cannot be read as text"):
        lines = csv.DictReader(
            read_regular(path).decode("utf-8-sig").splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE
        )
    columns = [_find_column(f"{where}: {path}", lines.fieldnames or [], names) for names in _COLUMNS]
    events: dict[str, list[Event]] = {}
    for number, line in enumerate(lines, start=2):
        place = f"{where}: line {number} of {path}"
        clip, onset, offset, label = ((line.get(column) or "").strip() if column else "" for column in columns)
        if clips is not None and clip not in clips:
            raise DataError(
                f"{place}: the clip {clip!r} is not on the list of clips, or several clips have this name. Give its name with its "
                f"folders, or remove the line"
            )
        if SEPARATOR in label or (not label and (onset or offset)):
            raise DataError(f"{place}: the label {label!r} is empty or has a {SEPARATOR}. Correct it")
        known = events.setdefault(clip if clips is None else clips[clip], [])
        if onset or offset:
            known.append((_read_seconds(onset, place), _read_seconds(offset, place), label))
        else:
            known += [(*_ALWAYS, name) for name in (label.split(",") if columns[3] == _SEVERAL else [label]) if name]
        _check_events(known, f"{place}: clip {clip!r}")
    if not events:
        raise DataError(f"{where}: {path} has no lines after the header. List the events of the clips")
    return events


_SEVERAL = "event_labels"
_COLUMNS = (("clip", "filename"), ("onset", None), ("offset", None), ("label", "event_label", _SEVERAL))
"""Names of each column. ``None``: the column may be missing."""


def _find_column(place: str, present: Sequence[str], names: Sequence[str | None]) -> str | None:
    """Return the name of a column, or ``None`` if it is missing and not required."""
    found = next((name for name in names if name in present), None)
    if found is None and None not in names:
        raise DataError(
            f"{place} has no column {' or '.join(map(str, names))}. Its columns, separated by tabs: "
            f"{', '.join(present) or 'none'}. Name the columns clip, onset, offset and label in the first line"
        )
    return found


def _read_seconds(text: str, place: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise DataError(f"{place}: {text!r} is not a time. Give onset and offset in seconds from the start of the clip")
    return seconds


def _check_events(events: Sequence[Event], place: str) -> None:
    """Check the events of a clip.

    Raises:
        DataError: an offset is not after its onset, two events of a class overlap, or only some events have times.
    """
    for onset, offset, label in events:
        if not onset < offset:
            raise DataError(
                f"{place}: event {label!r} from {onset:g} s to {offset:g} s has no length. Its offset must be after its onset"
            )
    if len({math.isinf(onset) for onset, _, _ in events}) > 1:
        raise DataError(f"{place}: only some events have times. Give the times of all events, or of no event")
    for before, after in _pair_events(events):
        if after[0] < before[1]:
            times = f"{before[0]:g} s to {before[1]:g} s" if math.isfinite(before[1]) else "without times"
            raise DataError(f"{place}: event {after[2]!r} overlaps with itself ({times}). Join the two events")


def _pair_events(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield consecutive events of the same class."""
    last: dict[str, Event] = {}
    for event in sorted(events):
        if event[2] in last:
            yield last[event[2]], event
        last[event[2]] = event


def write_events(events: Sequence[Event]) -> str:
    """Write the events of a clip as a label, in the order of time."""
    texts = [
        label if math.isinf(onset) else f"{_write(onset)}-{_write(offset)} {label}"
        for onset, offset, label in sorted(events)
    ]
    return SEPARATOR.join(texts) or SEPARATOR


def _write(seconds: float) -> str:
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


def parse_events(label: str) -> list[Event]:
    """Parse a label, the inverse of :func:`write_events`.

    Raises:
        DataError: the events are invalid.
    """
    events: list[Event] = []
    for text in filter(None, (part.strip() for part in label.split(SEPARATOR))):
        timed = _TIMED.fullmatch(text)
        if timed is None and _TIMES.match(text):
            raise DataError(
                f"data.events: {text!r} in the label {json.dumps(label)} has no valid times. Write onset, hyphen, offset, space, "
                f"class: 0.5-1.25 dog"
            )
        events.append((*_ALWAYS, text) if timed is None else (float(timed[1]), float(timed[2]), timed[3]))
    _check_events(events, f"data.events: the label {json.dumps(label)}")
    return events


def split_events(labels: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Split labels into events.

    Args:
        labels: the distinct labels of the manifest.

    Returns:
        Names of the classes in natural order, and the events of each label, float64 [labels, most events, 3]: onset and offset
        in seconds, and the class's index, -1 after the last event. Events without times last from -inf to inf.

    Raises:
        DataError: no label has an event, or a label is invalid.
    """
    clips = [parse_events(label) for label in labels]
    classes = natural_order(list({name for events in clips for _, _, name in events}))
    if not classes:
        raise DataError("data.events: no clip has an event. Check the labels, or data.events.file")
    code = {name: number for number, name in enumerate(classes)}
    table = np.zeros((len(labels), max(map(len, clips)), 3))
    table[:, :, 2] = _NO_CLASS
    for row, events in zip(table, clips, strict=True):
        for place, (onset, offset, name) in enumerate(events):
            row[place] = onset, offset, code[name]
    return classes, table


def contains_classes(events: np.ndarray, classes: int) -> np.ndarray:
    """Return the classes of each label, bool [labels, classes], from events float64 [labels, most events, 3]."""
    members: np.ndarray = (events[:, :, 2, None] == np.arange(classes)).any(axis=1)
    return members


def check_times(events: np.ndarray, seconds: np.ndarray, names: Sequence[str]) -> None:
    """Check that the events are within their clips.

    Args:
        events: float64 [clips, most events, 3].
        seconds: float64 [clips], lengths of the clips. inf: unknown.
        names: names of the clips.

    Raises:
        DataError: an event ends after its clip.
    """
    last = np.where(np.isfinite(events[:, :, 1]), events[:, :, 1], 0.0).max(axis=1, initial=0.0)
    late = np.flatnonzero(last > seconds)
    if len(late):
        clip = int(late[0])
        raise DataError(
            f"data.events: clip {names[clip]!r} has an event until {last[clip]:g} s, but it is only {seconds[clip]:.2f} s long. "
            f"Correct its times. Clips with such events: {len(late):,}"
        )
