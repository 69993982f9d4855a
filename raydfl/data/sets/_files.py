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
from raydfl.data.films import has_decoder
from raydfl.data.manifest import FFMPEG_SUFFIXES, FILM_SUFFIXES, make_manifest, shown_name
from raydfl.data.packed import tar_members
from raydfl.data.pictures import PICTURE_SUFFIXES

_NAMED = 3
"""Maximum number of files in a message."""
_KINDS = 8
"""Maximum number of file kinds in a message."""
PACKED_SUFFIXES = (".tar", ".parquet", ".arrow")
"""Suffixes of files that contain recordings."""

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
    """Translate the split names of a list to ``train``, ``validation`` and ``test``.

    Args:
        values: names in any case, such as ``dev``; ``None``: no split.
        where: returns the location of a row, for messages.

    Raises:
        DataError: a name is unknown.
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
    """Resolve links and ``~`` in a path. The path need not exist.

    Raises:
        DataError: circular links, or ``~NAME`` of an unknown user.
    """
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be found: {error}") from error


def find_root(root: Path, card: Card) -> Path:
    """Resolve the root folder of a set.

    Raises:
        DataError: the folder does not exist.
    """
    folder = absolute(root)
    if not os.path.isdir(folder):  # noqa: PTH112  (pathlib raises if a parent folder is not readable)
        what = "is a file" if os.path.exists(folder) else "does not exist"  # noqa: PTH110  (as above)
        source = f" Download the set from {card.url} and set data.root=FOLDER" if card.url else ""
        raise DataError(f"{card.title}: the root {folder} {what}. Expected a folder with {card.layout}.{source}")
    return folder


def wrong_layout(folder: Path, card: Card, detail: str) -> DataError:
    """Create the error for an unexpected layout, with the expected layout and the entries of the folder."""
    entries = sorted(shown_name(entry.name) + ("/" if _is_folder(entry) else "") for entry in _entries(str(folder)))
    shown = ", ".join(entries[:8]) + (f", ... ({len(entries)} entries)" if len(entries) > 8 else "")
    return DataError(f"{card.title}: {detail} in {folder}. Expected {card.layout}. Found: {shown or 'an empty folder'}")


def list_audio(folder: Path, suffixes: tuple[str, ...] = (".wav",)) -> list[str]:
    """List the files below a folder with one of the suffixes (in lower case), as sorted relative POSIX paths.

    Hidden files and folders are skipped, because unpacking on a Mac leaves ``._name.wav`` files without sound. Symbolic links to
    folders are followed.

    Raises:
        DataError: a folder cannot be opened, a link points to a parent folder, or a name is not UTF-8.
    """
    names = [name for name in list_files(folder) if name.lower().endswith(suffixes)]
    for name in names:
        check_name(name, folder)
    return names


def list_recordings(folder: Path, pictures: bool = False, films: bool = False) -> tuple[list[str], str]:
    """List the decodable files below a folder, and describe the skipped files.

    Args:
        pictures: list images instead of recordings.
        films: also list videos without a listed file of the same stem beside them.

    Returns:
        Sorted relative POSIX paths, and a remark about skipped files (empty: none).

    Raises:
        DataError: a folder cannot be opened, or a link points to a parent folder.
    """
    names = list_files(folder)
    suffixes = PICTURE_SUFFIXES if pictures else AUDIO_SUFFIXES
    media = [name for name in names if name.lower().endswith(suffixes)]
    if films:
        stems = {_stem(name) for name in media}
        media = sorted(
            media + [name for name in names if name.lower().endswith(FILM_SUFFIXES) and _stem(name) not in stems]
        )
    listed = set(media)
    skipped = [name for name in names if name not in listed]
    return media, _describe_skipped(folder, skipped, media, "images" if pictures else "recordings")


def list_contents(file: Path, pictures: bool = False) -> list[str]:
    """List the addresses of the recordings in a tar archive, or in a Parquet or Arrow file, in file order.

    Args:
        pictures: list the images of a tar archive instead of its recordings.

    Raises:
        DataError: the file cannot be read, has no recordings, or has several columns of recordings.
    """
    if file.suffix.lower() != ".tar":
        from raydfl.data.sets._tables import open_table, readable_table  # slow to import

        table = open_table(file)
        with readable_table(file):
            return table.places(table.recordings(None))
    sounds = (*AUDIO_SUFFIXES, *(FFMPEG_SUFFIXES if has_decoder() else ()))
    suffixes = (*PICTURE_SUFFIXES, *FILM_SUFFIXES) if pictures else sounds
    addresses = [address for _, address, _ in tar_members(file, lambda name: name.lower().endswith(suffixes))]
    if not addresses:
        raise DataError(f"{file}: the archive has no {'image' if pictures else 'recording'} in a supported format")
    return addresses


def check_name(name: str, folder: Path) -> None:
    """Check that a file name is valid UTF-8, as manifests and messages require.

    Raises:
        DataError: the name is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"the name of {shown_name(name)} in {folder} is not UTF-8. Rename it, or rename all files with: "
            f"convmv -f latin1 -t utf8 -r --notest {shlex.quote(str(folder))}"
        ) from None


def _describe_skipped(folder: Path, skipped: Sequence[str], listed: Iterable[str], what: str) -> str:
    """Describe the skipped files of a folder; return an empty string if all files are listed."""
    if not skipped:
        return ""
    kinds = Counter(Path(name).suffix.lower() for name in skipped).most_common()
    counts = [f"{count} {shown_name(suffix) or 'without an ending'}" for suffix, count in kinds[:_KINDS]]
    counts += [f"{sum(count for _, count in kinds[_KINDS:])} of other kinds"] if len(kinds) > _KINDS else []
    names = ", ".join(shown_name(name) for name in skipped[:_NAMED]) + (", ..." if len(skipped) > _NAMED else "")
    remark = (
        f"skipped in {folder}, not {what} in a supported format: {', '.join(counts)} ({len(skipped)} in all: {names})"
    )
    decoded = {_stem(name) for name in listed}
    foreign = {
        Path(name).suffix.lower()
        for name in skipped
        if name.lower().endswith(FFMPEG_SUFFIXES) and _stem(name) not in decoded
    }
    if not foreign or what != "recordings":
        return remark
    tests = " -o ".join(f"-iname '*{suffix}'" for suffix in sorted(foreign))
    return (
        f"{remark}. Convert {', '.join(sorted(foreign))} to wav with ffmpeg:\n"
        f"find {shlex.quote(str(folder))} -type f \\( {tests} \\) "
        """-exec sh -c 'for file; do ffmpeg -nostdin -i "$file" "${file%.*}.wav"; done' sh {} +"""
    )


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def list_files(folder: Path) -> list[str]:
    """List all files below a folder except hidden ones, as sorted relative POSIX paths.

    Raises:
        DataError: a folder cannot be opened, or a link points to a parent folder.
    """
    return sorted(_walk(str(folder), "", frozenset()))


def _walk(folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield the files below a folder. ``above`` has device and inode of the parent folders, to detect circular links."""
    entries = _entries(folder)
    status = Path(folder).stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise DataError(f"{shown_name(folder)} is a link to one of its parent folders. Remove the link.")
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
            f"the folder {shown_name(folder)} cannot be opened: {error.strerror}. Make it readable, or move it elsewhere."
        ) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to a folder. Broken links count as files."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_rows(root: Path, name: str, needed: tuple[str, ...], card: Card) -> list[dict[str, str]]:
    """Read the rows of a set's CSV file, all values as text.

    Raises:
        DataError: the file is missing, cannot be read, or lacks a column in ``needed``.
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
    """Read a text file of a set.

    Raises:
        DataError: the file is missing or cannot be read.
    """
    path = root / name
    if not path.exists():
        raise wrong_layout(root, card, f"there is no {name}")
    try:
        return read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{card.title}: {path} cannot be read: {error}") from error


def hold_out(rows: list[dict[str, Any]], column: str, values: Collection[int], card: Card) -> list[dict[str, Any]]:
    """Assign clips with the given column values to the test set and the rest to the training set. No values: no split.

    Raises:
        DataError: a value does not occur.
    """
    if not values:
        return rows
    known = sorted({row[column] for row in rows})
    for value in values:
        if value not in known:
            raise DataError(
                f"{card.title}: no clip has the test {column} {value}. Choose from {', '.join(map(str, known))}."
            )
    return [row | {"split": "test" if row[column] in values else "train"} for row in rows]


@dataclass(frozen=True, kw_only=True)
class FileDataset(Dataset):
    r"""Base class of data sets in a folder. A pattern parses the file names.

    A complete set::

        class MySet(FileDataset):
            pattern = r"(?P<group>\w+)/(?P<label>[AN])(?P<take>\d+)\.wav"
            codes = {"label": {"A": "anger", "N": "neutral"}, "take": int}

    A set with separate lists or tables overrides :meth:`rows`.
    """

    pattern: ClassVar[str] = ""
    """Regular expression for a path below the root. Named groups become columns: ``label``, ``group``, ``split``, extra columns."""
    codes: ClassVar[Mapping[str, Mapping[str, Any] | Callable[[str], Any]]] = {}
    """Decoding of a column: a table, or a function such as ``int``."""
    files: ClassVar[str] = f".*({'|'.join(map(re.escape, AUDIO_SUFFIXES))})"
    """Regular expression for the paths of the set's files. All must match ``pattern``; remaining files are skipped. The case is
    ignored unless the two expressions are equal."""

    root: Annotated[Path, Field(description="Folder with the files of the set.")]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        re.compile(cls.pattern)  # fails while the user's file is loaded, not later
        if cls.card is Dataset.card:
            cls.card = Card(cls.__name__, f"files whose paths match {cls.pattern}")

    def manifest(self) -> pa.Table:
        """List the clips.

        Raises:
            DataError: the root is missing or has another layout, or a file name does not match.
        """
        root = find_root(self.root, self.card)
        rows = [{"path": str(root / row["clip"]), **row} for row in self.rows(root)]
        if rows and not any(Path(row["path"]).is_file() for row in rows):
            raise wrong_layout(root, self.card, f"none of the {len(rows)} listed files, such as {rows[0]['clip']}, is")
        return make_manifest(rows, f"{self.card.title} in {root}")

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the clips: ``clip`` (path below ``root``) and the columns of the pattern.

        Raises:
            DataError: the set has no files, or a file name does not match.
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
        """Parse a file name into decoded columns."""
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
                f"remove the file."
            ) from None
        return columns
