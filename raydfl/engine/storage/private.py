"""Storage of clients' private state: append-only segment files and an index of the newest records."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from raydfl.core.errors import RaydflError, ResourcesError, RunDirectoryError, translate_failures
from raydfl.core.files import RESUME, make_private_folder, plain_name, sync, writing
from raydfl.core.remote import RemoteFolder, below
from raydfl.core.tensor_file import parts_of_safetensors, to_safetensors

_RECENT = 4096
"""Rows that an index may always hold in addition to its base."""
_PART = 16
"""An index gets a new base if it has more rows than 1 / 16 of its base's rows."""
_UNREACHABLE = "check the URI and the access of every node to it, then resume the run: all commits are safe"
"""Remedy for an unusable URI of private state."""
_LARGEST = 64 << 20
"""Maximum bytes of records in memory before an upload."""
_COPIED = 1 << 22
"""Largest record, in bytes, to join before writing. Joining is faster than one system call per tensor."""
_OURS = re.compile(r"\d{6,}-\S+\.seg|[0-9a-f]{16}\.index|\d{6,}-[0-9a-f]{8}\.version|\..+\.part")
"""Names of a run's own files in its folder of private state."""


@dataclass(frozen=True, slots=True)
class PrivateRef:
    """Location of a client's private state: a record in a segment file."""

    segment: str
    offset: int
    length: int
    checksum: int


class PrivateIndex(Mapping[int, PrivateRef]):
    """Immutable mapping from a client's index to its newest private record.

    A commit stores only the rows that changed since the base, and the name of the base's file. Therefore the time of a round does
    not grow with the number of clients. With a million clients, a full table would take half of a small round's time.

    Args:
        segments: Names of the segment files. Each holds at least one of the records.
        table: int64 [5, clients], ascending by client index. The rows are client index, position in ``segments``, offset, length
            and checksum.
        base: Index of older records without a base of its own. Some of its records may be superseded.
    """

    def __init__(
        self, segments: tuple[str, ...] = (), table: np.ndarray | None = None, base: PrivateIndex | None = None
    ) -> None:
        self.segments = segments
        self.table = np.zeros((5, 0), np.int64) if table is None else table
        self.base = base

    def replace(self, refs: Mapping[int, PrivateRef]) -> PrivateIndex:
        """Return a copy of the index with new records of some clients."""
        if not refs:
            return self
        number = {segment: i for i, segment in enumerate(dict.fromkeys(ref.segment for ref in refs.values()))}
        rows = [(i, number[r.segment], r.offset, r.length, r.checksum) for i, r in sorted(refs.items())]
        index = self._replace_rows(tuple(number), np.array(rows, np.int64).T)
        older = 0 if self.base is None else self.base.table.shape[1]
        return index if index.table.shape[1] <= max(_RECENT, older // _PART) else PrivateIndex(base=index.whole)

    def _replace_rows(self, segments: tuple[str, ...], rows: np.ndarray) -> PrivateIndex:
        """Return a copy of the index with a table's rows in place of the former ones. Keeps the base."""
        number = {segment: i for i, segment in enumerate(dict.fromkeys((*self.segments, *segments)))}
        rows = rows.copy()
        rows[1] = np.array([number[segment] for segment in segments], np.int64)[rows[1]]
        places = np.searchsorted(self.table[0], rows[0])
        known = np.append(self.table[0], -1)[places] == rows[0]
        table = self.table.copy()
        table[:, places[known]] = rows[:, known]
        table = np.insert(table, places[~known], rows[:, ~known], axis=1)
        used = np.bincount(table[1], minlength=len(number)) > 0
        table[1] = (np.cumsum(used) - 1)[table[1]]
        return PrivateIndex(tuple(itertools.compress(number, used.tolist())), table, self.base)

    @property
    def whole(self) -> PrivateIndex:
        """An equal index in a single table, without a base."""
        return self if self.base is None else self.base._replace_rows(self.segments, self.table)

    def bytes_by_segment(self) -> dict[str, int]:
        """Return the total length of the records in each segment, in bytes. Scans all records."""
        whole = self.whole
        lengths = np.bincount(whole.table[1], weights=whole.table[3], minlength=len(whole.segments))
        return dict(zip(whole.segments, lengths.astype(np.int64).tolist(), strict=True))

    def files(self) -> set[str]:
        """Return the names of the referenced segments and of the base's file. Scans all records."""
        return {*self.whole.segments, self.base_name} - {""}

    def select_segments(self, segments: Collection[str]) -> PrivateIndex:
        """Return the index of the records in some segments. Scans all records."""
        whole = self.whole
        chosen = np.array([segment in segments for segment in whole.segments], bool)[whole.table[1]]
        return PrivateIndex()._replace_rows(whole.segments, whole.table[:, chosen])

    def select(self, clients: Sequence[int]) -> list[PrivateRef | None]:
        """Return the location of each client's record; ``None``: the client has none."""
        if self.base is None and not self.table.shape[1]:
            return [None] * len(clients)
        return [self.get(client) for client in clients]

    def __getitem__(self, client: int) -> PrivateRef:
        place = int(np.searchsorted(self.table[0], client))
        if place < self.table.shape[1] and self.table[0, place] == client:
            _, segment, offset, length, checksum = self.table[:, place].tolist()
            return PrivateRef(self.segments[segment], offset, length, checksum)
        if self.base is None:
            raise KeyError(client)
        return self.base[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole.table[0].tolist())

    def __len__(self) -> int:
        return int(self.whole.table.shape[1])

    @property
    def base_name(self) -> str:
        """Name of the base's file; empty without a base."""
        return "" if self.base is None else self.base.file_name

    @cached_property
    def file_name(self) -> str:
        """File name of an index without a base: a checksum of its content."""
        digest = hashlib.blake2b("\n".join(self.segments).encode(), digest_size=8)
        digest.update(self.table.tobytes())
        return f"{digest.hexdigest()}.index"

    def encode(self) -> bytes:
        """Encode an index without a base as a safetensors file."""
        about = {"segments": "\n".join(self.segments)}
        return to_safetensors({"private": torch.from_numpy(self.table)}, about)

    @classmethod
    def read(cls, path: Path) -> PrivateIndex:
        """Load a file of :meth:`encode`.

        Raises:
            RunDirectoryError: The file is missing or damaged.
        """
        if not path.exists():
            raise RunDirectoryError(f"{path}, the index of clients' private state, is missing. Restore it from a copy")
        with (
            translate_failures(
                lambda reason: RunDirectoryError(
                    f"{path}, the index of clients' private state, cannot be read: {reason}"
                )
            ),
            safetensors.safe_open(path, "numpy") as file,
        ):
            segments = tuple(plain_name(name) for name in file.metadata()["segments"].split("\n"))
            index = cls(segments, file.get_tensor("private"))
        if index.file_name != path.name:
            raise RunDirectoryError(
                f"{path}, the index of clients' private state, is damaged (wrong checksum). Restore it from a copy"
            )
        return index


class PrivateStore:
    """Store of clients' private state in append-only segment files, readable by all processes of the run.

    Records are immutable, so a crash can lose only records without a commit. Each process appends to its own segment, one per
    round. Processes on other nodes can read a record after :meth:`close`, because network file systems publish writes when a file
    is closed.
    """

    def __init__(self, folder: Path, also_read: Sequence[Path] = (), uri: str = "") -> None:
        """Open the store.

        Args:
            folder: Folder of new segments, and the first folder to read from.
            also_read: Further folders to read from. A replay reads the run's segments but writes elsewhere.
            uri: URI of a folder of further segments; empty: read local folders only.
        """
        self.folder = folder
        self.uri = uri
        self._remote = RemoteFolder(uri, _UNREACHABLE) if uri else None
        self._folders = (folder, *also_read)
        self._writer = uuid.uuid4().hex[:8]
        self._segment = ""
        self._file: IO[bytes] | None = None

    def append(self, round_index: int, tensors: Mapping[str, Tensor], start: int | None = None) -> PrivateRef:
        """Append one client's tensors. Call :meth:`close` before another process reads them.

        Args:
            round_index: Completed rounds after the work.
            tensors: Private tensors by name.
            start: Number of the client's start, for a segment of its own (:attr:`Order.early`). Nothing refers to the record until
                the client arrives, so a common segment could be removed before. ``None``: the segment of the round.

        Raises:
            ResourcesError: The disk is full.
        """
        segment = f"{round_index:06d}-{self._writer}{'' if start is None else f'-{start}'}.seg"
        return self._write(segment, parts_of_safetensors(tensors))

    def _write(self, segment: str, parts: Iterable[bytes | memoryview]) -> PrivateRef:
        blocks = [memoryview(part) for part in parts]
        length, checksum = sum(block.nbytes for block in blocks), 0
        if length <= _COPIED:
            blocks = [memoryview(b"".join(blocks))]
        with writing(self.folder, length, "private state", RESUME):
            if segment != self._segment:
                self.close()
                make_private_folder(self.folder)
                (self.folder / segment).touch(mode=0o600)
                self._segment = segment
            if self._file is None:
                self._file = (self.folder / segment).open("ab", buffering=0)
            offset = self._file.seek(0, os.SEEK_END)
            for block in blocks:
                checksum = zlib.crc32(block, checksum)
                written = 0
                while written < block.nbytes:  # an unbuffered write may be partial
                    written += self._file.write(block[written:])
        return PrivateRef(segment, offset, length, checksum)

    def read(self, ref: PrivateRef) -> dict[str, Tensor]:
        """Read the tensors of one record, sorted by name.

        Raises:
            RunDirectoryError: The segment is missing, or the record is damaged.
        """
        # The order of safetensors differs between processes, and the order of a sum changes its last bits.
        return dict(sorted(safetensors.torch.load(self._read_bytes(ref)).items()))

    def read_ahead(self, ref: PrivateRef) -> None:
        """Ask the kernel to prefetch one record, without waiting. Only :meth:`read` reports a missing record."""
        path = self._path(ref.segment)
        if path is not None and hasattr(os, "posix_fadvise"):  # macOS has no such call.
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), ref.offset, ref.length, os.POSIX_FADV_WILLNEED)

    def _path(self, segment: str) -> Path | None:
        return next((path for folder in self._folders if (path := folder / segment).exists()), None)

    def _read_bytes(self, ref: PrivateRef) -> bytes:
        path, data, where = self._path(ref.segment), None, str(self.folder / ref.segment)
        if path is not None:
            where = str(path)
            with path.open("rb") as file:
                file.seek(ref.offset)
                data = file.read(ref.length)
        elif self._remote is not None:
            where = below(self.uri, ref.segment)
            data = self._remote.read_range(ref.segment, ref.offset, ref.length)
        if data is None:
            raise RunDirectoryError(f"{where} is missing: it holds a client's private state. Restore it from a copy")
        if len(data) != ref.length or zlib.crc32(data) != ref.checksum:
            raise RunDirectoryError(
                f"{where} is damaged at byte {ref.offset}: a client's private state cannot be read. "
                f"Restore the file from a copy, or restart the run"
            )
        return data

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Copy records into a new segment, close it and return the new locations.

        Raises:
            RunDirectoryError: A record is missing or damaged.
            ResourcesError: The disk is full.
        """
        segment = f"{round_index:06d}-{self._writer}-compact.seg"
        moved = {client: self._write(segment, [self._read_bytes(ref)]) for client, ref in refs.items()}
        self.close()
        return moved

    def remove(self, segments: Iterable[str]) -> None:
        """Remove unreferenced segments."""
        for segment in segments:
            (self.folder / segment).unlink(missing_ok=True)

    def retain(self, named: Collection[str]) -> None:
        """Remove orphaned files of calls with lost results.

        A folder without any of the named files stays as it is: it may belong to another run.

        Args:
            named: Files referenced by the run's commits.
        """
        names = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        if not names.isdisjoint(named):
            self.remove(name for name in names.difference(named) if _OURS.fullmatch(name))

    def close(self) -> None:
        """Close the segment, to publish it to processes on other nodes. A later record reopens it.

        Raises:
            ResourcesError: The disk is full. A network file system may report this only here.
        """
        if self._file is None:
            return
        with writing(self.folder, self._file.tell(), "private state", RESUME), self._file as file:
            self._file = None
            self._publish(file)

    def _publish(self, file: IO[bytes]) -> None:
        """Make a closing segment visible to the committing process. On one machine it is visible already."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all segments of the folder and of the URI, by name.

        Raises:
            ResourcesError: The URI cannot be reached.
        """
        files = {} if self._remote is None else self._remote.files()
        if self.folder.exists():
            with os.scandir(self.folder) as entries:  # faster than Path objects for many files
                files |= {entry.name: entry.stat().st_size for entry in entries}
        return {name: size for name, size in files.items() if name.endswith(".seg")}

    def sync(self, segments: Iterable[str]) -> None:
        """Make segments durable before a commit refers to them.

        Raises:
            ResourcesError: The disk is full (some file systems report this late), or a segment is on a disk of another machine.
        """
        paths = [self.folder / segment for segment in segments]
        for path in paths:
            if not path.exists():
                raise ResourcesError(
                    f"{path}: a client actor wrote this file, but the server cannot see it. Put the folder on a file system that "
                    f"all nodes share, or use a single node"
                )
            with writing(self.folder, path.stat().st_size, "private state", RESUME):
                sync(path)
        if paths:
            with writing(self.folder, 0, "private state", RESUME):
                sync(self.folder)  # a new file is durable only after a sync of its folder


class SharedPrivateStore(PrivateStore):
    """Store in a folder on a network file system. The committer's sync does not flush the pages of another machine."""

    def _publish(self, file: IO[bytes]) -> None:
        """Make a closing segment durable. A new file is durable only after a sync of its folder."""
        os.fsync(file.fileno())
        sync(self.folder)


class UploadedPrivateStore(PrivateStore):
    """Store behind a URI, for nodes without a common file system.

    Records stay in memory until :meth:`close` uploads them as one immutable file. A worker closes the store before it replies, so
    commits survive the loss of a node with its disk.
    """

    def __init__(self, folder: Path, uri: str) -> None:
        """Open the store without accessing the URI.

        Args:
            folder: Folder of local segments, only read. It may be missing.
            uri: URI of the folder of segments.
        """
        super().__init__(folder, uri=uri)
        self._place = RemoteFolder(uri, _UNREACHABLE)
        self._numbers = itertools.count()
        self._stem = ""
        self._records: list[bytes] = []
        """Records of the current segment."""
        self._length = 0
        self._fetched: dict[PrivateRef, bytes] = {}
        """Records of :meth:`read_ahead`."""

    def _write(self, segment: str, parts: Iterable[bytes | memoryview]) -> PrivateRef:
        data = b"".join(parts)
        if self._stem != segment or self._length + len(data) > _LARGEST:
            self.close()
        if not self._records:  # the number makes names unique, because an uploaded segment never changes
            self._stem, self._segment = segment, f"{segment.removesuffix('.seg')}-{next(self._numbers)}.seg"
        ref = PrivateRef(self._segment, self._length, len(data), zlib.crc32(data))
        self._records.append(data)
        self._length += len(data)
        return ref

    def close(self) -> None:
        """Upload the records since the last call as one segment.

        Raises:
            ResourcesError: The URI cannot be written.
        """
        records, self._records, self._length = self._records, [], 0
        if records:
            self._place.write(self._segment, b"".join(records))

    def read_ahead(self, ref: PrivateRef) -> None:
        """Fetch one record into memory until :meth:`read` takes it. Only :meth:`read` reports errors."""
        with contextlib.suppress(RaydflError):
            self._fetched[ref] = super()._read_bytes(ref)

    def _read_bytes(self, ref: PrivateRef) -> bytes:
        return self._fetched.pop(ref, None) or super()._read_bytes(ref)

    def sync(self, segments: Iterable[str]) -> None:
        """Do nothing: the segments were uploaded before the server learned of them."""
