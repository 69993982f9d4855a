"""What the sets that live in folders share: finding the root, listing audio files, and saying what is wrong with a layout."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path

from raydfl.data.clips import AUDIO_SUFFIXES
from raydfl.data.dataset import Card
from raydfl.errors import DataError


def find_root(root: Path, card: Card) -> Path:
    """The set's root as an absolute path.

    Raises:
        DataError: there is no such folder.
    """
    folder = root.expanduser().resolve()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        source = f" The set is at {card.url}" if card.url else ""
        raise DataError(f"{card.title}: the root {folder} {what}. Expected a folder with {card.layout}.{source}")
    return folder


def wrong_layout(folder: Path, card: Card, detail: str) -> DataError:
    """The error for a root that exists but is laid out in another way: what was expected and what is there."""
    entries = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in os.scandir(folder))
    shown = ", ".join(entries[:8]) + (f", ... ({len(entries)} entries)" if len(entries) > 8 else "")
    return DataError(f"{card.title}: {detail} in {folder}. Expected {card.layout}. Found: {shown or 'an empty folder'}")


def list_audio(folder: Path, suffixes: tuple[str, ...] = AUDIO_SUFFIXES) -> list[str]:
    """The audio files at any depth below ``folder``, as sorted POSIX paths relative to it.

    Hidden files and folders are left out: unpacking on a Mac leaves ``._name.wav`` files that hold no sound. Symbolic links
    to folders are followed.
    """
    return sorted(_walk(str(folder), "", suffixes))


def _walk(folder: str, prefix: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/", suffixes)
            elif entry.name.lower().endswith(suffixes):
                yield prefix + entry.name


def match_name(pattern: re.Pattern[str], name: str, card: Card, form: str) -> re.Match[str]:
    """What a set's file name says.

    Args:
        name: file name, without folders.
        form: the pattern in the words of the set's documentation, for the message.

    Raises:
        DataError: the name is not of that form.
    """
    found = pattern.fullmatch(name)
    if found is None:
        raise DataError(f"{card.title}: the file name {name!r} is not of the form {form}; rename or remove the file")
    return found


def read_rows(path: Path, needed: tuple[str, ...], card: Card) -> list[dict[str, str]]:
    """The rows of a set's CSV file, all values as text.

    Raises:
        DataError: it cannot be read, or lacks one of the columns ``needed``.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or [])
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{card.title}: {path} cannot be read: {error}") from error
    for name in needed:
        if name not in names:
            raise DataError(f"{card.title}: {path} has no column {name!r}; its columns: {', '.join(names) or 'none'}")
    for number, row in enumerate(rows, start=2):
        if any(row[name] is None for name in needed):
            raise DataError(f"{card.title}: line {number} of {path} has fewer values than the header has columns")
    return rows


def fold_split(fold: int, test_folds: tuple[int, ...]) -> str | None:
    """The split of a clip of ``fold`` when ``test_folds`` are held out; ``None`` when no fold is."""
    if not test_folds:
        return None
    return "test" if fold in test_folds else "train"


def check_test_folds(test_folds: tuple[int, ...], folds: set[int], card: Card, what: str) -> None:
    """Refuses a fold (a session) to test on that no clip belongs to.

    Raises:
        DataError: naming the folds that there are.
    """
    for fold in test_folds:
        if fold not in folds:
            there = ", ".join(str(number) for number in sorted(folds))
            raise DataError(f"{card.title}: no clip is of {what} {fold}, which is to be tested on; there are {there}")
