"""Data sets in folders: base class, listing of files, and errors about an unexpected layout."""

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
from raydfl.core.isolation import reading
from raydfl.data.audio import AUDIO_SUFFIXES
from raydfl.data.dataset import Card, Dataset
from raydfl.data.images import IMAGE_SUFFIXES
from raydfl.data.manifest import FFMPEG_SUFFIXES, VIDEO_SUFFIXES, escape_path, make_manifest
from raydfl.data.packed import list_tar
from raydfl.data.video import has_decoder

_MOST_NAMES = 3
"""Largest number of files named in a message."""
_MOST_KINDS = 8
"""Largest number of file types counted in a message."""
PACKED_SUFFIXES = (".tar", ".parquet", ".arrow")
"""Endings of files that contain recordings."""

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


def parse_splits(values: Sequence[object], where: Callable[[int], str]) -> list[str | None]:
    """Map the words of a list to splits; ``None`` stays ``None``.

    Args:
        values: words in any case, such as ``dev``.
        where: returns the start of the message about a row.

    Raises:
        DataError: a word is unknown.
    """
    splits: dict[object, str | None] = {None: None}
    for row, value in enumerate(values):
        if value not in splits:
            name = str(value).lower()
            if name not in SPLIT_OF:
                raise DataError(f"{where(row)} has the unknown split {value!r}. {nearest(str(value), SPLIT_OF)}")
            splits[value] = SPLIT_OF[name]
    return [splits[value] for value in values]


def resolve_path(path: Path) -> Path:
    """Return an absolute path without symbolic links. The file need not exist.

    Raises:
        DataError: circular links, or ``~NAME`` of an unknown user.
    """
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be found: {error}") from error


def find_root(root: Path, card: Card) -> Path:
    """Return the set's root as an absolute path.

    Raises:
        DataError: the root is missing, or not a folder.
    """
    folder = resolve_path(root)
    if not os.path.isdir(folder):  # noqa: PTH112  (pathlib's version raises below an unreadable folder)
        problem = "is a file" if os.path.exists(folder) else "does not exist"  # noqa: PTH110  (same reason)
        source = f" Download the set from {card.url} and set data.root to its folder" if card.url else ""
        raise DataError(f"{card.title}: the root {folder} {problem}. Expected a folder with {card.layout}.{source}")
    return folder


def make_layout_error(folder: Path, card: Card, detail: str) -> DataError:
    """Make the error for an unexpected layout. It names the expected layout and the folder's entries."""
    entries = sorted(
        escape_path(entry.name) + ("/" if _is_folder(entry) else "") for entry in _list_entries(str(folder))
    )
    shown = ", ".join(entries[:8]) + (f", ... ({len(entries)} entries)" if len(entries) > 8 else "")
    return DataError(f"{card.title}: {detail} in {folder}. Expected {card.layout}. Found: {shown or 'an empty folder'}")


def list_audio(folder: Path, suffixes: tuple[str, ...] = (".wav",)) -> list[str]:
    """List files by their ending (in lower case) at any depth below ``folder``: sorted POSIX paths relative to it.

    Hidden files and folders are left out, because unpacking on a Mac creates ``._name.wav`` files without sound. Symbolic links to
    folders are followed.

    Raises:
        DataError: an unreadable folder, a link to a parent folder, or a name outside UTF-8.
    """
    names = [name for name in list_files(folder) if name.lower().endswith(suffixes)]
    for name in names:
        check_name(name, folder)
    return names


def list_recordings(folder: Path, pictures: bool = False, films: bool = False) -> tuple[list[str], str]:
    """List all readable recordings below a folder, and describe the unreadable files.

    Args:
        folder: root of the search, as for :func:`list_audio`, but names may be outside UTF-8.
        pictures: list images in place of recordings.
        films: list videos too, except next to a listed file of the same name.

    Returns:
        Sorted POSIX paths relative to the folder, and a message about the unlisted files (empty without any).

    Raises:
        DataError: an unreadable folder, or a link to a parent folder.
    """
    names = list_files(folder)
    suffixes = IMAGE_SUFFIXES if pictures else AUDIO_SUFFIXES
    listed = [name for name in names if name.lower().endswith(suffixes)]
    if films:
        stems = {_remove_suffix(name) for name in listed}
        videos = [name for name in names if name.lower().endswith(VIDEO_SUFFIXES)]
        listed = sorted(listed + [name for name in videos if _remove_suffix(name) not in stems])
    unlisted = sorted(set(names) - set(listed))
    return listed, _describe_unlisted(folder, unlisted, listed, "images" if pictures else "recordings")


def list_contents(file: Path, pictures: bool = False) -> list[str]:
    """List the addresses of the recordings in a tar archive or in a Parquet or Arrow file, in the file's order.

    Args:
        file: the archive or table.
        pictures: list the images of a tar archive in place of its recordings.

    Raises:
        DataError: the file is unreadable, has no recordings, or has several columns of recordings.
    """
    if file.suffix.lower() != ".tar":
        from raydfl.data.sets._tables import open_table, readable_table  # its libraries start slowly

        table = open_table(file)
        with readable_table(file):
            return table.list_addresses(table.find_audio_column(None))
    sounds = (*AUDIO_SUFFIXES, *(FFMPEG_SUFFIXES if has_decoder() else ()))
    suffixes = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES) if pictures else sounds
    addresses = [address for _, address, _ in list_tar(file, lambda name: name.lower().endswith(suffixes))]
    if not addresses:
        raise DataError(f"{file}: the archive has no {'image' if pictures else 'recording'} of a supported type")
    return addresses


def check_name(name: str, folder: Path) -> None:
    """Reject the name of a file outside UTF-8, because lists and messages cannot contain it.

    Raises:
        DataError: the name is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"the name of {escape_path(name)} in {folder} is not UTF-8. Rename the file, or convert all names with: "
            f"convmv -f latin1 -t utf8 -r --notest {shlex.quote(str(folder))}"
        ) from None


def _describe_unlisted(folder: Path, unlisted: Sequence[str], listed: Iterable[str], what: str) -> str:
    """Describe the files of a folder that cannot be read as recordings or images (``what``)."""
    if not unlisted:
        return ""
    kinds = Counter(Path(name).suffix.lower() for name in unlisted).most_common()
    counts = [f"{count} {escape_path(suffix) or 'without an ending'}" for suffix, count in kinds[:_MOST_KINDS]]
    rest = sum(count for _, count in kinds[_MOST_KINDS:])
    counts += [f"{rest} of further types"] if rest else []
    names = ", ".join(map(escape_path, unlisted[:_MOST_NAMES])) + (", ..." if len(unlisted) > _MOST_NAMES else "")
    text = (
        f"left out of {folder} (no {what} of a supported type): {', '.join(counts)} ({len(unlisted)} in all: {names})"
    )
    decoded = {_remove_suffix(name) for name in listed}
    convertible = {
        Path(name).suffix.lower()
        for name in unlisted
        if name.lower().endswith(FFMPEG_SUFFIXES) and _remove_suffix(name) not in decoded
    }
    if not convertible or what != "recordings":
        return text
    tests = " -o ".join(f"-iname '*{suffix}'" for suffix in sorted(convertible))
    return (
        f"{text}. Convert {', '.join(sorted(convertible))} to wav files with ffmpeg:\n"
        f"find {shlex.quote(str(folder))} -type f \\( {tests} \\) "
        """-exec sh -c 'for file; do ffmpeg -nostdin -i "$file" "${file%.*}.wav"; done' sh {} +"""
    )


def _remove_suffix(name: str) -> str:
    return name.rpartition(".")[0]


def list_files(folder: Path) -> list[str]:
    """List all files at any depth below a folder, except hidden files: sorted POSIX paths relative to it.

    Raises:
        DataError: an unreadable folder, or a link to a parent folder.
    """
    return sorted(_walk(str(folder), "", frozenset()))


def _walk(folder: str, prefix: str, parents: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield the files below a folder.

    Args:
        prefix: start of their paths.
        parents: device and inode of all parent folders, to detect circular links.
    """
    entries = _list_entries(folder)
    status = Path(folder).stat()
    inode = (status.st_dev, status.st_ino)
    if inode in parents:
        raise DataError(f"{escape_path(folder)} is a link to one of its parent folders. Remove the link")
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if _is_folder(entry):
            yield from _walk(entry.path, f"{prefix}{entry.name}/", parents | {inode})
        else:
            yield prefix + entry.name


def _list_entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(
            f"the folder {escape_path(folder)} cannot be opened: {error.strerror}. Make it readable, or move it elsewhere"
        ) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return true for a folder or a link to a folder."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def read_rows(root: Path, name: str, needed: tuple[str, ...], card: Card) -> list[dict[str, str]]:
    """Read the rows of a set's CSV file, with all values as text.

    Raises:
        DataError: the file is missing, unreadable, or lacks a column of ``needed``.
    """
    path = root / name
    reader = csv.DictReader(read_text(root, name, card).splitlines(keepends=True))
    with reading(f"{card.title}: {path}"):
        rows, names = list(reader), list(reader.fieldnames or [])
    for column in needed:
        if column not in names:
            columns = ", ".join(names) or "none"
            raise DataError(f"{card.title}: {path} has no column {column!r}; its columns: {columns}. Download it again")
    for number, row in enumerate(rows, start=2):
        if any(row[column] is None for column in needed):
            raise DataError(f"{card.title}: line {number} of {path} has fewer values than the header has columns")
    return rows


def read_text(root: Path, name: str, card: Card) -> str:
    """Read a text file of a set.

    Raises:
        DataError: the file is missing or unreadable.
    """
    path = root / name
    if not path.exists():
        raise make_layout_error(root, card, f"there is no {name}")
    with reading(f"{card.title}: {path}"):
        return read_regular(path).decode("utf-8-sig")


def add_test_split(
    rows: list[dict[str, Any]], column: str, values: Collection[int], card: Card
) -> list[dict[str, Any]]:
    """Put the clips with these values of a column into the test set, and all remaining clips into the training set.

    Args:
        values: values of the column for the test set. Empty: no split.

    Raises:
        DataError: no clip has one of the values.
    """
    if not values:
        return rows
    present = sorted({row[column] for row in rows})
    for value in values:
        if value not in present:
            raise DataError(
                f"{card.title}: {column} {value} of the test set has no clips. Choose from {', '.join(map(str, present))}"
            )
    return [row | {"split": "test" if row[column] in values else "train"} for row in rows]


@dataclass(frozen=True, kw_only=True)
class FileDataset(Dataset):
    r"""Base class of data sets in a folder, with metadata in the names of the files.

    Example of a complete set::

        class MySet(FileDataset):
            pattern = r"(?P<group>\w+)/(?P<label>[AN])(?P<take>\d+)\.wav"
            codes = {"label": {"A": "anger", "N": "neutral"}, "take": int}

    A set with lists or tables next to its recordings overrides :meth:`rows`.
    """

    pattern: ClassVar[str] = ""
    """Regular expression for paths below the root. Its named groups become columns: ``label``, ``group``, ``split`` and more."""
    codes: ClassVar[Mapping[str, Mapping[str, Any] | Callable[[str], Any]]] = {}
    """Meanings of the codes in a column: a table, or a function such as ``int``."""
    files: ClassVar[str] = f".*({'|'.join(map(re.escape, AUDIO_SUFFIXES))})"
    """Regular expression for the set's files; their paths must match ``pattern``. Case is ignored, unless it equals the pattern."""

    root: Annotated[Path, Field(description="Folder with the files of the set.")]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        re.compile(cls.pattern)  # report a mistake when the user's file is loaded
        if cls.card is Dataset.card:  # a user's own set needs no card
            cls.card = Card(cls.__name__, f"files whose paths match {cls.pattern}")

    def manifest(self) -> pa.Table:
        """List the clips.

        Raises:
            DataError: the root is missing or has an unexpected layout, or a file has an unexpected name.
        """
        root = find_root(self.root, self.card)
        rows = [{"path": str(root / row["clip"]), **row} for row in self.rows(root)]
        if rows and not any(Path(row["path"]).is_file() for row in rows):
            raise make_layout_error(
                root, self.card, f"none of the {len(rows)} listed files, such as {rows[0]['clip']}, is"
            )
        return make_manifest(rows, f"{self.card.title} in {root}")

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List a row for each clip: ``clip`` (the path below ``root``) and the columns of the pattern.

        Raises:
            DataError: the folder has no file of the set, or a file has an unexpected name.
        """
        case = re.NOFLAG if self.files == self.pattern else re.IGNORECASE
        rows, expression = [], re.compile(self.files, case | re.DOTALL)
        for name in filter(expression.fullmatch, list_files(root)):
            check_name(name, root)
            rows.append({"clip": name, **self._parse_name(name)})
        if not rows:
            raise make_layout_error(root, self.card, "there is no file of the set")
        return rows

    def _parse_name(self, name: str) -> dict[str, Any]:
        """Parse a file's path with the pattern and the codes."""
        match = re.fullmatch(self.pattern, name, re.DOTALL)
        try:
            if match is None:
                raise ValueError
            columns: dict[str, Any] = match.groupdict()
            for column, codes in self.codes.items():
                if columns.get(column) is not None:
                    columns[column] = (codes.__getitem__ if isinstance(codes, Mapping) else codes)(columns[column])
        except (KeyError, ValueError):
            raise DataError(
                f"{self.card.title}: the file name {name!r} does not fit the layout {self.card.layout}. Rename or "
                f"remove the file"
            ) from None
        return columns
