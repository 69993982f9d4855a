"""Shards of the library ``webdataset``, read without it: tar archives with the files of each sample in sequence.

The sample of a file is its path up to the first dot of the file's name, and the field is the rest: ``dog/0001.wav``,
``dog/0001.cls`` and ``dog/0001.left.wav`` are the fields ``wav``, ``cls`` and ``left.wav`` of the sample ``dog/0001``.
Recordings stay in the archive: a clip's path is an address in it (docs/data.md#recordings-in-larger-files). The library itself
reads archives as streams, without the addresses of files. Fields:

    wav, flac, mp3, opus, ogg ...   the recording; a sample with several needs audio_field
    cls                             the class, as text or as a number; names maps numbers to names
    json                            an object; text, numbers, booleans and lists of these (joined by |)
                                    are columns
    txt, further text               a column with the field's name
    further recordings, images      a column with the field's name, for data.views

A sample without a class is unlabelled. Samples are in the order of the shards. Compressed archives are rejected, because
reading a sample would require decompressing everything before it. A label or a recording must not be a link either: pack with
``tar --dereference --hard-dereference``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.core.isolation import reading
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card
from raydfl.data.images import IMAGE_SUFFIXES
from raydfl.data.manifest import FFMPEG_SUFFIXES
from raydfl.data.packed import list_tar, recording_name
from raydfl.data.sets._packed import PackedSet, is_plain, make_table, name_label_and_group, set_texts

_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_TEXTS = ("txt", "text", "transcript", "cls", "cls2", "class", "count", "index", "inx", "id")
"""The library's fields of text."""
_JSON = ("json", "jsn")
_SOUNDS = (*AUDIO_SUFFIXES, *FFMPEG_SUFFIXES)
_MEDIA = (*_SOUNDS, *IMAGE_SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class WebDataset(PackedSet):
    """Shards of recordings.

    A clip's id is the shard's path below the root and the recording's name in the shard: ``train-000000.tar/dog/0001.wav``.
    """

    card: ClassVar[Card] = Card(
        title="WebDataset shards",
        layout="*.tar with the files of each sample in sequence: NAME.wav (or .flac, .mp3, .opus ...), and NAME.cls, NAME.json or "
        "NAME.txt",
    )

    files: Annotated[
        str, Field(description="Pattern for the shards below the root, such as train-{000000..000099}.tar.")
    ] = "**/*.tar"
    audio_field: Annotated[
        str | None,
        Field(
            description="Field with the recording (or image), such as wav or left.wav. null: the only field of a known type."
        ),
    ] = None
    label_column: Annotated[
        str | None,
        Field(description="Text field, or key in the json field, with the clip's class. null: cls, else label."),
    ] = None
    group_column: Annotated[
        str | None,
        Field(description="Text field, or key in the json field, with the clip's owner. null: group, if present."),
    ] = None
    names: Annotated[
        tuple[str, ...] | None,
        Field(description="Names of the classes, in the order of their numbers in cls. null: use the content of cls."),
    ] = None

    def clips(self, root: Path, file: str) -> pa.Table:
        """Read the clips of a shard."""
        rows = [self._make_row(root / file, file, name, sample) for name, sample in _read_samples(root / file)]
        if not rows:
            raise DataError(f"{root / file} has no samples. Expected {self.card.layout}")
        return make_table(rows)

    def name_columns(self, table: pa.Table, where: str) -> pa.Table:
        """Name the columns of classes and owners, and replace numbers by the option ``names``."""
        label = self.label_column or ("cls" if "cls" in table.column_names else "label")
        group = self.group_column or ("group" if "group" in table.column_names else None)
        table = name_label_and_group(table, label, group, where)
        if self.names is None:
            return table
        names = {None: None} | {str(number): name for number, name in enumerate(self.names)}
        labels = table.column("label").to_pylist()
        for row, label in enumerate(labels):
            if label not in names:
                raise DataError(
                    f"{where}: {table.column('clip')[row]} has the class {label!r}, but data.names has {len(self.names)} names. "
                    f"Give a name for each number"
                )
        return set_texts(table, "label", [names[label] for label in labels])

    def _make_row(self, path: Path, file: str, name: str, sample: Mapping[str, str | bytes]) -> dict[str, Any]:
        """Make the row of a sample: the addresses of its recordings and images, and the values in its texts."""
        media = {field: address for field, address in sample.items() if isinstance(address, str)}
        fields = [field for field in media if f".{field}".endswith(_SOUNDS)] or list(media)
        if self.audio_field is not None:
            fields = [field for field in media if field == self.audio_field.lower()]
        if len(fields) != 1:
            problem = f"has no {self.audio_field or 'recording'}"
            if fields:
                problem = f"has several recordings: {', '.join(fields)}"
            raise DataError(
                f"{path}: the sample {name} {problem}. Set data.audio_field to one of its fields: {', '.join(sample)}"
            )
        row: dict[str, Any] = {"clip": f"{file}/{recording_name(media[fields[0]])}", "path": media[fields[0]]}
        row |= {field: address for field, address in media.items() if field != fields[0]}
        for field, content in sample.items():
            if isinstance(content, bytes):
                values = _parse_text(field, content, f"{path}: {name}.{field}")
                row |= {key: value for key, value in values.items() if key not in media}
        return row


def _read_samples(path: Path) -> Iterator[tuple[str, dict[str, str | bytes]]]:
    """Yield the samples of a shard: by field, the address of a recording or image, or the content of a text."""
    members = (
        (*_split_name(name), address, read)
        for name, address, read in list_tar(path, lambda name: _split_name(name)[1] != "")
    )
    # The files of a sample are in sequence, so memory holds the texts of a single sample.
    for name, group in itertools.groupby(members, lambda member: member[0]):
        sample: dict[str, str | bytes] = {}
        for _, field, address, read in group:
            if field in sample:
                raise DataError(f"{path}: the sample {name} has two files {name}.{field}. Give them different names")
            sample[field] = address if f".{field}".endswith(_MEDIA) else read()
        yield name, sample


def _split_name(name: str) -> tuple[str, str]:
    """Split the name of a file into its sample and field. Files to ignore have an empty field."""
    match = _NAME.fullmatch(name)
    if match is None or match[1].rpartition("/")[2].startswith("__"):  # the library's own metadata
        return name, ""
    field = match[2].lower()
    return match[1], field if f".{field}".endswith(_MEDIA) or field in (*_TEXTS, *_JSON) else ""


def _parse_text(field: str, content: bytes, where: str) -> dict[str, Any]:
    """Parse the value of a text, or the plain values of a JSON object, by column."""
    with reading(where, f"cannot be read as {'JSON' if field in _JSON else 'UTF-8 text'}"):
        text = content.decode("utf-8-sig")
        if field not in _JSON:
            return {field: text.strip()}
        values = json.loads(text)
    if not isinstance(values, dict):
        raise DataError(f"{where} must be a JSON object, not {type(values).__name__}")
    return {key: value for key, value in values.items() if key not in ("clip", "path") and is_plain(value)}
