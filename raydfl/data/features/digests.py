"""Digests of clips' contents: of the file's bytes, or of the identity that the data set gives a clip.

Digests of files are remembered by (path, size, time of change), so that a second run only asks the file system for those. They do
not depend on where a file lies: a folder that was moved or copied is read once more, and then found in the cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import joblib
import pyarrow as pa

from raydfl.core.errors import DataError
from raydfl.core.files import check_regular, file_digest, write_atomically
from raydfl.core.progress import Progress
from raydfl.data.dataset import Dataset
from raydfl.data.packed import split_address

DIGEST_BYTES = 16
UNREADABLE = bytes(DIGEST_BYTES)
"""The digest of a file that cannot be read."""

_SETTLED_NS = 2_000_000_000
_NAMES = 1024
"""Files whose absolute paths are remembered: thousands of clips may lie in one."""
_SCHEMA = pa.schema(
    [("path", pa.string()), ("size", pa.int64()), ("changed", pa.int64()), ("digest", pa.binary(DIGEST_BYTES))]
)


def rows_of(manifest: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a manifest one by one, a few thousand at a time in memory."""
    for batch in manifest.to_batches(max_chunksize=4096):
        yield from batch.to_pylist()


def content_digests(
    dataset: Dataset, manifest: pa.Table, cache: Path, progress: Progress
) -> tuple[list[bytes], dict[int, str]]:
    """Return the digest of every clip's content, in the manifest's order, and why some could not be read.

    Args:
        manifest: columns ``clip``, ``path`` and whatever else the data set's ``identity`` asks for.
        cache: folder in which digests are remembered.

    Returns:
        Digests of 16 bytes, :data:`UNREADABLE` for files that cannot be read; and by row number the reason for those.
    """
    digests = [UNREADABLE] * manifest.num_rows
    files: dict[int, str] = {}
    parts: dict[int, str] = {}
    absolute = functools.lru_cache(maxsize=_NAMES)(lambda path: str(Path(path).absolute()))
    for index, row in enumerate(rows_of(manifest)):
        identity = dataset.identity(row)
        if identity is None:
            if row["path"] is None:
                raise DataError(
                    f"clip {row['clip']!r} has no path, and its data set's identity() says that the file decides its samples; "
                    f"give it a path, or return a string from identity()"
                )
            file, place = split_address(row["path"])
            files[index] = absolute(file)
            given = [part for part in (place, dataset.part(row)) if part is not None]
            if given:
                parts[index] = "".join(given)
        else:
            digests[index] = _digest(b"identity:" + identity.encode())
    unreadable: dict[int, str] = {}
    if files:
        for index, digest in file_digests(files, cache, progress).items():
            if isinstance(digest, OSError):
                unreadable[index] = f"cannot be read: {digest.strerror or digest}"
            else:
                digests[index] = _digest(b"part:" + digest + parts[index].encode()) if index in parts else digest
    return digests, unreadable


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def file_digests(files: Mapping[int, str], cache: Path, progress: Progress) -> dict[int, bytes | OSError]:
    """By number the digest (16 bytes) of a file's content, or why it cannot be read. Files may be larger than the memory.

    A file that has several numbers is read once.

    Args:
        files: absolute paths, at least one.
        cache: folder in which digests are remembered.
    """
    folder = os.path.commonpath({str(Path(path).parent) for path in set(files.values())})
    memory = cache / "digests" / f"{_digest(os.fsencode(folder)).hex()}.arrow"
    known = _read_memory(memory)
    digests: dict[str, bytes | OSError] = {}
    unknown: dict[str, tuple[int, int]] = {}
    for path in dict.fromkeys(files.values()):
        try:
            status = Path(path).stat()
            check_regular(status)
        except OSError as error:
            digests[path] = error
            continue
        state = status.st_size, status.st_mtime_ns
        size, changed, digest = known.get(path, (-1, -1, b""))
        if state == (size, changed):
            digests[path] = digest
        else:
            unknown[path] = state
    if unknown:
        digests |= _new_digests(unknown, known, memory, progress)
    return {index: digests[path] for index, path in files.items()}


def _new_digests(
    unknown: Mapping[str, tuple[int, int]],
    known: dict[str, tuple[int, int, bytes]],
    memory: Path,
    progress: Progress,
) -> dict[str, bytes | OSError]:
    """By path the digest of files that are not ``known``, or why they cannot be read. They are added to the memory.

    Args:
        unknown: by path size and time of change.
    """
    digests: dict[str, bytes | OSError] = {}

    def read(path: str) -> bytes | OSError:
        try:
            return bytes.fromhex(file_digest(Path(path)))
        except OSError as error:
            return error

    now = time.time_ns()
    learned = False
    with (
        ThreadPoolExecutor(
            min(8, 2 * joblib.cpu_count())
        ) as threads,  # reading and hashing both release the interpreter
        progress.steps("looking at clips", len(unknown)) as advance,
    ):
        found = threads.map(read, unknown)
        for (path, (size, changed)), digest_or_error in zip(unknown.items(), found, strict=True):
            advance()
            digests[path] = digest_or_error
            # A file changed this instant may change again within one tick of the file system's clock: look again next time.
            if isinstance(digest_or_error, bytes) and changed < now - _SETTLED_NS:
                known[path] = (size, changed, digest_or_error)
                learned = True
    if learned:
        write_atomically(memory, functools.partial(_write_memory, known))
    return digests


def _read_memory(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """By path size, time of change and digest; nothing when the file is missing or damaged, for it can be made again."""
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        if table.schema != _SCHEMA:
            return {}
    except (OSError, pa.ArrowInvalid):
        return {}
    columns = (table.column(name).to_pylist() for name in _SCHEMA.names)
    return {path: (size, changed, digest) for path, size, changed, digest in zip(*columns, strict=True)}


def _write_memory(known: Mapping[str, tuple[int, int, bytes]], path: Path) -> None:
    sizes, changes, digests = zip(*known.values(), strict=True)
    arrays = [list(known), list(sizes), list(changes), list(digests)]
    table = pa.table(
        [pa.array(values, field.type) for values, field in zip(arrays, _SCHEMA, strict=True)], schema=_SCHEMA
    )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        writer.write_table(table)
