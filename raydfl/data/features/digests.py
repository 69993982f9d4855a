"""Digests of clips' contents: of a file's bytes, or of a clip's identity in its data set.

A digest table in the cache has the digest of each file by path, size and modification time. A second run reads only these from the
file system. Digests do not depend on paths: after a move or copy, a folder is read again and then found in the cache.
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
from raydfl.core.progress import ProgressReporter
from raydfl.data.dataset import Dataset
from raydfl.data.packed import split_address

DIGEST_BYTES = 16
UNREADABLE = bytes(DIGEST_BYTES)
"""Digest of an unreadable file."""

_SETTLED_NS = 2_000_000_000
_NAMES = 1024
"""Number of cached absolute paths. A file may contain thousands of clips."""
_SCHEMA = pa.schema(
    [("path", pa.string()), ("size", pa.int64()), ("changed", pa.int64()), ("digest", pa.binary(DIGEST_BYTES))]
)


def iterate_rows(manifest: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows of a manifest, with a few thousand in memory at a time."""
    for batch in manifest.to_batches(max_chunksize=4096):
        yield from batch.to_pylist()


def digest_clips(
    dataset: Dataset, manifest: pa.Table, cache: Path, progress: ProgressReporter
) -> tuple[list[bytes], dict[int, str]]:
    """Compute the digest of every clip's content.

    Args:
        dataset: The clips' data set.
        manifest: Table with the columns ``clip``, ``path`` and those used by the data set's ``identity``.
        cache: Folder of the digest table.
        progress: Shows the progress.

    Returns:
        Digests of 16 bytes in the manifest's order, :data:`UNREADABLE` for unreadable files, and the reasons by row number.

    Raises:
        DataError: A clip has neither a path nor an identity.
    """
    digests = [UNREADABLE] * manifest.num_rows
    files: dict[int, str] = {}
    parts: dict[int, str] = {}
    absolute = functools.lru_cache(maxsize=_NAMES)(lambda path: str(Path(path).absolute()))
    for index, row in enumerate(iterate_rows(manifest)):
        identity = dataset.identity(row)
        if identity is None:
            if row["path"] is None:
                raise DataError(
                    f"Clip {row['clip']!r} has no path, but the identity() of its data set returns None, which stands for the "
                    f"file's content. Add a path, or return a string from identity()."
                )
            file, place = split_address(row["path"])
            files[index] = absolute(file)
            selectors = [part for part in (place, dataset.part(row)) if part is not None]
            if selectors:
                parts[index] = "".join(selectors)
        else:
            # Prefixes keep identities and parts apart from contents of whole files.
            digests[index] = _digest(b"identity:" + identity.encode())
    unreadable: dict[int, str] = {}
    if files:
        for index, digest in digest_files(files, cache, progress).items():
            if isinstance(digest, OSError):
                unreadable[index] = f"cannot be read: {digest.strerror or digest}"
            else:
                digests[index] = _digest(b"part:" + digest + parts[index].encode()) if index in parts else digest
    return digests, unreadable


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def digest_files(files: Mapping[int, str], cache: Path, progress: ProgressReporter) -> dict[int, bytes | OSError]:
    """Compute the digest of each file's content. Files may exceed the memory, and are read once.

    Args:
        files: Absolute paths by number, at least one.
        cache: Folder of the digest table.
        progress: Shows the progress.

    Returns:
        By number the digest, 16 bytes, or the error of an unreadable file.
    """
    folder = os.path.commonpath({str(Path(path).parent) for path in set(files.values())})
    table = cache / "digests" / f"{_digest(os.fsencode(folder)).hex()}.arrow"
    known = _read_table(table)
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
        digests |= _digest_new_files(unknown, known, table, progress)
    return {index: digests[path] for index, path in files.items()}


def _digest_new_files(
    unknown: Mapping[str, tuple[int, int]],
    known: dict[str, tuple[int, int, bytes]],
    table: Path,
    progress: ProgressReporter,
) -> dict[str, bytes | OSError]:
    """Compute the digests of files missing in the table, and add them.

    Args:
        unknown: Size and modification time by path.
        known: Size, modification time and digest by path. New digests are added.
        table: Path of the digest table.
        progress: Shows the progress.
    """
    digests: dict[str, bytes | OSError] = {}

    def read(path: str) -> bytes | OSError:
        try:
            return bytes.fromhex(file_digest(Path(path)))
        except OSError as error:
            return error

    now = time.time_ns()
    changed_table = False
    with (
        # Reading and hashing release the interpreter lock.
        ThreadPoolExecutor(min(8, 2 * joblib.cpu_count())) as threads,
        progress.steps("looking at clips", len(unknown)) as advance,
    ):
        results = threads.map(read, unknown)
        for (path, (size, changed)), result in zip(unknown.items(), results, strict=True):
            advance()
            digests[path] = result
            # A recently changed file may change again within one tick of the file system's clock, so it is read again next time.
            if isinstance(result, bytes) and changed < now - _SETTLED_NS:
                known[path] = (size, changed, result)
                changed_table = True
    if changed_table:
        write_atomically(table, functools.partial(_write_table, known))
    return digests


def _read_table(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return size, modification time and digest by path. A missing or damaged table is empty, because it can be rebuilt."""
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        if table.schema != _SCHEMA:
            return {}
    except Exception:  # noqa: BLE001  (damaged in any way: made again)
        return {}
    columns = (table.column(name).to_pylist() for name in _SCHEMA.names)
    return {path: (size, changed, digest) for path, size, changed, digest in zip(*columns, strict=True)}


def _write_table(known: Mapping[str, tuple[int, int, bytes]], path: Path) -> None:
    sizes, changes, digests = zip(*known.values(), strict=True)
    arrays = [list(known), list(sizes), list(changes), list(digests)]
    table = pa.table(
        [pa.array(values, field.type) for values, field in zip(arrays, _SCHEMA, strict=True)], schema=_SCHEMA
    )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        writer.write_table(table)
