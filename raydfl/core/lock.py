"""A lock that one process has at a time, on this machine or on another one that sees the same files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from raydfl.core.errors import RunDirectoryError


class FileLock:
    """A file that says who has the lock on its folder, which ends with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def acquire(self, wait: float) -> None:
        """Take the lock; the folder is made if it is not there.

        Raises:
            RunDirectoryError: another process has it for longer than ``wait`` seconds, or the file is a link.
            OSError: the folder cannot be made or written to.
        """
        if self.path.is_symlink():  # the lock would overwrite the link's target
            raise RunDirectoryError(
                f"{self.path} is a link to {os.path.realpath(self.path)}; remove the link, then try again"
            )
        deadline = time.monotonic() + wait
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = self.path.open("ab+")
            except FileNotFoundError:  # a run that could not begin has just taken its folder away
                if time.monotonic() > deadline + 1:
                    raise
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    holder = file.read().decode(errors="replace") or "unknown"
                    file.close()
                    raise RunDirectoryError(
                        f"{self.path.parent} is in use by process {holder}; wait for it or end it, then try again"
                    ) from None
                file.close()
                time.sleep(0.2)
                continue
            if self._is_there(file):
                break
            file.close()  # it was removed with its folder, by a run that could not begin, since it was opened
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
        self._file = file

    def _is_there(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let another process have it."""
        if self._file is not None:
            self._file.close()
            self._file = None


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock of a file, which ends with the process, however that ends.

    Args:
        path: the file, made if it is not there.
        waiting: called if another process has the lock, before it is waited for.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
