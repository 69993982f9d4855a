"""Data sets in folders: their base class, listing of files, and messages about a wrong layout."""

from __future__ import annotations

import csv
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError, nearest
from raydfl.core.files import read_regular
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card, Dataset
from raydfl.data.images import IMAGE_SUFFIXES
from raydfl.data.manifest import FFMPEG_SUFFIXES, VIDEO_SUFFIXES, make_manifest, shown_name
from raydfl.data.packed import list_tar
from raydfl.data.video import has_decoder

_NAMED = 3
"""Files that a message names."""
_KINDS = 8
"""Kinds of files that it counts."""
PACKED_SUFFIXES = (".tar", ".parquet", ".arrow")
"""Endings of files that hold recordings."""

SPLIT_OF = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}
"""Split by name in lower case."""


def known_splits(values: Sequence[object], where: Callable[[int], str]) -> list[str | None]:
    """Return the splits that a list's words mean; ``None``: no split.

    Args:
        values: words of any case, such as ``dev``.
        where: the beginning of the message about a row.

    Raises:
        DataError: a word means none.
    """
    known: dict[object, str | None] = {None: None}
    for row, value in enumerate(values):
        if value not in known:
            name = str(value).lower()
            if name not in SPLIT_OF:
                raise DataError(f"{where(row)} has the unknown split {value!r}; {nearest(str(value), SPLIT_OF)}")
            known[value] = SPLIT_OF[name]
    return [known[value] for value in values]


def absolute(path: Path) -> Path:
    """Return the path without links in it, which need not exist.

    Raises:
        DataError: links that lead in a circle, or ``~NAME`` of nobody.
    """
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be found: {error}") from error


def find_root(root: Path, card: Card) -> Path:
    """Find the set's root as an absolute path.

    Raises:
        DataError: there is no such folder.
    """
    folder = absolute(root)
    if not os.path.isdir(folder):  # noqa: PTH112  (pathlib's raises where a folder above is not readable)
        what = "is a file" if os.path.exists(folder) else "does not exist"  # noqa: PTH110  (likewise)
        source = f" The set is at {card.url}; data.root=FOLDER says where you have it" if card.url else ""
        raise DataError(f"{card.title}: the root {folder} {what}. Expected a folder with {card.layout}.{source}")
    return folder


def wrong_layout(folder: Path, card: Card, detail: str) -> DataError:
    """Return the error for a root with another layout; it names the expected layout and the entries found."""
    entries = sorted(shown_name(entry.name) + ("/" if _is_folder(entry) else "") for entry in _entries(str(folder)))
    shown = ", ".join(entries[:8]) + (f", ... ({len(entries)} entries)" if len(entries) > 8 else "")
    return DataError(f"{card.title}: {detail} in {folder}. Expected {card.layout}. Found: {shown or 'an empty folder'}")


def list_audio(folder: Path, suffixes: tuple[str, ...] = (".wav",)) -> list[str]:
    """List files with one of these endings (in lower case) at any depth below ``folder``: sorted POSIX paths relative to it.

    Hidden files and folders are left out: unpacking on a Mac leaves ``._name.wav`` files that hold no sound. Symbolic links
    to folders are followed.

    Raises:
        DataError: a folder that cannot be opened, a link to a folder that it lies in, or a name that is not UTF-8.
    """
    names = [name for name in list_files(folder) if name.lower().endswith(suffixes)]
    for name in names:
        check_name(name, folder)
    return names


def list_recordings(folder: Path, pictures: bool = False, films: bool = False) -> tuple[list[str], str]:
    """List all files that can be decoded, as :func:`list_audio`, with any name; and describe the other files there.

    Args:
        pictures: list images in place of recordings.
        films: list films too, but those beside which a file of the same name is listed.

    Raises:
        DataError: a folder that cannot be opened, or a link to a folder that it lies in.
    """
    names = list_files(folder)
    wanted = IMAGE_SUFFIXES if pictures else AUDIO_SUFFIXES
    found = [name for name in names if name.lower().endswith(wanted)]
    if films:
        stems = {_stem(name) for name in found}
        found = sorted(
            found + [name for name in names if name.lower().endswith(VIDEO_SUFFIXES) and _stem(name) not in stems]
        )
    listed = set(found)
    others = [name for name in names if name not in listed]
    return found, _left_out(folder, others, found, "images" if pictures else "recordings")


def list_contents(file: Path, pictures: bool = False) -> list[str]:
    """List the recordings in a tar archive, or in a Parquet or Arrow file, by their addresses, in their order.

    Args:
        pictures: list the images of a tar archive in place of its recordings.

    Raises:
        DataError: the file cannot be read, or holds none, or a table holds several columns of them.
    """
    if file.suffix.lower() != ".tar":
        from raydfl.data.sets._tables import open_table, readable_table  # its libraries start slowly

        table = open_table(file)
        with readable_table(file):
            return table.places(table.recordings(None))
    sounds = (*AUDIO_SUFFIXES, *(FFMPEG_SUFFIXES if has_decoder() else ()))
    wanted = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES) if pictures else sounds
    found = [address for _, address, _ in list_tar(file, lambda name: name.lower().endswith(wanted))]
    if not found:
        raise DataError(f"{file}: there is no {'image' if pictures else 'recording'} of a kind that is read in it")
    return found


def check_name(name: str, folder: Path) -> None:
    """Refuse the name of a file that no list and no message could hold.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"the name of {shown_name(name)} in {folder} is not UTF-8; rename it, or all there with: "
            f"convmv -f latin1 -t utf8 -r --notest {shlex.quote(str(folder))}"
        ) from None


def _left_out(folder: Path, others: Sequence[str], found: Iterable[str], what: str) -> str:
    """Describe files in a folder that are no recordings (``what``), or none that can be decoded; empty when there are none."""
    if not others:
        return ""
    kinds = Counter(Path(name).suffix.lower() for name in others).most_common()
    counts = [f"{count} {shown_name(suffix) or 'without an ending'}" for suffix, count in kinds[:_KINDS]]
    counts += [f"{sum(count for _, count in kinds[_KINDS:])} of other kinds"] if len(kinds) > _KINDS else []
    names = ", ".join(shown_name(name) for name in others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
    said = f"left out of {folder}, as no {what} of a kind that is read: {', '.join(counts)} ({len(others)} in all: {names})"
    decoded = {_stem(name) for name in found}
    foreign = {
        Path(name).suffix.lower()
        for name in others
        if name.lower().endswith(FFMPEG_SUFFIXES) and _stem(name) not in decoded
    }
    if not foreign or what != "recordings":
        return said
    tests = " -o ".join(f"-iname '*{suffix}'" for suffix in sorted(foreign))
    return (
        f"{said}. ffmpeg makes wav files of {', '.join(sorted(foreign))}, which are then read:\n"
        f"find {shlex.quote(str(folder))} -type f \\( {tests} \\) "
        """-exec sh -c 'for file; do ffmpeg -nostdin -i "$file" "${file%.*}.wav"; done' sh {} +"""
    )


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def list_files(folder: Path) -> list[str]:
    """List all files at any depth below a folder but hidden ones, with any name: sorted POSIX paths relative to it.

    Raises:
        DataError: a folder that cannot be opened, or a link to a folder that it lies in.
    """
    return sorted(_walk(str(folder), "", frozenset()))


def _walk(folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Files below a folder; ``above`` has the device and number of the folders that one went through."""
    entries = _entries(folder)
    status = Path(folder).stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise DataError(f"{shown_name(folder)} is a link to a folder that it lies in itself; remove the link")
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if _is_folder(entry):
            yield from _walk(entry.path, f"{prefix}{entry.name}/", above | {here})
        else:
            yield prefix + entry.name


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(
            f"the folder {shown_name(folder)} cannot be opened: {error.strerror}; make it readable, or move it elsewhere"
        ) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one; a link to itself is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_rows(root: Path, name: str, needed: tuple[str, ...], card: Card) -> list[dict[str, str]]:
    """Read the rows of a set's CSV file, all values as text.

    Raises:
        DataError: it is missing, cannot be read, or lacks one of the columns ``needed``.
    """
    path = root / name
    reader = csv.DictReader(read_text(root, name, card).splitlines(keepends=True))
    try:
        rows, names = list(reader), list(reader.fieldnames or [])
    except csv.Error as error:
        raise DataError(f"{card.title}: {path} cannot be read: {error}") from error
    for column in needed:
        if column not in names:
            raise DataError(f"{card.title}: {path} has no column {column!r}; its columns: {', '.join(names) or 'none'}")
    for number, row in enumerate(rows, start=2):
        if any(row[column] is None for column in needed):
            raise DataError(f"{card.title}: line {number} of {path} has fewer values than the header has columns")
    return rows


def read_text(root: Path, name: str, card: Card) -> str:
    """Read one of a set's lists.

    Raises:
        DataError: it is missing or cannot be read.
    """
    path = root / name
    if not path.exists():
        raise wrong_layout(root, card, f"there is no {name}")
    try:
        return read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{card.title}: {path} cannot be read: {error}") from error


def hold_out(rows: list[dict[str, Any]], column: str, values: Collection[int], card: Card) -> list[dict[str, Any]]:
    """Make the clips with these values of a column the test set, and all others the training set; without values no split.

    Raises:
        DataError: no clip has one of the values.
    """
    if not values:
        return rows
    there = sorted({row[column] for row in rows})
    for value in values:
        if value not in there:
            raise DataError(
                f"{card.title}: no clip is of {column} {value}, which is to be tested on; there are "
                f"{', '.join(map(str, there))}"
            )
    return [row | {"split": "test" if row[column] in values else "train"} for row in rows]


@dataclass(frozen=True, kw_only=True)
class FileDataset(Dataset):
    r"""Base of data sets in a folder, whose file names a pattern explains.

    A complete set::

        class MySet(FileDataset):
            pattern = r"(?P<group>\w+)/(?P<label>[AN])(?P<take>\d+)\.wav"
            codes = {"label": {"A": "anger", "N": "neutral"}, "take": int}

    A set with lists or tables beside its recordings overrides :meth:`rows`.
    """

    pattern: ClassVar[str] = ""
    """Regular expression for a path below the root. Its named groups become columns: ``label``, ``group``, ``split``, others."""
    codes: ClassVar[Mapping[str, Mapping[str, Any] | Callable[[str], Any]]] = {}
    """Meanings of the codes in a column: a table, or a function such as ``int``."""
    files: ClassVar[str] = f".*({'|'.join(map(re.escape, AUDIO_SUFFIXES))})"
    """Regular expression for the paths that must match ``pattern``, in either case unless it is the pattern itself. Other files are
    left out."""

    root: Annotated[Path, Field(description="folder that holds the set's files")]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        re.compile(cls.pattern)  # a mistake in it is reported with the user's file
        if cls.card is Dataset.card:
            cls.card = Card(cls.__name__, f"files whose paths match {cls.pattern}")

    def manifest(self) -> pa.Table:
        """List the clips.

        Raises:
            DataError: the root is missing or laid out in another way, or a file has another name.
        """
        root = find_root(self.root, self.card)
        rows = [{"path": str(root / row["clip"]), **row} for row in self.rows(root)]
        if rows and not any(Path(row["path"]).is_file() for row in rows):
            raise wrong_layout(root, self.card, f"none of the {len(rows)} listed files, such as {rows[0]['clip']}, is")
        return make_manifest(rows, f"{self.card.title} in {root}")

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """Return a row for each clip: ``clip``, the path below ``root``, and the columns of the pattern.

        Raises:
            DataError: there is no file of the set, or a file has another name.
        """
        case = re.NOFLAG if self.files == self.pattern else re.IGNORECASE
        rows, wanted = [], re.compile(self.files, case | re.DOTALL)
        for name in filter(wanted.fullmatch, list_files(root)):
            check_name(name, root)
            rows.append({"clip": name, **self._columns(name)})
        if not rows:
            raise wrong_layout(root, self.card, "there is no file of the set")
        return rows

    def _columns(self, name: str) -> dict[str, Any]:
        """Return what the pattern and the codes say of a file."""
        found = re.fullmatch(self.pattern, name, re.DOTALL)
        try:
            if found is None:
                raise ValueError
            columns: dict[str, Any] = found.groupdict()
            for column, codes in self.codes.items():
                if columns.get(column) is not None:
                    columns[column] = (codes.__getitem__ if isinstance(codes, Mapping) else codes)(columns[column])
        except (KeyError, ValueError):
            raise DataError(
                f"{self.card.title}: the file name {name!r} does not fit the layout {self.card.layout}; rename or "
                f"remove the file"
            ) from None
        return columns
