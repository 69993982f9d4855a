"""Files that are whole or absent, and what is said when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from raydfl.errors import ResourcesError


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Has ``write`` fill a temporary file beside ``path`` and gives it that name once it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written below ``folder``, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def full_disk(folder: Path, needed: int, what: str) -> ResourcesError:
    """The error for a disk without room for ``needed`` more bytes."""
    return ResourcesError(
        f"the disk of {folder} has {free_bytes(folder):,} bytes free and {what} need about {needed:,} (both at once, while they "
        "are put together); make room, or choose another folder with data.cache or the environment variable RAYDFL_CACHE"
    )


@contextlib.contextmanager
def writing(folder: Path, needed: int, what: str) -> Iterator[None]:
    """Turns a full disk, or a folder that cannot be written, into an error that names the folder and the sizes.

    Args:
        folder: where the files go.
        needed: bytes that all of them take.
        what: what they are, for the message.

    Raises:
        ResourcesError: an ``OSError`` of those kinds occurred inside.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full_disk(folder, needed, what) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ResourcesError(
                f"{what} cannot be written to {folder}: {error.strerror}; choose another folder with data.cache or the environment "
                "variable RAYDFL_CACHE"
            ) from error
        raise
