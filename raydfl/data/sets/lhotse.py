"""Cuts of the toolkit Lhotse, read without it: JSON lines, each a part of a recording with what is said of it (``CutSet.to_file``).

Read is a ``MonoCut`` of a recording in a file. Its samples are those that Lhotse reads: from ``start``, rounded to a sample (halves
up), as many as ``duration`` rounds to. Refused by name is what Lhotse would compute or fetch: mixed cuts and padding, cuts of
several channels, features without a recording, transforms (speed, resampling), and sources that are a command, a URL or bytes.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.audio import read_audio
from raydfl.data.dataset import Card
from raydfl.data.sets._files import absolute
from raydfl.data.sets._packed import PackedSet, is_plain, named, table_of

_SAID = ("text", "speaker", "language", "gender")
"""Fields of a supervision that become columns, besides those of its own (``custom``)."""
_SEVERAL = "\0several"
"""In place of a value that the supervisions of a cut do not agree on."""


@dataclass(frozen=True, kw_only=True)
class Lhotse(PackedSet):
    """Cuts of recordings. A clip's id is the cut's.

    Extra columns: ``start`` and ``stop`` (float64, seconds; null: all of the file), ``channel`` (its place in the file; null:
    all), ``recording`` (its id), ``text``, ``language``, ``gender``, and what of ``custom`` is text, numbers or truth values.
    """

    card: ClassVar[Card] = Card(
        title="Lhotse cuts", layout="*cuts*.jsonl or *cuts*.jsonl.gz: a cut on each line, with its recording in a file"
    )

    files: Annotated[
        str, Field(description="which files below the root are lists of cuts, such as cuts_{train,dev}.jsonl.gz")
    ] = "**/*cuts*.jsonl*"
    recordings: Annotated[
        Path | None, Field(description="folder that relative paths of recordings start from; null: the root")
    ] = None
    label_column: Annotated[
        str,
        Field(
            description="what is the class: text, speaker, language, gender, or a field of custom, of supervision or cut"
        ),
    ] = "label"
    group_column: Annotated[
        str | None, Field(description="owner of a clip, chosen like the label; null: speaker, if present")
    ] = None

    def clips(self, root: Path, file: str) -> pa.Table:
        """See :class:`PackedSet`."""
        folder = root if self.recordings is None else absolute(self.recordings)
        rows = list(_read_cuts(root / file, folder))
        if not rows:
            raise DataError(f"{root / file}: it has no cuts")
        return table_of(rows)

    def name_columns(self, table: pa.Table, where: str) -> pa.Table:
        """See :class:`PackedSet`."""
        group = self.group_column or ("speaker" if "speaker" in table.column_names else None)
        for field in (self.label_column, group):
            values = table.column(field).to_pylist() if field in table.column_names else []
            if _SEVERAL in values:
                raise DataError(
                    f"{where}: the cut {table.column('clip')[values.index(_SEVERAL)]} has supervisions with different values of "
                    f"{field!r}; make a cut of each (CutSet.trim_to_supervisions)"
                )
        return named(table, self.label_column, group, where)

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the part of the file, and its channel."""
        return read_audio(row["path"], row["start"] or 0.0, row["stop"], row["channel"])

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return ``@start-stop#channel``, if it is not all of the file."""
        if row["start"] is None and row["stop"] is None and row["channel"] is None:
            return None
        return f"@{row['start'] or 0.0!r}-{row['stop']!r}#{row['channel']}"


def _read_cuts(file: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a list of cuts.

    Args:
        folder: where relative paths of recordings start.
    """
    place = str(file)
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{file}: line {number}"
                    cut = json.loads(line)
                    place += f" (cut {cut.get('id')!r})"
                    yield _row(cut, folder)
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        if isinstance(error, LookupError | TypeError | AttributeError):
            reason = f"it is not as Lhotse writes one: {type(error).__name__}: {error}"
        raise DataError(
            f"{place} cannot be read: {reason}. raydfl reads cuts of one channel (MonoCut) of recordings in files, without "
            f"transforms; CutSet.save_audios writes such recordings"
        ) from error


def _row(cut: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the row of a cut.

    Raises:
        ValueError: it is a cut that Lhotse would compute or fetch.
    """
    kind, recording, channel = cut.get("type", "MonoCut"), cut.get("recording"), cut.get("channel", 0)
    if kind not in ("MonoCut", "Cut") or not isinstance(channel, int):
        raise ValueError(f"it is a {kind} of the channels {channel}")
    if not recording:
        raise ValueError("it has no recording, only features or nothing")
    if recording.get("transforms"):
        raise ValueError(f"its recording has the transforms {json.dumps(recording['transforms'])}")
    rate, length = int(recording["sampling_rate"]), int(recording["num_samples"])
    first, count = _samples(cut["start"], rate), _samples(cut["duration"], rate)
    if first < 0 or count < 1 or rate < 1:
        raise ValueError(f"it begins at sample {first}, and has {count} samples at {rate} Hz")
    sources = [source for source in recording["sources"] if channel in source["channels"]]
    if not sources or sources[0]["type"] != "file":
        raise ValueError(
            f"its recording has no file with channel {channel}, but {json.dumps(recording['sources'])[:200]}"
        )
    channels = sources[0]["channels"]
    whole = first == 0 and count >= length
    return {
        **_said(cut),
        "clip": str(cut["id"]),
        "path": os.path.normpath(folder / Path(str(sources[0]["source"])).expanduser()),
        "seconds": count / rate,
        "start": None if whole else first / rate,
        "stop": None if whole else (first + count) / rate,
        "channel": None if len(channels) == 1 else channels.index(channel),
        "recording": str(recording["id"]),
    }


def _said(cut: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a cut's own fields, and of its supervisions where these agree."""
    found: dict[str, Any] = {key: value for key, value in (cut.get("custom") or {}).items() if is_plain(value)}
    each = [
        {name: said[name] for name in _SAID if said.get(name) is not None} | dict(said.get("custom") or {})
        for said in cut.get("supervisions") or ()
    ]
    for name in dict.fromkeys(itertools.chain.from_iterable(each)):
        values = [said[name] for said in each if name in said]
        if is_plain(values[0]):
            found[name] = values[0] if all(value == values[0] for value in values) else _SEVERAL
    return found


def _samples(seconds: float, rate: int) -> int:
    """Return how many samples that are, halves rounded up as Lhotse does it."""
    return math.floor(round(seconds * rate, 8) + 0.5)
