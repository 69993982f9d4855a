"""Atomic writing of files, and errors for full disks and unwritable folders."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from raydfl.core.errors import ResourcesError

RESUME = "make room or make the folder writable, then resume the run: all commits are safe"
"""Remedy for a run folder that cannot be written."""
CHOOSE_CACHE = "make room, or choose another folder with data.cache or the environment variable RAYDFL_CACHE"
"""Remedy for a feature cache that cannot be written."""

_JSON_BYTES = 1 << 28
_UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Error codes for folders that are unwritable or cannot be created."""


def plain_name(name: object) -> str:
    """Check that a name denotes a file directly in a folder, and return it. Apply it to all names from files or listings.

    Raises:
        ValueError: the name could lead out of the folder, or is not a file name.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in "/\\" or c < " " for c in name):
        raise ValueError(f"{name!r} is not the name of a file in the folder")
    return name


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading in binary mode. Pipes and devices are rejected, because reading them could block.

    Raises:
        OSError: the file cannot be opened, or it is not a regular file.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(status: os.stat_result) -> None:
    """Reject a status unless it is a regular file's. Call it before a library opens a file by its name.

    Raises:
        OSError: it is a folder, a pipe, a socket or a device.
    """
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a file")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be read, or it is not a regular file.
    """
    with open_regular(path) as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Read a JSON file of at most 256 MiB.

    Raises:
        OSError: the file cannot be read, is too large, or is not a regular file.
        ValueError, RecursionError: it is not UTF-8 text, invalid JSON, or nested too deep.
    """
    with open_regular(path) as file:
        content = file.read(_JSON_BYTES + 1)
    if len(content) > _JSON_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {_JSON_BYTES >> 20} MiB")
    return json.loads(content)


def replace_non_finite(values: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by ``None``. Tuples become lists."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)


def display_path(path: str | os.PathLike[str]) -> str:
    """Format a path for messages, relative to the working directory if it is inside it."""
    with contextlib.suppress(OSError):  # the working directory may have been deleted
        relative = os.path.relpath(path)
        if not relative.startswith(".."):
            return relative
    return os.fspath(path)


def content_digest(path: Path) -> str:
    """Return a digest of a file's content, cached in the process until the file's status changes.

    Raises:
        OSError: it cannot be read.
    """
    status = path.stat()
    return _content_digest(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=1024)
def _content_digest(path: Path, *status: int) -> str:
    return file_digest(path)


def file_digest(path: Path) -> str:
    """Return a digest of a file's content, read afresh.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: after a crash or a power cut it has either the old or the new content.

    Args:
        path: the file.
        write: called with a temporary path in the same folder, to write the content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")  # unique: writers may compete
    try:
        temporary.touch(mode=0o666 & path.parent.stat().st_mode)  # in a private folder every file is private
        write(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)  # a rename is on the disk only when the folder is
    finally:
        temporary.unlink(missing_ok=True)


def make_private_folder(folder: Path) -> None:
    """Create a folder, and its missing parents, with access for their owner only. An existing folder keeps its mode."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def remove_parts(folder: Path, idle: float = 0.0, name: str = "*") -> None:
    """Remove temporary files of processes that were killed inside :func:`write_atomically`.

    Args:
        folder: the folder. With ``idle`` 0, no process may be writing to it.
        idle: minimum time since the last write to a file, in seconds.
        name: name or pattern of the target file.
    """
    for path in folder.glob(f".{name}.*.part"):
        with contextlib.suppress(FileNotFoundError):  # its writer has just completed it
            if time.time() - path.stat().st_mtime >= idle:
                path.unlink()


def write_durably(path: Path, content: bytes, advice: str = RESUME) -> None:
    """Write a run's file atomically and durably.

    Args:
        path: the file.
        content: its bytes.
        advice: remedy for the error message.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    with writing(path.parent, len(content), str(path.name), advice):
        write_atomically(path, lambda temporary: temporary.write_bytes(content))


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk. They then survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of ``folder``. The folder need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def full_disk(folder: Path, needed: int, what: str, advice: str) -> ResourcesError:
    """Return the error for a disk without room for ``needed`` more bytes."""
    return ResourcesError(
        f"the disk of {folder} is full: it has {free_bytes(folder):,} bytes free and {what} need about {needed:,}; {advice}"
    )


@contextlib.contextmanager
def writing(folder: Path, needed: int, what: str, advice: str) -> Iterator[None]:
    """Convert errors of a full disk or an unwritable folder to an error with the folder, the sizes and a remedy.

    Args:
        folder: the folder of the files.
        needed: total size of the files in bytes.
        what: the files, for the message.
        advice: the remedy, for the message: :data:`RESUME` or :data:`CHOOSE_CACHE`.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full_disk(folder, needed, what, advice) from error
        if error.errno in _UNWRITABLE:
            raise ResourcesError(f"{what} cannot be written to {folder}: {error.strerror}; {advice}") from error
        raise


def default_cache() -> Path:
    """Return ``$RAYDFL_CACHE``, or ``raydfl`` below ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        ResourcesError: the user has no home folder.
    """
    cache = os.environ.get("RAYDFL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "raydfl"
    try:
        return Path(cache).expanduser()
    except RuntimeError as error:
        raise ResourcesError(f"the features cannot be written to {cache}: {error} {CHOOSE_CACHE}") from error


def user_config() -> Path:
    """Return the user's configuration folder of raydfl: ``raydfl`` below ``$XDG_CONFIG_HOME`` or ``~/.config``.

    Raises:
        RuntimeError: the user has no home folder.
    """
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    # The specification ignores relative paths. With them, any working directory could provide the configuration.
    return (base if base.is_absolute() else Path("~/.config").expanduser()) / "raydfl"
