"""Locks between processes, also on several machines that share a file system."""

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
    """Exclusive lock on a folder. The lock file names its holder; the lock ends with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def acquire(self, wait: float) -> None:
        """Acquire the lock, creating its folder if needed.

        Raises:
            RunDirectoryError: another process holds it for longer than ``wait`` seconds, or the file is a link.
            OSError: the folder cannot be created or written to.
        """
        if self.path.is_symlink():  # the lock would overwrite the link's target
            raise RunDirectoryError(
                f"{self.path} is a link to {os.path.realpath(self.path)}. Remove the link, then try again."
            )
        deadline = time.monotonic() + wait
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = self.path.open("ab+")
            except FileNotFoundError:  # a run that failed to start has just removed its folder
                if time.monotonic() > deadline + 1:  # also with wait=0 the folder may vanish between mkdir and open
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
                        f"{self.path.parent} is in use by process {holder}. Wait for it or end it, then try again."
                    ) from None
                file.close()
                time.sleep(0.2)
                continue
            if self._is_current(file):
                break
            file.close()  # a run that failed to start has removed it, with its folder, since it was opened
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
        self._file = file

    def _is_current(self, file: IO[bytes]) -> bool:
        """Return whether the open file is still the one at the path."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None


@contextlib.contextmanager
def hold_lock(path: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock on a file. A killed process releases it, too.

    Args:
        path: the lock file, created if missing.
        on_wait: called before waiting for another process.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
