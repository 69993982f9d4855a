"""Data sets in a few large files: base class, file patterns, and splits by file name."""

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
from raydfl.data.sets._files import SPLIT_OF, absolute, check_name, find_root, list_files, parse_splits, wrong_layout

_MARKS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_MOST = 100_000
"""Maximum number of alternatives of a pattern."""


@dataclass(frozen=True, kw_only=True)
class PackedSet(Dataset):
    """Base class of sets with recordings stored or listed in a few large files."""

    root: Annotated[Path, Field(description="Folder with the files, or a single file.")]
    files: Annotated[str | None, Field(description="Pattern of the files below the root.")] = None
    splits: Annotated[
        Mapping[str, Literal["train", "validation", "test"]] | None,
        Field(
            description="Use of each split of the set, such as {train.clean.100: train, test.other: test}. Unlisted splits are "
            "skipped. null: derive the use from the names."
        ),
    ] = None

    def manifest(self) -> pa.Table:
        """List the clips, file by file."""
        return self.read_files(*find_files(self.root, self.files or "", self.card))

    def read_files(self, root: Path, files: Sequence[str]) -> pa.Table:
        """Read the manifest of the given files below the root."""
        splits = find_splits(files, self.splits, f"{self.card.title} in {root}")
        return self.join([set_split(self.clips(root, file), [split]) for file, split in splits.items()], root)

    def clips(self, root: Path, file: str) -> pa.Table:
        """Read the clips of one file, with the column names of the file."""
        raise NotImplementedError(f"{type(self).__name__} must implement clips()")

    def name_columns(self, table: pa.Table, where: str) -> pa.Table:
        """Add the columns ``label`` and, if known, ``group``."""
        return table

    def join(self, tables: Sequence[pa.Table], root: Path) -> pa.Table:
        """Join the clips of several files into a manifest. Missing columns become null.

        Raises:
            DataError: column types differ between files, there are no clips, or a split name is unknown.
        """
        where = f"{self.card.title} in {root}"
        try:
            table = self.name_columns(pa.concat_tables(tables, promote_options="permissive"), where)
        except (pa.ArrowException, TypeError) as error:
            raise DataError(f"{where}: the type of a column differs between files: {error}") from error
        if "split" in table.column_names:
            splits = parse_splits(table["split"].to_pylist(), lambda row: f"{where}: {table['clip'][row]}")
            table = set_text_column(table, "split", splits)
        return make_manifest(table, where)


def set_text_column(table: pa.Table, name: str, values: Sequence[str | None]) -> pa.Table:
    """Add or replace a column of text."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    return pa.table(columns | {name: pa.array(values, pa.string())})


def set_split(table: pa.Table, splits: Sequence[str | None]) -> pa.Table:
    """Set the column ``split``. A single value applies to all clips; without any split, keep the existing column."""
    if len(splits) == 1:
        splits = [*splits] * table.num_rows
    return set_text_column(table, "split", splits) if any(splits) else table


def find_files(root: Path, pattern: str, card: Card) -> tuple[Path, list[str]]:
    """Find the files below a set's root by a pattern.

    Args:
        root: a folder, or a single file.
        pattern: with ``*`` (not across folders), ``**/`` (any folders), ``?``, ``{a,b}`` and ``{000..099}``. Each alternative in
            braces must match a file.

    Returns:
        The folder as an absolute path, and sorted relative POSIX paths. Hidden files are skipped; links to folders are followed.

    Raises:
        DataError: the folder does not exist, or no file matches.
    """
    place = absolute(root)
    if place.is_file():
        return place.parent, [place.name]
    folder = find_root(root, card)
    names, selected = list_files(folder), set()
    for alternative in _expand_braces(pattern):
        expression = _compile_pattern(alternative)
        matching = [name for name in names if expression.fullmatch(name)]
        if not matching:
            raise wrong_layout(folder, card, f"there is no file {alternative} (data.files)")
        selected.update(matching)
    for name in selected:
        check_name(name, folder)
    return folder, sorted(selected)


def _expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern to all alternatives.

    >>> _expand_braces("{train,test}-{08..10}.tar")[:4]
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'test-08.tar']
    """
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[piece] if number % 2 == 0 else list(_alternatives(piece)) for number, piece in enumerate(pieces)]
    patterns = ["".join(parts) for parts in itertools.islice(itertools.product(*choices), _MOST + 1)]
    if len(patterns) > _MOST:
        raise DataError(f"data.files: {pattern} expands to more than {_MOST} files. Use * instead of a range.")
    return patterns


def _alternatives(braces: str) -> Iterator[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", braces)
    if span is None:
        yield from braces.split(",")
        return
    width = len(span[1])
    for number in range(int(span[1]), min(int(span[2]), int(span[1]) + _MOST) + 1):
        yield f"{number:0{width}d}"


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(_MARKS[part] if part in _MARKS else re.escape(part) for part in parts), re.DOTALL)


def make_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Build a table with a column per key from rows of plain values. Columns of mixed types become text."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    if not any(isinstance(value, list) for value in values):
        with contextlib.suppress(pa.ArrowException, TypeError, OverflowError):
            return pa.array(values)
    return pa.array([as_text(value) for value in values], pa.string())


def is_plain(value: Any) -> bool:
    """Return whether a JSON value fits in a column: a string, number, boolean, null, or a list of strings and numbers."""
    if isinstance(value, list):
        return all(isinstance(item, str | int | float) for item in value)
    return value is None or isinstance(value, str | int | float)


def as_text(value: Any) -> str | None:
    """Convert a plain value to text, with list items joined by ``|``.

    >>> as_text(["dog", 3])
    'dog|3'
    """
    if isinstance(value, list):
        return "|".join(as_text(item) or "" for item in value) or "|"
    return value if value is None or isinstance(value, str) else json.dumps(value)


def rename_columns(table: pa.Table, label: str, group: str | None, where: str) -> pa.Table:
    """Rename the columns of classes and owners to ``label`` and ``group``, as text, and replace existing columns.

    Args:
        table: clips with the column names of the files.
        label: column of classes.
        group: column of owners; ``None``: clips have no owners.
        where: name of the set in messages.

    Raises:
        DataError: a column does not exist.
    """
    columns = {name: table.column(name) for name in table.column_names if name not in (label, group, "label", "group")}
    for name, field in (("label", label), ("group", group)):
        if field is not None:
            if field not in table.column_names:
                known = [column for column in table.column_names if column not in ("clip", "path", "split")]
                raise DataError(f"{where}: no clip has a field {field!r} (data.{name}_column); {nearest(field, known)}")
            columns[name] = pa.array([as_text(value) for value in table.column(field).to_pylist()], pa.string())
    return pa.table(columns)


def find_splits(sources: Iterable[str], given: Mapping[str, str] | None, where: str) -> dict[str, str | None]:
    """Return the split of each file or folder of the set, or ``None`` for all if there are fewer than two splits.

    The split name is the file name without number and suffix (``train.clean.100-00000-of-00014.parquet``), or a folder name.

    Args:
        sources: paths below the root.
        given: the option ``splits``.
        where: name of the set in messages.

    Raises:
        DataError: ``given`` names an unknown split, or only some files have a known split.
    """
    names = {source: _names(source) for source in sources}
    known_names = list(itertools.chain.from_iterable(names.values()))
    for name in given or ():
        if name not in known_names:
            raise DataError(f"data.splits: {where} has no files of a split {name!r}; {nearest(name, known_names)}")
    find = _parse_split if given is None else given.get
    splits = {source: next(filter(None, map(find, candidates)), None) for source, candidates in names.items()}
    unknown = [source for source, split in splits.items() if split is None]
    known = len({*splits.values()} - {None})
    if given is None and unknown and known:
        raise DataError(
            f"{where}: the split of {unknown[0]} is unknown. Assign every file to a split, as in "
            f"data.splits='{{{next(iter(names[unknown[0]]), 'NAME')}: train, ...}}'"
        )
    used = {source: split for source, split in splits.items() if given is None or split is not None}
    return used if known > 1 else dict.fromkeys(used)


def _names(file: str) -> list[str]:
    """Return candidate split names of a file: from its name, then from its folders.

    >>> _names("default/train/0000.parquet")
    ['0000', 'train', 'default']
    """
    *folders, name = file.split("/")
    stem = re.sub(r"(\.(tar|parquet|arrow|jsonl|gz|csv|json))+$", "", name, flags=re.IGNORECASE)
    short = re.sub(r"[-_.]?\d+-of-\d+.*$", "", stem)
    if short == stem:
        short = re.sub(r"[-_.]*\d+$", "", stem)
    return [name for name in dict.fromkeys((short, stem, *reversed(folders))) if name]


def _parse_split(name: str) -> str | None:
    """Return the split in a file name, or ``None`` for no split or several.

    >>> _parse_split("LibriSpeech_cuts_dev-clean")
    'validation'
    """
    splits = {SPLIT_OF[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_OF}
    return splits.pop() if len(splits) == 1 else None
