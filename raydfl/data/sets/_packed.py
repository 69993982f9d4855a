"""Data sets in a few large files: their base class, finding the files, and the split of each."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError, nearest
from raydfl.data.dataset import Card, Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.sets._files import SPLIT_OF, absolute, check_name, find_root, known_splits, list_files, wrong_layout

_MARKS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_MOST = 100_000
"""Files that one pattern may stand for."""


@dataclass(frozen=True, kw_only=True)
class PackedSet(Dataset):
    """Base of sets whose recordings are stored in a few large files, or listed in them."""

    root: Annotated[Path, Field(description="folder that holds the files, or one file")]
    files: Annotated[str | None, Field(description="which files below the root")] = None
    splits: Annotated[
        Mapping[str, Literal["train", "validation", "test"]] | None,
        Field(
            description="what the set's splits are used as, such as {train.clean.100: train, test.other: test}, others are left "
            "out; null: as their names say"
        ),
    ] = None

    def manifest(self) -> pa.Table:
        """List the clips, file by file."""
        return self.read_files(*find_files(self.root, self.files or "", self.card))

    def read_files(self, root: Path, files: Sequence[str]) -> pa.Table:
        """Return the manifest of some files below the root."""
        splits = find_splits(files, self.splits, f"{self.card.title} in {root}")
        return self.join([with_split(self.clips(root, file), [split]) for file, split in splits.items()], root)

    def clips(self, root: Path, file: str) -> pa.Table:
        """Return the clips of one file, with columns of their own names."""
        raise NotImplementedError(f"{type(self).__name__} must read a file in clips()")

    def name_columns(self, table: pa.Table, where: str) -> pa.Table:
        """Return the clips with columns ``label`` and, if it is known, ``group``."""
        return table

    def join(self, tables: Sequence[pa.Table], root: Path) -> pa.Table:
        """Return the manifest of the clips of several files; a column that a file does not have is null there.

        Raises:
            DataError: the files disagree about what a column holds, there are no clips, or a split's name is unknown.
        """
        where = f"{self.card.title} in {root}"
        try:
            table = self.name_columns(pa.concat_tables(tables, promote_options="permissive"), where)
        except (pa.ArrowException, TypeError) as error:
            raise DataError(f"{where}: its files disagree about what a column holds: {error}") from error
        if "split" in table.column_names:
            splits = known_splits(table["split"].to_pylist(), lambda row: f"{where}: {table['clip'][row]}")
            table = with_texts(table, "split", splits)
        return make_manifest(table, where)


def with_texts(table: pa.Table, name: str, values: Sequence[str | None]) -> pa.Table:
    """Return a table with a column of text, which replaces one of the same name."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return pa.table(columns | {name: pa.array(values, pa.string())})


def with_split(table: pa.Table, splits: Sequence[str | None]) -> pa.Table:
    """Return clips with their splits, or with the split of all; clips of no split keep a column of their own."""
    if len(splits) == 1:
        splits = [*splits] * table.num_rows
    return with_texts(table, "split", splits) if any(splits) else table


def find_files(root: Path, pattern: str, card: Card) -> tuple[Path, list[str]]:
    """Find the files of a set whose paths below its root match a pattern.

    Args:
        root: a folder; or one file, which is then all that is found.
        pattern: with ``*`` (not across folders), ``**/`` (any folders), ``?``, ``{a,b}`` and ``{000..099}``. Of each alternative in
            braces there must be files.

    Returns:
        The folder as an absolute path, and sorted POSIX paths relative to it. Hidden files are left out, links to folders followed.

    Raises:
        DataError: there is no such folder, or no such file in it.
    """
    place = absolute(root)
    if place.is_file():
        return place.parent, [place.name]
    folder = find_root(root, card)
    names, found = list_files(folder), set()
    for each in _without_braces(pattern):
        wanted = _expression(each)
        matching = [name for name in names if wanted.fullmatch(name)]
        if not matching:
            raise wrong_layout(folder, card, f"there is no file {each} (data.files)")
        found.update(matching)
    for name in found:
        check_name(name, folder)
    return folder, sorted(found)


def _without_braces(pattern: str) -> list[str]:
    """Return the patterns that one with braces stands for.

    >>> _without_braces("{train,test}-{08..10}.tar")[:4]
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'test-08.tar']
    """
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[piece] if number % 2 == 0 else list(_alternatives(piece)) for number, piece in enumerate(pieces)]
    found = ["".join(parts) for parts in itertools.islice(itertools.product(*choices), _MOST + 1)]
    if len(found) > _MOST:
        raise DataError(f"data.files: {pattern} stands for more than {_MOST} files; use * in it")
    return found


def _alternatives(braces: str) -> Iterator[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", braces)
    if span is None:
        yield from braces.split(",")
        return
    width = len(span[1])
    for number in range(int(span[1]), min(int(span[2]), int(span[1]) + _MOST) + 1):
        yield f"{number:0{width}d}"


def _expression(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(_MARKS[part] if part in _MARKS else re.escape(part) for part in parts), re.DOTALL)


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows of plain values as a table, a column for each key: of values of different kinds one of text."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    if not any(isinstance(value, list) for value in values):
        with contextlib.suppress(pa.ArrowException, TypeError, OverflowError):
            return pa.array(values)
    return pa.array([as_text(value) for value in values], pa.string())


def is_plain(value: Any) -> bool:
    """Return whether a value of JSON can stand in a column: text, a number, a truth value, nothing, or a list of these."""
    if isinstance(value, list):
        return all(isinstance(each, str | int | float) for each in value)
    return value is None or isinstance(value, str | int | float)


def as_text(value: Any) -> str | None:
    """Return a plain value as text, several values joined by ``|``.

    >>> as_text(["dog", 3])
    'dog|3'
    """
    if isinstance(value, list):
        return "|".join(as_text(each) or "" for each in value) or "|"
    return value if value is None or isinstance(value, str) else json.dumps(value)


def named(table: pa.Table, label: str, group: str | None, where: str) -> pa.Table:
    """Give a table's columns of classes and of owners the names ``label`` and ``group``, as text; others of these names go.

    Args:
        group: ``None``: nobody owns the clips.

    Raises:
        DataError: there is no such column.
    """
    columns = {name: table.column(name) for name in table.column_names if name not in (label, group, "label", "group")}
    for name, field in (("label", label), ("group", group)):
        if field is not None:
            if field not in table.column_names:
                known = [each for each in table.column_names if each not in ("clip", "path", "split")]
                raise DataError(f"{where}: no clip has a field {field!r} (data.{name}_column); {nearest(field, known)}")
            columns[name] = pa.array([as_text(value) for value in table.column(field).to_pylist()], pa.string())
    return pa.table(columns)


def find_splits(sources: Iterable[str], given: Mapping[str, str] | None, where: str) -> dict[str, str | None]:
    """Return the split of each file or folder that belongs to the set, ``None`` for all if there are fewer than two splits.

    A split's name is that of the file without its number and ending (``train.clean.100-00000-of-00014.parquet``), or a folder's.

    Args:
        sources: paths below the root.
        given: the option ``splits``.
        where: what messages call the set.

    Raises:
        DataError: a split in ``given`` that there is not, or a file of no known split among others.
    """
    names = {source: _names(source) for source in sources}
    there = list(itertools.chain.from_iterable(names.values()))
    for name in given or ():
        if name not in there:
            raise DataError(f"data.splits: {where} has no files of a split {name!r}; {nearest(name, there)}")
    find = _split_named if given is None else given.get
    splits = {source: next(filter(None, map(find, own)), None) for source, own in names.items()}
    unknown = [source for source, split in splits.items() if split is None]
    known = len({*splits.values()} - {None})
    if given is None and unknown and known:
        raise DataError(
            f"{where}: nothing says of which split {unknown[0]} is, while others are of one; name them all, as in "
            f"data.splits='{{{next(iter(names[unknown[0]]), 'NAME')}: train, ...}}'"
        )
    kept = {source: split for source, split in splits.items() if given is None or split is not None}
    return kept if known > 1 else dict.fromkeys(kept)


def _names(file: str) -> list[str]:
    """Return what may be the name of a file's split: its own, then those of its folders.

    >>> _names("default/train/0000.parquet")
    ['0000', 'train', 'default']
    """
    *folders, name = file.split("/")
    stem = re.sub(r"(\.(tar|parquet|arrow|jsonl|gz|csv|json))+$", "", name, flags=re.IGNORECASE)
    short = re.sub(r"[-_.]?\d+-of-\d+.*$", "", stem)
    if short == stem:
        short = re.sub(r"[-_.]*\d+$", "", stem)
    return [name for name in dict.fromkeys((short, stem, *reversed(folders))) if name]


def _split_named(name: str) -> str | None:
    """Return the split that a file name contains; ``None`` if it contains no split, or several.

    >>> _split_named("LibriSpeech_cuts_dev-clean")
    'validation'
    """
    found = {SPLIT_OF[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_OF}
    return found.pop() if len(found) == 1 else None
