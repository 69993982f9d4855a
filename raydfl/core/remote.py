"""A folder behind a URI. Files appear in it whole or not at all, and what fails is tried again for half a minute."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pyarrow import ArrowException, ArrowInvalid, fs

from raydfl.core.errors import ConfigError, ResourcesError, first_line
from raydfl.core.files import plain_name, write_atomically, writing

SCHEMES = ("file", "s3", "gs")
"""Kinds of URI that are understood."""
_OBJECT_STORES = ("s3", "gcs")
"""Arrow's names of file systems in which an object appears when it is whole, and there are no folders."""
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds to wait before each further try."""
_HOPELESS = (PermissionError, NotADirectoryError, ArrowInvalid)
"""What trying again does not mend; ArrowInvalid is an option of a URI that does not exist."""
_NOBODY = "anonymous"
"""What stands before ``@bucket`` where no credentials are to be sent, as public buckets of Google have it."""
_BLOCK = 8 << 20
"""Bytes that are copied at a time."""

_T = TypeVar("_T")


def is_uri(text: object) -> bool:
    """Return whether it is a URI and not a path.

    >>> is_uri("s3://bucket/runs"), is_uri("/shared/runs"), is_uri("method.py:Class")
    (True, False, False)
    """
    return isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def check_path(text: str) -> None:
    """Refuse a path that was meant as a URI.

    Raises:
        ConfigError: a slash is missing.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        scheme, _, rest = text.partition(":/")
        raise ConfigError(
            f"{text} is a path whose first folder is {scheme + ':'!r}; a URI is written {scheme}://{rest}"
        )


def check_uri(uri: str, setting: str) -> None:
    """Refuse a URI that cannot be meant. Nothing is opened.

    Raises:
        ConfigError: naming the setting.
    """
    parts = urlsplit(uri)
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(
            f"{setting}: {uri} is not a kind of URI that is understood; known: {known}, or an absolute path"
        )
    if parts.username not in (None, _NOBODY) or parts.password or "key" in parts.query.lower():
        raise ConfigError(
            f"{setting}: a URI with credentials in it would be kept in the run's configuration; take them out, and give the "
            f"machine a role, or set them in the environment (AWS_ACCESS_KEY_ID ..., GOOGLE_APPLICATION_CREDENTIALS)"
        )
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(f"{setting}: {uri} must have three slashes and an absolute path: file:///shared/runs")
    if parts.scheme != "file" and not parts.netloc:
        raise ConfigError(f"{setting}: the bucket is missing in {uri}; write {parts.scheme}://bucket/folder")


def below(uri: str, name: str) -> str:
    """Return the URI of what lies in a folder; options after ``?`` stay at the end.

    >>> below("s3://bucket/runs?region=eu-central-1", "first")
    's3://bucket/runs/first?region=eu-central-1'
    """
    head, question, options = uri.partition("?")
    return f"{head.rstrip('/')}/{name}{question}{options}"


def parted(uri: str) -> tuple[str, str]:
    """Split a URI into that of the folder and the name in it: the inverse of :func:`below`."""
    head, question, options = uri.partition("?")
    folder, _, name = head.rstrip("/").rpartition("/")
    return f"{folder}{question}{options}", name


def open_file_system(uri: str) -> tuple[fs.FileSystem, str]:
    """Open Arrow's file system for a URI; return it and the path in it."""
    if uri.startswith("s3:") and "allow_delayed_open" not in uri:  # one request for a small file instead of three
        uri += f"{'&' if '?' in uri else '?'}allow_delayed_open=true"
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(uri)
    return found


class RemoteFolder:
    """A folder behind a URI, there or not yet. Names are relative, with ``/`` between their parts."""

    def __init__(self, uri: str, advice: str) -> None:
        """Opened when it is first used.

        Args:
            advice: what to do when it cannot be reached, for messages.
        """
        self.uri = uri
        self._advice = advice

    @cached_property
    def _opened(self) -> tuple[fs.FileSystem, str]:
        return open_file_system(self.uri)

    @property
    def _keeps_objects(self) -> bool:
        return self._opened[0].type_name.removeprefix("py::") in _OBJECT_STORES

    def _path(self, name: str) -> str:
        return f"{self._opened[1]}/{name}" if name else self._opened[1]

    def _tried(self, name: str, what: str, do: Callable[[], _T]) -> _T:
        """Call ``do`` until it succeeds, for a number of tries, and return its result.

        Raises:
            FileNotFoundError: at once; unless it is to be written.
            ResourcesError: it failed again and again, or can never succeed.
        """
        for pause in (*_PAUSES, None):
            try:
                return do()
            except (OSError, ArrowException) as error:
                if isinstance(error, FileNotFoundError) and what != "written":
                    raise
                hopeless = isinstance(error, _HOPELESS)
                if pause is None or hopeless:
                    tries = "" if hopeless else f", after {len(_PAUSES) + 1} tries"
                    raise ResourcesError(
                        f"{below(self.uri, name) if name else self.uri} cannot be {what}{tries}: "
                        f"{first_line(error)}; {self._advice}"
                    ) from error
                time.sleep(pause)
        raise AssertionError

    def is_file(self) -> bool:
        """Return whether the URI is that of a file.

        Raises:
            FileNotFoundError: there is nothing.
            ResourcesError: it cannot be reached.
        """

        def look() -> bool:
            kind = self._opened[0].get_file_info(self._opened[1]).type
            if kind == fs.FileType.NotFound:
                raise FileNotFoundError(self.uri)
            return bool(kind == fs.FileType.File)

        return self._tried("", "looked at", look)

    def files(self) -> dict[str, int]:
        """Return the bytes of all files at any depth, by name.

        Raises:
            ResourcesError: it cannot be reached, or names a file that could not lie below it.
        """

        def look() -> dict[str, int]:
            system, path = self._opened
            found = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
            return {info.path[len(path) :].lstrip("/"): info.size for info in found if info.type == fs.FileType.File}

        there = self._tried("", "listed", look)
        for name in there:
            try:
                for part in name.split("/"):
                    plain_name(part)
            except ValueError as error:
                raise ResourcesError(f"{self.uri} lists {name!r}, which is not below it; {self._advice}") from error
        return there

    def read(self, name: str) -> bytes | None:
        """Read the content of a file; ``None`` when it is not there.

        Raises:
            ResourcesError: it cannot be read.
        """

        def fetch() -> bytes:
            with self._opened[0].open_input_stream(self._path(name)) as source:
                content: bytes = source.read()
                return content

        try:
            return self._tried(name, "read", fetch)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Put a file there, in place of an earlier one.

        Raises:
            ResourcesError: it cannot be written.
        """
        self._tried(name, "written", lambda: self._put(name, [content]))

    def upload(self, path: Path, name: str) -> None:
        """Put a copy of a local file there, in place of an earlier one.

        Raises:
            ResourcesError: it cannot be written, or the local file not be read.
        """
        self._tried(name, "written", lambda: self._put(name, _blocks(path)))

    def _put(self, name: str, blocks: Iterable[bytes]) -> None:
        system, path = self._opened[0], self._path(name)
        temporary = path
        if not self._keeps_objects:
            folder, _, last = path.rpartition("/")
            temporary = f"{folder}/.{last}.part"
            system.create_dir(folder, recursive=True)
        with system.open_output_stream(temporary) as sink:
            for block in blocks:
                sink.write(block)
        if temporary != path:
            system.move(temporary, path)

    def download(self, name: str, path: Path, advice: str) -> None:
        """Copy a file to a local one, which then is there whole; ``name`` is empty where the URI is a file's own.

        Args:
            advice: what to do when the disk is full.

        Raises:
            FileNotFoundError: it is not there.
            ResourcesError: it cannot be read, or the disk is full.
        """

        def fetch(temporary: Path) -> None:
            with self._opened[0].open_input_stream(self._path(name)) as source, temporary.open("wb") as file:
                while block := source.read(_BLOCK):
                    with writing(path.parent, len(block), path.name, advice):
                        file.write(block)

        with writing(path.parent, 0, path.name, advice):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._tried(name, "read", lambda: write_atomically(path, fetch))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, those that are not there included.

        Raises:
            ResourcesError: one cannot be removed.
        """
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._tried(name, "removed", lambda name=name: self._opened[0].delete_file(self._path(name)))  # type: ignore[misc]


def _blocks(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block
