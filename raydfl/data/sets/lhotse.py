"""Cuts of the toolkit Lhotse, read without it: JSON lines, each a part of a recording with what is said of it (``CutSet.to_file``).

Read is a ``MonoCut`` of a recording in a file. Its samples are those that Lhotse reads: from ``start``, rounded to a sample (halves
up), as many as ``duration`` rounds to. Refused by name is what Lhotse would compute or fetch: mixed cuts and padding, cuts of
several channels, features without a recording, transforms (speed, resampling), and sources that are a command, a URL or bytes.
"""

from __future__ import annotations

import gzip
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
from raydfl.data.sets._shards import PackedSet, is_plain, named, table_of

_SAID = ("text", "speaker", "language", "gender")
"""Fields of a supervision that become columns, besides those of its own (``custom``)."""


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
        str | None, Field(description="what says whose clip it is, likewise; null: speaker if there is one")
    ] = None

    def clips(self, root: Path, file: str) -> pa.Table:
        """See :class:`PackedSet`."""
        folder = root if self.recordings is None else absolute(self.recordings)
        rows = [_Cut(cut, place).row(folder) for cut, place in _cuts(root / file)]
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
        samples, rate = read_audio(row["path"], row["start"] or 0.0, row["stop"])
        channel = row["channel"]
        if channel is None:
            return samples, rate
        if channel >= samples.shape[1]:
            raise DataError(
                f"{row['path']}: the cut {row['clip']} is of its channel {channel}, counted from 0, and it has {samples.shape[1]}"
            )
        return samples[:, channel : channel + 1], rate

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return ``@start-stop#channel``, if it is not all of the file."""
        if row["start"] is None and row["stop"] is None and row["channel"] is None:
            return None
        return f"@{row['start'] or 0.0!r}-{row['stop']!r}#{row['channel']}"


def _cuts(file: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the objects of a file of JSON lines, and how messages call them."""
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    found = json.loads(line)
                    place = f"{file}: line {number}"
                    if not isinstance(found, Mapping):
                        raise DataError(f"{place} is no cut but {type(found).__name__}")
                    yield found, place
    except (OSError, EOFError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"{file}: it is damaged, truncated, or no list of cuts: {reason}") from error


_SEVERAL = "\0several"
"""In place of a value that the supervisions of a cut do not agree on."""


class _Cut:
    """A cut as Lhotse writes it."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._name = f"{where} (cut {values.get('id')!r})"
        kind = values.get("type", "Cut")
        if kind not in ("MonoCut", "Cut") or "id" not in values or "start" not in values:
            what = (
                kind if kind != "Cut" or "start" in values else "something else, such as a recording or a supervision"
            )
            raise DataError(f"{self._name} is {what}; raydfl reads cuts of one recording and one channel (MonoCut)")
        if not values.get("recording"):
            raise DataError(f"{self._name} has no recording, only features or nothing; raydfl reads recordings")

    def row(self, folder: Path) -> dict[str, Any]:
        """Return the cut's row.

        Args:
            folder: where relative paths start.
        """
        recording = self._values["recording"]
        try:
            if recording.get("transforms"):
                raise DataError(
                    f"{self._name}: its recording is to be transformed first, by {json.dumps(recording['transforms'])}; save the "
                    f"changed recordings (CutSet.save_audios) and list those"
                )
            rate, length = int(recording["sampling_rate"]), int(recording["num_samples"])
            first, count = _samples(self._values["start"], rate), _samples(self._values["duration"], rate)
            if first < 0 or count < 1 or rate < 1:
                raise ValueError(f"it begins at sample {first}, and has {count}")
            path, channel = self._source(recording, self._values.get("channel", 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self._name} is not as Lhotse writes one: {type(error).__name__}: {error}") from error
        whole = first == 0 and count >= length
        part = {"start": None, "stop": None} if whole else {"start": first / rate, "stop": (first + count) / rate}
        given: dict[str, Any] = {
            "clip": str(self._values["id"]),
            "path": os.path.normpath(folder / Path(path).expanduser()),
        }
        given |= {"seconds": count / rate, **part, "channel": channel, "recording": str(recording["id"])}
        return {**self._said(), **given}

    def _source(self, recording: Mapping[str, Any], channel: Any) -> tuple[str, int | None]:
        """Return the path of the file with a channel of the recording, and the channel's place in it; ``None``: it has no other."""
        if not isinstance(channel, int):
            raise DataError(f"{self._name} is of the channels {channel}; raydfl reads cuts of one channel")
        for source in recording["sources"]:
            if channel in source["channels"]:
                if source["type"] != "file":
                    raise DataError(
                        f"{self._name}: its recording comes from a source of the type {source['type']!r}, which raydfl does not "
                        f"read; save the recordings as files (CutSet.save_audios)"
                    )
                place = source["channels"].index(channel)
                return str(source["source"]), None if len(source["channels"]) == 1 else place
        raise DataError(f"{self._name} is of channel {channel}, and its recording has no such channel")

    def _said(self) -> dict[str, Any]:
        """Return what the supervisions say, where they agree, and the cut's own fields."""
        own = self._values.get("custom") or {}
        found: dict[str, Any] = {key: value for key, value in own.items() if is_plain(value)}
        each = [
            {name: said[name] for name in _SAID if said.get(name) is not None} | dict(said.get("custom") or {})
            for said in self._values.get("supervisions") or ()
        ]
        for name in dict.fromkeys(key for said in each for key in said):
            values = [said[name] for said in each if name in said]
            if is_plain(values[0]):
                found[name] = values[0] if all(value == values[0] for value in values) else _SEVERAL
        return found


def _samples(seconds: float, rate: int) -> int:
    """Return how many samples that are, halves rounded up as Lhotse does it."""
    return math.floor(round(seconds * rate, 8) + 0.5)
