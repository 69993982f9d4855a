"""Atomic writing of files, and errors for full disks and unwritable folders."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from raydfl.core.errors import ResourcesError

RESUME = "make room or make the folder writable, then resume the run: nothing that was committed is lost"
"""What to do when a run cannot write."""
CHOOSE_CACHE = "make room, or choose another folder with data.cache or the environment variable RAYDFL_CACHE"
"""What to do when features cannot be written."""

_UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Error codes for folders that are unwritable or cannot be created."""


def plain_name(name: object) -> str:
    """Return the name of one file in one folder. Whatever was read from a file or a listing passes here before it becomes a path.

    Raises:
        ValueError: it could lead out of that folder, or is no name.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in "/\\" or c < " " for c in name):
        raise ValueError(f"{name!r} is not the name of a file in one folder")
    return name


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading in binary mode, and nothing else: reading a pipe or a device could take forever.

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
    """Reject the status of anything that is not a regular file, before a library opens it by its name.

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


def displayed_path(path: str | os.PathLike[str]) -> str:
    """Return a path for messages, relative to the working directory if it is inside it.

    Never raises: the working directory may have been deleted.
    """
    with contextlib.suppress(OSError):
        relative = os.path.relpath(path)
        if not relative.startswith(".."):
            return relative
    return os.fspath(path)


def content_digest(path: Path) -> str:
    """Return a digest of a file's content. A process reads the file again only if its status shows a change.

    Raises:
        OSError: it cannot be read.
    """
    status = path.stat()
    return _content_digest(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=1024)
def _content_digest(path: Path, *status: int) -> str:
    return file_digest(path)


def file_digest(path: Path) -> str:
    """Return a digest of a file's bytes, which are read each time.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Has ``write`` fill a temporary file beside ``path`` and gives it that name once it is on the disk.

    After a crash or a power cut either the old or the whole new content is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
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
    """Remove the temporary files that processes killed inside :func:`write_atomically` left in a folder.

    Args:
        folder: in which nobody may be writing now, if ``idle`` is 0.
        idle: seconds for which a file must not have been written to.
        name: of the file that was being written.
    """
    for path in folder.glob(f".{name}.*.part"):
        with contextlib.suppress(FileNotFoundError):  # its writer was not dead but quick
            if time.time() - path.stat().st_mtime >= idle:
                path.unlink()


def write_durably(path: Path, content: bytes, advice: str = RESUME) -> None:
    """Write a file of a run atomically.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    with writing(path.parent, len(content), str(path.name), advice):
        write_atomically(path, lambda temporary: temporary.write_bytes(content))


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Return how many bytes can still be written below ``folder``, which need not exist yet."""
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
    """Turn a full disk, or a folder that cannot be written, into an error that names the folder and the sizes.

    Args:
        folder: where the files go.
        needed: bytes that all of them take.
        what: what they are, for the message.
        advice: what to do, for the message: :data:`RESUME` or :data:`CHOOSE_CACHE`.

    Raises:
        ResourcesError: an ``OSError`` of those kinds occurred inside.
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
        ResourcesError: the user has no home.
    """
    named = os.environ.get("RAYDFL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "raydfl"
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise ResourcesError(f"the features cannot be written to {named}: {error} {CHOOSE_CACHE}") from error


def user_config() -> Path:
    """Return the user's configuration folder of raydfl: ``raydfl`` below ``$XDG_CONFIG_HOME`` or ``~/.config``.

    Raises:
        RuntimeError: the user has no home.
    """
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    # The specification ignores relative paths. A stranger's folder could otherwise provide the user's configuration.
    return (named if named.is_absolute() else Path("~/.config").expanduser()) / "raydfl"
