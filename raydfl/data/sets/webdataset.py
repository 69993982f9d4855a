"""Shards of the library ``webdataset``, read without it: tar archives in which the files of one sample stand one after another.

A file belongs to the sample that its path names up to the first dot of the file's name: ``dog/0001.wav``, ``dog/0001.cls`` and
``dog/0001.left.wav`` are of the sample ``dog/0001``. What follows that dot is the field. Recordings stay in the archive: a clip's
path is an address in it (:mod:`raydfl.data.packed`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card
from raydfl.data.manifest import FFMPEG_SUFFIXES
from raydfl.data.packed import own_name
from raydfl.data.pictures import PICTURE_SUFFIXES
from raydfl.data.sets._shards import PackedSet, is_plain, named, table_of, with_column
from raydfl.data.sets._tar import members

_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_TEXTS = ("txt", "text", "transcript", "cls", "cls2", "class", "count", "index", "inx", "id")
"""Fields of text, as the library has them."""
_JSON = ("json", "jsn")
_SOUNDS = (*AUDIO_SUFFIXES, *FFMPEG_SUFFIXES)
_MEDIA = (*_SOUNDS, *PICTURE_SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class WebDataset(PackedSet):
    """Shards of recordings.

    Extra columns: the other fields of text, the values of the field json (text, numbers, truth values), and where each further
    recording or image lies, for ``data.views``. A clip's id is the shard's path below the root and the recording's name in it,
    ``train-000000.tar/dog/0001.wav``.
    """

    card: ClassVar[Card] = Card(
        title="WebDataset shards",
        layout="*.tar, in which the files of a sample stand one after another: NAME.wav (or .flac, .mp3, .opus ...), and NAME.cls, "
        "NAME.json or NAME.txt",
    )

    files: Annotated[
        str, Field(description="which files below the root are shards, such as train-{000000..000099}.tar")
    ] = "**/*.tar"
    audio_field: Annotated[
        str | None,
        Field(
            description="field with the recording (or image), such as wav or left.wav; null: the only one of a known kind"
        ),
    ] = None
    label_column: Annotated[
        str | None, Field(description="field of text, or key of the field json, with the class; null: cls, else label")
    ] = None
    group_column: Annotated[
        str | None,
        Field(
            description="field of text, or key of the field json, that says whose clip it is; null: group if there is one"
        ),
    ] = None
    names: Annotated[
        tuple[str, ...] | None,
        Field(description="names of the classes, in the order of their numbers in cls; null: what stands there"),
    ] = None

    def clips(self, root: Path, file: str) -> pa.Table:
        """See :class:`PackedSet`."""
        rows = [self._clip(root / file, file, name, parts) for name, parts in _samples(root / file)]
        if not rows:
            raise DataError(f"{root / file} has no samples; expected {self.card.layout}")
        return table_of(rows)

    def name_columns(self, table: pa.Table, where: str) -> pa.Table:
        """See :class:`PackedSet`."""
        label = self.label_column or ("cls" if "cls" in table.column_names else "label")
        group = self.group_column or ("group" if "group" in table.column_names else None)
        table = named(table, label, group, where)
        return table if self.names is None else with_column(table, "label", self._labels(table, self.names, where))

    def _clip(self, path: Path, file: str, name: str, sample: Mapping[str, str | bytes]) -> dict[str, Any]:
        """Return what is known of a sample: where its files lie, and what its texts say."""
        media = {field: value for field, value in sample.items() if isinstance(value, str)}
        chosen = self._recording(media, sample, name, path)
        row: dict[str, Any] = {"clip": f"{file}/{own_name(media[chosen])}", "path": media[chosen]}
        row |= {field: address for field, address in media.items() if field != chosen}
        for field, content in sample.items():
            if isinstance(content, bytes):
                said = _said(field, content, f"{path}: {name}.{field}")
                row |= {key: value for key, value in said.items() if key not in media}
        return row

    def _recording(self, media: Mapping[str, str], sample: Mapping[str, str | bytes], name: str, path: Path) -> str:
        """Return the field that holds the recording."""
        if self.audio_field is not None:
            found = [field for field in media if field == self.audio_field.lower()]
        else:
            found = [field for field in media if f".{field}".endswith(_SOUNDS)] or list(media)
        if len(found) == 1:
            return found[0]
        wanted = "recording" if self.audio_field is None else f"file {name}.{self.audio_field}"
        there = ", ".join(sample)
        if not found:
            raise DataError(
                f"{path}: the sample {name} has no {wanted}; its fields: {there}. data.audio_field names that of recordings"
            )
        raise DataError(
            f"{path}: the sample {name} has several recordings: {', '.join(found)}; choose one with data.audio_field"
        )

    def _labels(self, table: pa.Table, names: Sequence[str], where: str) -> list[str | None]:
        """Return the names of the classes whose numbers are the labels."""
        found = table.column("label").to_pylist()
        for row, label in enumerate(found):
            if label is not None and not (label.isdecimal() and int(label) < len(names)):
                raise DataError(
                    f"{where}: {table.column('clip')[row]} has the class {label!r}, and data.names has {len(names)} names: give "
                    f"one for each number"
                )
        return [None if label is None else names[int(label)] for label in found]


def _samples(path: Path) -> Iterator[tuple[str, dict[str, str | bytes]]]:
    """Yield the samples of a shard: by field the address of a recording or image, or the content of what is a text."""
    for name, group in itertools.groupby(_fields(path), lambda each: each[0]):
        sample: dict[str, str | bytes] = {}
        for _, field, value in group:
            if field in sample:
                raise DataError(f"{path}: the sample {name} has two files {name}.{field}; names must differ")
            sample[field] = value
        yield name, sample


def _fields(path: Path) -> Iterator[tuple[str, str, str | bytes]]:
    """Yield the files of a shard that mean something: sample, field, and address or content."""
    for member in members(path):
        found = _NAME.fullmatch(member.name)
        if found is None or found[1].rpartition("/")[2].startswith("__"):
            continue
        field = found[2].lower()
        if f".{field}".endswith(_MEDIA):
            yield found[1], field, member.address
        elif field in (*_TEXTS, *_JSON):
            yield found[1], field, member.content()


def _said(field: str, content: bytes, where: str) -> dict[str, Any]:
    """Return what a text says: one value, or those of a JSON object that are text, numbers, truth values, or lists of them."""
    try:
        text = content.decode("utf-8-sig")
        if field not in _JSON:
            return {field: text.strip()}
        values = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} cannot be read as {'JSON' if field in _JSON else 'UTF-8 text'}: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{where} is no JSON object, but {type(values).__name__}")
    return {key: value for key, value in values.items() if key not in ("clip", "path") and is_plain(value)}
