"""Cuts of the toolkit Lhotse, read without it: JSON lines, each a segment of a recording with its annotations (``CutSet.to_file``).

The lists may be compressed with gzip. The samples equal Lhotse's: ``start`` and ``duration`` are rounded to samples, halves up.
Classes and owners come from the supervision of a cut or its ``custom``. Several supervisions of a cut must agree on both.
Supported are ``MonoCut`` cuts of recordings in files. Cuts that Lhotse would compute or fetch raise an error: mixed cuts and
padding, several channels, features without a recording, transforms (speed, resampling), and sources of the types command, URL
or bytes.
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
from raydfl.core.files import check_regular
from raydfl.core.isolation import reading
from raydfl.data.audio import read_audio
from raydfl.data.dataset import Card
from raydfl.data.sets._files import resolve_path
from raydfl.data.sets._packed import PackedSet, is_plain, make_table, name_label_and_group

_FIELDS = ("text", "speaker", "language", "gender")
"""Fields of a supervision that become columns, in addition to its ``custom`` fields."""
_SEVERAL = "\0several"
"""Placeholder for different values in the supervisions of a cut."""


@dataclass(frozen=True, kw_only=True)
class Lhotse(PackedSet):
    """Cuts of recordings. A clip's id is the cut's.

    Extra columns: ``start`` and ``stop`` (float64, seconds; null: the whole file), ``channel`` (its position in the file; null:
    all), ``recording`` (its id), ``text``, ``language``, ``gender``, and the text, numbers and booleans of ``custom``.
    """

    card: ClassVar[Card] = Card(
        title="Lhotse cuts", layout="*cuts*.jsonl or *cuts*.jsonl.gz: a cut on each line, with its recording in a file"
    )

    files: Annotated[
        str, Field(description="Pattern for the lists of cuts below the root, such as cuts_{train,dev}.jsonl.gz.")
    ] = "**/*cuts*.jsonl*"
    recordings: Annotated[
        Path | None, Field(description="Base folder for relative paths of recordings. null: the root.")
    ] = None
    label_column: Annotated[
        str,
        Field(
            description="Field with the class: text, speaker, language, gender, or a custom field of the supervision or cut."
        ),
    ] = "label"
    group_column: Annotated[
        str | None, Field(description="Field with the owner of a clip, as for the label. null: speaker, if present.")
    ] = None

    def clips(self, root: Path, file: str) -> pa.Table:
        """Read the clips of a list of cuts."""
        folder = root if self.recordings is None else resolve_path(self.recordings)
        rows = list(_read_cuts(root / file, folder))
        if not rows:
            raise DataError(f"{root / file}: the list has no cuts. Set data.files to the lists of cuts")
        return make_table(rows)

    def name_columns(self, table: pa.Table, where: str) -> pa.Table:
        """Name the columns of classes and owners, whose values must be unique for each cut."""
        group = self.group_column or ("speaker" if "speaker" in table.column_names else None)
        for field in (self.label_column, group):
            values = table.column(field).to_pylist() if field in table.column_names else []
            if _SEVERAL in values:
                raise DataError(
                    f"{where}: the cut {table.column('clip')[values.index(_SEVERAL)]} has supervisions with different values of "
                    f"{field!r}. Make a cut of each supervision (CutSet.trim_to_supervisions)"
                )
        return name_label_and_group(table, self.label_column, group, where)

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the segment and channel of the file."""
        return read_audio(row["path"], row["start"] or 0.0, row["stop"], row["channel"])

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return ``@start-stop#channel``, or ``None`` for a whole file."""
        if row["start"] is None and row["stop"] is None and row["channel"] is None:
            return None
        return f"@{row['start'] or 0.0!r}-{row['stop']!r}#{row['channel']}"


_REMEDY = (
    "raydfl reads single-channel cuts (MonoCut) of recordings in files, without transforms. Convert the recordings with "
    "CutSet.save_audios"
)


def _read_cuts(file: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a list of cuts.

    Args:
        file: the list, optionally compressed with gzip.
        folder: base of relative paths of recordings.
    """
    with reading(file):
        check_regular(file.stat())
    with reading(file), (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}: line {number}"
                with reading(where, remedy=_REMEDY):
                    cut = json.loads(line)
                    where += f" (cut {cut.get('id')!r})"
                with reading(where, remedy=_REMEDY):
                    row = _make_row(cut, folder)
                yield row


def _make_row(cut: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make the row of a cut.

    Raises:
        ValueError: Lhotse would compute or fetch the cut.
    """
    kind, recording, channel = cut.get("type", "MonoCut"), cut.get("recording"), cut.get("channel", 0)
    if kind not in ("MonoCut", "Cut") or not isinstance(channel, int):
        raise ValueError(f"it is a {kind} of the channels {channel}")
    if not recording:
        raise ValueError("it has no recording, at most features")
    if recording.get("transforms"):
        raise ValueError(f"its recording has the transforms {json.dumps(recording['transforms'])}")
    rate, length = int(recording["sampling_rate"]), int(recording["num_samples"])
    first, count = _count_samples(cut["start"], rate), _count_samples(cut["duration"], rate)
    if first < 0 or count < 1 or rate < 1:
        raise ValueError(f"it starts at sample {first}, and has {count} samples at {rate} Hz")
    sources = [source for source in recording["sources"] if channel in source["channels"]]
    if not sources or sources[0]["type"] != "file":
        raise ValueError(
            f"its recording has no file with channel {channel}, but {json.dumps(recording['sources'])[:200]}"
        )
    channels = sources[0]["channels"]
    whole = first == 0 and count >= length
    return {
        **_collect_fields(cut),
        "clip": str(cut["id"]),
        "path": os.path.normpath(folder / Path(str(sources[0]["source"])).expanduser()),
        "seconds": count / rate,
        "start": None if whole else first / rate,
        "stop": None if whole else (first + count) / rate,
        "channel": None if len(channels) == 1 else channels.index(channel),
        "recording": str(recording["id"]),
    }


def _collect_fields(cut: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the custom fields of a cut, and the fields of its supervisions (:data:`_SEVERAL` for different values)."""
    fields: dict[str, Any] = {key: value for key, value in (cut.get("custom") or {}).items() if is_plain(value)}
    supervisions = [
        {name: item[name] for name in _FIELDS if item.get(name) is not None} | dict(item.get("custom") or {})
        for item in cut.get("supervisions") or ()
    ]
    for name in dict.fromkeys(itertools.chain.from_iterable(supervisions)):
        values = [item[name] for item in supervisions if name in item]
        if is_plain(values[0]):
            fields[name] = values[0] if all(value == values[0] for value in values) else _SEVERAL
    return fields


def _count_samples(seconds: float, rate: int) -> int:
    return math.floor(round(seconds * rate, 8) + 0.5)  # halves up, as in Lhotse
