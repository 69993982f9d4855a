"""Local copies of recordings at a URI, in the feature cache."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from raydfl.core.errors import DataError
from raydfl.core.files import CHOOSE_CACHE, default_cache, write_durably, writing
from raydfl.core.lock import hold_lock
from raydfl.core.progress import ProgressReporter, Silent
from raydfl.core.remote import RemoteFolder, split_uri

_AT_ONCE = 16
"""Files that are copied concurrently, because small files spend most of the time waiting for the server."""
_COMPLETE = "complete.json"
"""Marker of a complete copy."""


def local_copy(uri: str, cache: Path | None) -> Path:
    """Return the path of the local copy of a folder or file. The copy may not exist yet."""
    folder = (default_cache() if cache is None else cache).expanduser().absolute()
    digest = hashlib.blake2b(uri.encode(), digest_size=8).hexdigest()
    return folder / "recordings" / digest / split_uri(uri)[1]


def fetch_recordings(uri: str, cache: Path | None, progress: ProgressReporter | None = None) -> Path:
    """Copy the file or folder at a URI to the cache, or resume an interrupted copy.

    Several processes may call this function concurrently. The first copies, and the rest wait.

    Args:
        uri: URI of a file or folder.
        cache: folder of the cache; ``None``: the default cache.
        progress: shows the number of copied files.

    Returns:
        Path of the local copy.

    Raises:
        DataError: there is nothing at the URI.
        ResourcesError: the URI cannot be read, or the disk is full.
    """
    copy = local_copy(uri, cache)
    complete = copy.parent / _COMPLETE
    with writing(copy.parent, 0, "the recordings", CHOOSE_CACHE):
        if complete.exists():
            return copy
        copy.parent.mkdir(parents=True, exist_ok=True)
        lock = copy.parent / ".lock"
        lock.touch()
    with hold_lock(lock):
        if not complete.exists():
            files = _copy(uri, copy, progress or Silent())
            write_durably(complete, json.dumps({"uri": uri, "files": files}, indent=1).encode(), CHOOSE_CACHE)
    return copy


def _copy(uri: str, copy: Path, progress: ProgressReporter) -> int:
    """Copy missing files, and return the number of files in the copy."""
    remote = RemoteFolder(uri, "check the URI and your access to it. Repeat the command to resume the copy")
    try:
        if remote.is_file():
            remote.download("", copy, CHOOSE_CACHE)
            return 1
    except FileNotFoundError:
        raise DataError(f"there is nothing at {uri}. Check the URI") from None
    files = {name: size for name, size in remote.files().items() if size >= 0}
    if not files:
        raise DataError(f"there are no files at {uri}. Check the URI")
    # Downloads are atomic, so a file of the right size is complete.
    missing = [
        name for name, size in files.items() if not (path := copy / name).exists() or path.stat().st_size != size
    ]
    with progress.steps("copying recordings", len(files)) as advance, ThreadPoolExecutor(_AT_ONCE) as threads:
        advance(len(files) - len(missing))
        copies = [threads.submit(partial(remote.download, name, copy / name, CHOOSE_CACHE)) for name in missing]
        try:
            for task in copies:
                task.result()
                advance()
        except BaseException:
            for task in copies:
                task.cancel()
            raise
    return len(files)
