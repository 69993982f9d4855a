"""Shards of the library ``webdataset``, read without it: tar archives in which the files of one sample stand one after another.

A file belongs to the sample that its path names up to the first dot of the file's name: ``dog/0001.wav``, ``dog/0001.cls`` and
``dog/0001.left.wav`` are of the sample ``dog/0001``. What follows that dot is the field. Recordings stay in the archive: a clip's
path is an address in it (:mod:`raydfl.data.packed`). The library itself reads archives as streams, without the places of files.
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
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card
from raydfl.data.images import IMAGE_SUFFIXES
from raydfl.data.manifest import FFMPEG_SUFFIXES
from raydfl.data.packed import list_tar, own_name
from raydfl.data.sets._packed import PackedSet, is_plain, named, table_of, with_texts

_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_TEXTS = ("txt", "text", "transcript", "cls", "cls2", "class", "count", "index", "inx", "id")
"""Fields of text, as the library has them."""
_JSON = ("json", "jsn")
_SOUNDS = (*AUDIO_SUFFIXES, *FFMPEG_SUFFIXES)
_MEDIA = (*_SOUNDS, *IMAGE_SUFFIXES)


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
        rows = [self._clip(root / file, file, name, sample) for name, sample in _samples(root / file)]
        if not rows:
            raise DataError(f"{root / file} has no samples; expected {self.card.layout}")
        return table_of(rows)

    def name_columns(self, table: pa.Table, where: str) -> pa.Table:
        """See :class:`PackedSet`."""
        label = self.label_column or ("cls" if "cls" in table.column_names else "label")
        group = self.group_column or ("group" if "group" in table.column_names else None)
        table = named(table, label, group, where)
        if self.names is None:
            return table
        names = {None: None} | {str(number): name for number, name in enumerate(self.names)}
        labels = table.column("label").to_pylist()
        for row, label in enumerate(labels):
            if label not in names:
                raise DataError(
                    f"{where}: {table.column('clip')[row]} has the class {label!r}, and data.names has {len(self.names)} names: "
                    f"give one for each number"
                )
        return with_texts(table, "label", [names[label] for label in labels])

    def _clip(self, path: Path, file: str, name: str, sample: Mapping[str, str | bytes]) -> dict[str, Any]:
        """Return the row of a sample: where its files are, and the values in its texts."""
        media = {field: address for field, address in sample.items() if isinstance(address, str)}
        found = [field for field in media if f".{field}".endswith(_SOUNDS)] or list(media)
        if self.audio_field is not None:
            found = [field for field in media if field == self.audio_field.lower()]
        if len(found) != 1:
            problem = (
                f"has several recordings: {', '.join(found)}" if found else f"has no {self.audio_field or 'recording'}"
            )
            raise DataError(
                f"{path}: the sample {name} {problem}; choose a field with data.audio_field, there are {', '.join(sample)}"
            )
        row: dict[str, Any] = {"clip": f"{file}/{own_name(media[found[0]])}", "path": media[found[0]]}
        row |= {field: address for field, address in media.items() if field != found[0]}
        for field, content in sample.items():
            if isinstance(content, bytes):
                values = _parse(field, content, f"{path}: {name}.{field}")
                row |= {key: value for key, value in values.items() if key not in media}
        return row


def _samples(path: Path) -> Iterator[tuple[str, dict[str, str | bytes]]]:
    """Yield the samples of a shard: by field the address of a recording or image, or the content of a text."""
    found = (
        (*_split(name), address, read) for name, address, read in list_tar(path, lambda name: _split(name)[1] != "")
    )
    for name, group in itertools.groupby(found, lambda each: each[0]):
        sample: dict[str, str | bytes] = {}
        for _, field, address, read in group:
            if field in sample:
                raise DataError(f"{path}: the sample {name} has two files {name}.{field}; names must differ")
            sample[field] = address if f".{field}".endswith(_MEDIA) else read()
        yield name, sample


def _split(name: str) -> tuple[str, str]:
    """Return the sample and the field of a file; an empty field: the file means nothing."""
    found = _NAME.fullmatch(name)
    if found is None or found[1].rpartition("/")[2].startswith("__"):
        return name, ""
    field = found[2].lower()
    return found[1], field if f".{field}".endswith(_MEDIA) or field in (*_TEXTS, *_JSON) else ""


def _parse(field: str, content: bytes, where: str) -> dict[str, Any]:
    """Return the value of a text, or those values of a JSON object that can be in a column."""
    try:
        text = content.decode("utf-8-sig")
        if field not in _JSON:
            return {field: text.strip()}
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} cannot be read as {'JSON' if field in _JSON else 'UTF-8 text'}: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{where} is no JSON object, but {type(values).__name__}")
    return {key: value for key, value in values.items() if key not in ("clip", "path") and is_plain(value)}
