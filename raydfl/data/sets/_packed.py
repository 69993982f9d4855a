"""Data sets in a few large files: base class, search for the files, and their splits."""

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
from raydfl.data.sets._files import (
    SPLIT_OF,
    check_name,
    find_root,
    list_files,
    make_layout_error,
    parse_splits,
    resolve_path,
)

_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_MOST = 100_000
"""Largest number of patterns after the expansion of braces."""


@dataclass(frozen=True, kw_only=True)
class PackedSet(Dataset):
    """Base class of sets with their recordings stored or listed in a few large files."""

    root: Annotated[Path, Field(description="Folder with the files, or the path of a single file.")]
    files: Annotated[str | None, Field(description="Pattern for the files below the root.")] = None
    splits: Annotated[
        Mapping[str, Literal["train", "validation", "test"]] | None,
        Field(
            description="Use of the set's splits, such as {train.clean.100: train, test.other: test}. Unlisted splits are left "
            "out. null: derive it from their names."
        ),
    ] = None

    def manifest(self) -> pa.Table:
        """List the clips, file by file."""
        return self.read_files(*find_files(self.root, self.files or "", self.card))

    def read_files(self, root: Path, files: Sequence[str]) -> pa.Table:
        """Make the manifest of files below the root."""
        splits = find_splits(files, self.splits, f"{self.card.title} in {root}")
        return self.join([set_split(self.clips(root, file), [split]) for file, split in splits.items()], root)

    def clips(self, root: Path, file: str) -> pa.Table:
        """Read the clips of a file, with the file's own names of columns."""
        raise NotImplementedError(f"{type(self).__name__} must read a file in clips()")

    def name_columns(self, table: pa.Table, where: str) -> pa.Table:
        """Name the column of classes ``label``, and the column of owners, if any, ``group``."""
        return table

    def join(self, tables: Sequence[pa.Table], root: Path) -> pa.Table:
        """Make the manifest of several files. Columns missing in a file are null for its clips.

        Raises:
            DataError: a column has different types, no file has clips, or a split's name is unknown.
        """
        where = f"{self.card.title} in {root}"
        try:
            table = self.name_columns(pa.concat_tables(tables, promote_options="permissive"), where)
        except (pa.ArrowException, TypeError) as error:
            raise DataError(f"{where}: its files disagree about the type of a column: {error}") from error
        if "split" in table.column_names:
            splits = parse_splits(table["split"].to_pylist(), lambda row: f"{where}: {table['clip'][row]}")
            table = set_texts(table, "split", splits)
        return make_manifest(table, where)


def set_texts(table: pa.Table, name: str, values: Sequence[str | None]) -> pa.Table:
    """Add or replace a column of text."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return pa.table(columns | {name: pa.array(values, pa.string())})


def set_split(table: pa.Table, splits: Sequence[str | None]) -> pa.Table:
    """Add the column ``split``, from a split for each clip or a single split. Without a split, the table stays as it is."""
    if len(splits) == 1:
        splits = [*splits] * table.num_rows
    return set_texts(table, "split", splits) if any(splits) else table


def find_files(root: Path, pattern: str, card: Card) -> tuple[Path, list[str]]:
    """Find the files of a set by a pattern for their paths below its root.

    Args:
        root: a folder, or a single file (returned whatever the pattern).
        pattern: with ``*`` (not across folders), ``**/`` (any folders), ``?``, ``{a,b}`` and ``{000..099}``. Each alternative in
            braces must match a file.

    Returns:
        The folder as an absolute path, and sorted POSIX paths relative to it, without hidden files. Links to folders are followed.

    Raises:
        DataError: the folder is missing, or no file matches.
    """
    path = resolve_path(root)
    if path.is_file():
        return path.parent, [path.name]
    folder = find_root(root, card)
    names, matches = list_files(folder), set()
    for expanded in _expand_braces(pattern):
        expression = _compile_wildcards(expanded)
        matching = [name for name in names if expression.fullmatch(name)]
        if not matching:
            raise make_layout_error(folder, card, f"there is no file {expanded} (data.files)")
        matches.update(matching)
    for name in matches:
        check_name(name, folder)
    return folder, sorted(matches)


def _expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern.

    >>> _expand_braces("{train,test}-{08..10}.tar")[:4]
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'test-08.tar']
    """
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[piece] if number % 2 == 0 else list(_list_choices(piece)) for number, piece in enumerate(pieces)]
    patterns = ["".join(parts) for parts in itertools.islice(itertools.product(*choices), _MOST + 1)]
    if len(patterns) > _MOST:
        raise DataError(
            f"data.files: the braces of {pattern} expand to more than {_MOST} names. Use * in place of braces"
        )
    return patterns


def _list_choices(braces: str) -> Iterator[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", braces)
    if span is None:
        yield from braces.split(",")
        return
    width = len(span[1])
    for number in range(int(span[1]), min(int(span[2]), int(span[1]) + _MOST) + 1):
        yield f"{number:0{width}d}"


def _compile_wildcards(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    expression = "".join(_WILDCARDS[part] if part in _WILDCARDS else re.escape(part) for part in parts)
    return re.compile(expression, re.DOTALL)


def make_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Make a table from rows of plain values. A column with values of different types becomes text."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return pa.table({name: _make_column([row.get(name) for row in rows]) for name in names})


def _make_column(values: list[Any]) -> pa.Array:
    if not any(isinstance(value, list) for value in values):
        # Values of different types and integers beyond 64 bits become text.
        with contextlib.suppress(pa.ArrowException, TypeError, OverflowError):
            return pa.array(values)
    return pa.array([to_text(value) for value in values], pa.string())


def is_plain(value: Any) -> bool:
    """Return true for a JSON value that fits in a column: text, a number, a boolean, null, or a list of the first three."""
    if isinstance(value, list):
        return all(isinstance(item, str | int | float) for item in value)
    return value is None or isinstance(value, str | int | float)


def to_text(value: Any) -> str | None:
    """Convert a plain value to text. The items of a list are joined by ``|``.

    >>> to_text(["dog", 3])
    'dog|3'
    """
    if isinstance(value, list):
        return "|".join(to_text(item) or "" for item in value) or "|"
    return value if value is None or isinstance(value, str) else json.dumps(value)


def name_label_and_group(table: pa.Table, label: str, group: str | None, where: str) -> pa.Table:
    """Rename the columns of classes and owners to ``label`` and ``group``, as text, replacing former columns of these names.

    Args:
        label: name of the column with the classes.
        group: name of the column with the owners; ``None``: clips without owners.

    Raises:
        DataError: a column is missing.
    """
    columns = {name: table.column(name) for name in table.column_names if name not in (label, group, "label", "group")}
    for name, field in (("label", label), ("group", group)):
        if field is not None:
            if field not in table.column_names:
                known = [column for column in table.column_names if column not in ("clip", "path", "split")]
                raise DataError(f"{where}: no clip has a field {field!r} (data.{name}_column). {nearest(field, known)}")
            columns[name] = pa.array([to_text(value) for value in table.column(field).to_pylist()], pa.string())
    return pa.table(columns)


def find_splits(sources: Iterable[str], option: Mapping[str, str] | None, where: str) -> dict[str, str | None]:
    """Find the split of each file or folder of the set.

    A split's name is the name of the file without its number and ending (``train.clean.100-00000-of-00014.parquet``), or the name
    of a folder.

    Args:
        sources: paths below the root.
        option: ``data.splits``; ``None``: derive the splits from the names.
        where: name of the set in messages.

    Returns:
        Split by path, without paths of unlisted splits. All ``None`` if there are fewer than two splits.

    Raises:
        DataError: a split of ``option`` has no files, or a file without a split is among files with splits.
    """
    names = {source: _list_split_names(source) for source in sources}
    present = list(itertools.chain.from_iterable(names.values()))
    for name in option or ():
        if name not in present:
            raise DataError(f"data.splits: {where} has no files of a split {name!r}. {nearest(name, present)}")
    find = _parse_split if option is None else option.get
    splits = {source: next(filter(None, map(find, candidates)), None) for source, candidates in names.items()}
    unknown = [source for source, split in splits.items() if split is None]
    known = len({*splits.values()} - {None})
    if option is None and unknown and known:
        raise DataError(
            f"{where}: the split of {unknown[0]} is unknown, unlike the split of other files. Name the splits of all files: "
            f"data.splits='{{{next(iter(names[unknown[0]]), 'NAME')}: train, ...}}'"
        )
    used = {source: split for source, split in splits.items() if option is None or split is not None}
    return used if known > 1 else dict.fromkeys(used)  # a single split leaves the division to data.split


def _list_split_names(file: str) -> list[str]:
    """List the candidates for the name of a file's split: the file's name, then the names of its folders.

    >>> _list_split_names("default/train/0000.parquet")
    ['0000', 'train', 'default']
    """
    *folders, name = file.split("/")
    stem = re.sub(r"(\.(tar|parquet|arrow|jsonl|gz|csv|json))+$", "", name, flags=re.IGNORECASE)
    short = re.sub(r"[-_.]?\d+-of-\d+.*$", "", stem)
    if short == stem:
        short = re.sub(r"[-_.]*\d+$", "", stem)
    return [name for name in dict.fromkeys((short, stem, *reversed(folders))) if name]


def _parse_split(name: str) -> str | None:
    """Find the split in a file's name; ``None`` if the name contains no split, or several.

    >>> _parse_split("LibriSpeech_cuts_dev-clean")
    'validation'
    """
    splits = {SPLIT_OF[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_OF}
    return splits.pop() if len(splits) == 1 else None
