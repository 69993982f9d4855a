"""Emulation of a folder on a network file system with several nodes (nfs(5), default mount)."""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

REAL_OPEN = io.open


class SharedDisk:
    """A folder whose files reach other nodes when their writer closes or syncs them.

    Creating, truncating, renaming and removing a file take effect at once. Each process is a separate node. Within :meth:`on` a
    thread runs on a given node.

    Args:
        folder: the shared folder.
        caches: data that nodes have not published. Files ``NODE@NAME.unsynced`` mark files with unsynced writes of a node.
    """

    def __init__(self, folder: Path, caches: Path) -> None:
        self.folder, self.caches = os.path.realpath(folder), caches
        self.open_files: dict[tuple[str, str], _CachedFile] = {}
        """The files that are open for writing, by node and path."""
        self._here = threading.local()
        caches.mkdir(exist_ok=True)

    @property
    def node(self) -> str:
        return getattr(self._here, "node", f"node{os.getpid()}")

    @contextmanager
    def on(self, node: str) -> Iterator[None]:
        """Run the block on a node."""
        self._here.node = node
        try:
            yield
        finally:
            del self._here.node

    def mount(self, patch: pytest.MonkeyPatch) -> None:
        """Apply the rules to this process."""
        patch.setattr(io, "open", self._open)  # pathlib's
        patch.setattr("builtins.open", self._open)
        patch.setattr(os, "fsync", self._sync)

    def unsynced(self) -> set[str]:
        """Return the names of the files that a power cut could damage."""
        return {path.stem.partition("@")[2] for path in self.caches.glob("*.unsynced")}

    def marker(self, path: str) -> Path:
        return self.caches / f"{self.node}@{Path(path).name}.unsynced"

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> IO[Any]:
        path = "" if isinstance(file, int) else os.path.realpath(file)
        if not path.startswith(self.folder + os.sep) or path.endswith(".lock"):  # a lock belongs to the file itself
            return REAL_OPEN(file, mode, buffering, *rest, **named)
        if not set(mode) & set("wax+"):
            own = self.open_files.get((self.node, path))
            return REAL_OPEN(own.cache if own else file, mode, buffering, *rest, **named)
        REAL_OPEN(file, mode.replace("t", "").replace("b", "") + "b").close()  # creates, truncates or refuses
        raw = _CachedFile(self, path, mode)
        if buffering == 0:
            return raw  # type: ignore[return-value]
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **named)

    def _sync(self, descriptor: int) -> None:
        """Sync a file by any of its descriptors on this node."""
        synced = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        for (node, path), file in list(self.open_files.items()):
            if node == self.node and synced in (path, str(file.cache)):
                file.publish()
                synced = path
        self.marker(synced).unlink(missing_ok=True)


class _CachedFile(io.FileIO):
    """A file with its content in the cache of its node until it is published."""

    def __init__(self, disk: SharedDisk, path: str, mode: str) -> None:
        self.disk, self.path, self.key = disk, path, (disk.node, path)
        self.cache = disk.caches / os.urandom(8).hex()
        shutil.copyfile(path, self.cache)
        super().__init__(str(self.cache), mode.replace("b", "").replace("t", "").replace("x", "w"))
        disk.open_files[self.key] = self

    def write(self, block: Any) -> int:
        self.disk.marker(self.path).touch()
        return super().write(block)

    def publish(self) -> None:
        with REAL_OPEN(self.path, "r+b") as file, REAL_OPEN(self.cache, "rb") as cache:
            file.write(cache.read())
            file.truncate()

    def close(self) -> None:
        if not self.closed:
            super().close()
            del self.disk.open_files[self.key]
            self.publish()
            self.cache.unlink()
