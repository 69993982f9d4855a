"""Recordings behind a URI, copied into the feature cache once and read from there."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from raydfl.core.errors import DataError
from raydfl.core.files import CHOOSE_CACHE, default_cache, write_durably, writing
from raydfl.core.lock import hold_lock
from raydfl.core.progress import Progress, Silent
from raydfl.core.remote import RemoteFolder, split_uri

_AT_ONCE = 16
"""Files that are copied at a time: each of many small ones mostly waits for its answer."""
_COMPLETE = "complete.json"
"""There when everything is."""


def local_copy(uri: str, cache: Path | None) -> Path:
    """Return where the copy of a folder, or of a file, lies or will lie."""
    folder = (default_cache() if cache is None else cache).expanduser().absolute()
    digest = hashlib.blake2b(uri.encode(), digest_size=8).hexdigest()
    return folder / "recordings" / digest / split_uri(uri)[1]


def fetch_recordings(uri: str, cache: Path | None, progress: Progress | None = None) -> Path:
    """Copy everything at a URI, unless that has been done; an interrupted copy is continued.

    Safe to call from several processes at once: the first copies, the others wait.

    Returns:
        The local copy.

    Raises:
        DataError: there is nothing at the URI.
        ResourcesError: it cannot be read, or the disk is full.
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


def _copy(uri: str, copy: Path, progress: Progress) -> int:
    """Return the number of files that are there now."""
    place = RemoteFolder(
        uri, "check the URI and the access to it; what is copied already stays, and the same command goes on"
    )
    try:
        if place.is_file():
            place.download("", copy, CHOOSE_CACHE)
            return 1
    except FileNotFoundError:
        raise DataError(f"there is nothing at {uri}; check the URI") from None
    there = {name: size for name, size in place.files().items() if size >= 0}
    if not there:
        raise DataError(f"there are no files at {uri}; check the URI")
    missing = [
        name for name, size in there.items() if not (path := copy / name).exists() or path.stat().st_size != size
    ]
    with progress.steps("copying recordings", len(there)) as advance, ThreadPoolExecutor(_AT_ONCE) as threads:
        advance(len(there) - len(missing))
        copies = [threads.submit(partial(place.download, name, copy / name, CHOOSE_CACHE)) for name in missing]
        try:
            for one in copies:
                one.result()
                advance()
        except BaseException:
            for one in copies:
                one.cancel()
            raise
    return len(there)
