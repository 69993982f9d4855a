"""Remote folders by URI, with atomic writes and retries for half a minute."""

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
"""Supported kinds of URI."""
_OBJECT_STORES = ("s3", "gcs")
"""Arrow's names of file systems with atomic writes and without folders."""
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses between tries, in seconds."""
_HOPELESS = (PermissionError, NotADirectoryError, ArrowInvalid)
"""Errors without a retry. ArrowInvalid: the URI has an unknown option."""
_ANONYMOUS = "anonymous"
"""User name for access without credentials, ``gs://anonymous@bucket``, as for public buckets of Google."""
_BLOCK = 8 << 20
"""Bytes per read of a copy."""

_T = TypeVar("_T")


def is_uri(text: object) -> bool:
    """Return whether a value is a URI.

    >>> is_uri("s3://bucket/runs"), is_uri("/shared/runs"), is_uri("method.py:Class")
    (True, False, False)
    """
    return isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def check_path(text: str) -> None:
    """Reject a path that looks like a URI with a missing slash.

    Raises:
        ConfigError: a slash is missing.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        scheme, _, rest = text.partition(":/")
        raise ConfigError(
            f"{text} is a path with the first folder {scheme + ':'!r}. If you mean a URI, write {scheme}://{rest}."
        )


def check_uri(uri: str, setting: str) -> None:
    """Reject an unsupported or malformed URI, without opening it.

    Raises:
        ConfigError: the URI is of an unknown kind, lacks its bucket or slashes, or contains credentials.
    """
    parts = urlsplit(uri)
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{setting}: {uri} is not a supported kind of URI. Use one of {known}, or an absolute path.")
    if parts.username not in (None, _ANONYMOUS) or parts.password or "key" in parts.query.lower():
        raise ConfigError(
            f"{setting}: the URI contains credentials, and the run's configuration would store them. Remove them, and give the "
            f"machine a role, or set them in the environment (AWS_ACCESS_KEY_ID ..., GOOGLE_APPLICATION_CREDENTIALS)."
        )
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(f"{setting}: {uri} must have three slashes and an absolute path: file:///shared/runs")
    if parts.scheme != "file" and not parts.netloc:
        raise ConfigError(f"{setting}: the bucket is missing in {uri}. Write {parts.scheme}://bucket/folder.")


def below(uri: str, name: str) -> str:
    """Return the URI of a file or folder in a folder. Options after ``?`` stay at the end.

    >>> below("s3://bucket/runs?region=eu-central-1", "first")
    's3://bucket/runs/first?region=eu-central-1'
    """
    head, question, options = uri.partition("?")
    return f"{head.rstrip('/')}/{name}{question}{options}"


def split_uri(uri: str) -> tuple[str, str]:
    """Split a URI into its folder's URI and its last name, the inverse of :func:`below`."""
    head, question, options = uri.partition("?")
    folder, _, name = head.rstrip("/").rpartition("/")
    return f"{folder}{question}{options}", name


def open_file_system(uri: str) -> tuple[fs.FileSystem, str]:
    """Open Arrow's file system for a URI. Returns it and the path in it."""
    if uri.startswith("s3:") and "allow_delayed_open" not in uri:  # one request per small file instead of three
        uri += f"{'&' if '?' in uri else '?'}allow_delayed_open=true"
    system_and_path: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(uri)
    return system_and_path


class RemoteFolder:
    """A folder at a URI. It need not exist. File names are relative, with ``/`` between their parts."""

    def __init__(self, uri: str, advice: str) -> None:
        """Open the folder at first use.

        Args:
            uri: the folder's URI, checked by :func:`check_uri`.
            advice: remedy for an unreachable folder, for error messages.
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

    def _retry(self, name: str, participle: str, do: Callable[[], _T]) -> _T:
        """Call ``do`` until it succeeds, with a limited number of tries, and return its result.

        Args:
            name: the file, for the error message.
            participle: the operation, for the error message: ``"read"``, ``"written"`` ...
            do: the operation.

        Raises:
            FileNotFoundError: the file does not exist, except when writing. There is no retry.
            ResourcesError: all tries failed, or a retry is hopeless.
        """
        for pause in (*_PAUSES, None):
            try:
                return do()
            except (OSError, ArrowException) as error:
                if isinstance(error, FileNotFoundError) and participle != "written":
                    raise
                hopeless = isinstance(error, _HOPELESS)
                if pause is None or hopeless:
                    tries = "" if hopeless else f", after {len(_PAUSES) + 1} tries"
                    raise ResourcesError(
                        f"{below(self.uri, name) if name else self.uri} cannot be {participle}{tries}: "
                        f"{first_line(error)}; {self._advice}"
                    ) from error
                time.sleep(pause)
        raise AssertionError  # unreachable: the last try returns or raises

    def is_file(self) -> bool:
        """Return whether the URI names a file and not a folder.

        Raises:
            FileNotFoundError: neither exists.
            ResourcesError: the file system is unreachable.
        """

        def look() -> bool:
            kind = self._opened[0].get_file_info(self._opened[1]).type
            if kind == fs.FileType.NotFound:
                raise FileNotFoundError(self.uri)
            return bool(kind == fs.FileType.File)

        return self._retry("", "looked at", look)

    def files(self) -> dict[str, int]:
        """Return the size of all files at any depth, in bytes, by name.

        Raises:
            ResourcesError: the folder is unreachable, or lists a file outside it.
        """

        def look() -> dict[str, int]:
            system, path = self._opened
            infos = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
            return {info.path[len(path) :].lstrip("/"): info.size for info in infos if info.type == fs.FileType.File}

        sizes = self._retry("", "listed", look)
        for name in sizes:
            try:
                for part in name.split("/"):
                    plain_name(part)
            except ValueError as error:
                raise ResourcesError(f"{self.uri} lists {name!r}, which is not below it; {self._advice}") from error
        return sizes

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or ``None`` if it does not exist.

        Raises:
            ResourcesError: the file cannot be read.
        """

        def fetch() -> bytes:
            with self._opened[0].open_input_stream(self._path(name)) as source:
                content: bytes = source.read()
                return content

        try:
            return self._retry(name, "read", fetch)
        except FileNotFoundError:
            return None

    def read_range(self, name: str, offset: int, length: int) -> bytes | None:
        """Return a range of a file, shorter at the end of the file, or ``None`` if the file does not exist.

        Args:
            name: the file.
            offset: first byte.
            length: number of bytes.

        Raises:
            ResourcesError: the file cannot be read.
        """

        def fetch() -> bytes:
            with self._opened[0].open_input_file(self._path(name)) as source:
                content: bytes = source.read_at(length, offset)
                return content

        try:
            return self._retry(name, "read", fetch)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically, replacing an existing file.

        Raises:
            ResourcesError: the file cannot be written.
        """
        self._retry(name, "written", lambda: self._put(name, [content]))

    def upload(self, path: Path, name: str) -> None:
        """Upload a local file, replacing an existing file.

        Raises:
            ResourcesError: the remote file cannot be written, or the local file cannot be read.
        """
        self._retry(name, "written", lambda: self._put(name, _read_blocks(path)))

    def _put(self, name: str, blocks: Iterable[bytes]) -> None:
        """Write blocks to a file atomically."""
        system, path = self._opened[0], self._path(name)
        temporary = path
        if not self._keeps_objects:  # object stores show complete objects only; file systems need a rename
            folder, _, last = path.rpartition("/")
            temporary = f"{folder}/.{last}.part"
            system.create_dir(folder, recursive=True)
        with system.open_output_stream(temporary) as sink:
            for block in blocks:
                sink.write(block)
        if temporary != path:
            system.move(temporary, path)

    def download(self, name: str, path: Path, advice: str) -> None:
        """Download a file, writing the local file atomically.

        Args:
            name: the file. Empty: the URI itself names a file.
            path: the local file.
            advice: remedy for a full disk, for the error message.

        Raises:
            FileNotFoundError: the remote file does not exist.
            ResourcesError: it cannot be read, or the disk is full.
        """

        def fetch(temporary: Path) -> None:
            with self._opened[0].open_input_stream(self._path(name)) as source, temporary.open("wb") as file:
                while block := source.read(_BLOCK):
                    with writing(path.parent, len(block), path.name, advice):
                        file.write(block)

        with writing(path.parent, 0, path.name, advice):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._retry(name, "read", lambda: write_atomically(path, fetch))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. Missing files are ignored.

        Raises:
            ResourcesError: a file cannot be removed.
        """
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._retry(name, "removed", lambda name=name: self._opened[0].delete_file(self._path(name)))  # type: ignore[misc]


def _read_blocks(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block
