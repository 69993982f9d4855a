"""Clients' private state on the disk, and the index that says where each client's newest record lies."""

from __future__ import annotations

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
from safetensors import SafetensorError
from torch import Tensor

from raydfl.core.errors import ResourcesError, RunDirectoryError
from raydfl.core.files import RESUME, make_private_folder, plain_name, sync, writing
from raydfl.core.tensor_file import parts_of_safetensors, to_safetensors

_RECENT = 4096
"""Rows that an index may hold beside its base, however small that is."""
_PART = 16
"""An index makes a new base when its rows are more than one in so many of the base's."""
_COPIED = 1 << 22
"""Bytes up to which a record is copied into one piece: that takes less time than a call of the system for each tensor."""
_OURS = re.compile(r"\d{6,}-\S+\.seg|[0-9a-f]{16}\.index|\..+\.part")
"""Names of the files that a run creates in its folder of private state."""


@dataclass(frozen=True, slots=True)
class PrivateRef:
    """The place of one client's private state: a record in a segment file."""

    segment: str
    offset: int
    length: int
    checksum: int


class PrivateIndex(Mapping[int, PrivateRef]):
    """The place of the newest record of every client that ever took part, by client index. Immutable.

    A commit holds the rows that have changed since its base, and the name of the base's file. So the time of a round and a commit
    does not grow with the number of clients: one table of them all takes half of the time of a small round with a million clients.

    Args:
        segments: names of the segment files, each of which holds at least one of the records.
        table: int64 [5, clients], by rising client index: client index, position in ``segments``, offset, length, checksum.
        base: older records, some of them superseded; it has no base itself.
    """

    def __init__(
        self, segments: tuple[str, ...] = (), table: np.ndarray | None = None, base: PrivateIndex | None = None
    ) -> None:
        self.segments = segments
        self.table = np.zeros((5, 0), np.int64) if table is None else table
        self.base = base

    def changed(self, refs: Mapping[int, PrivateRef]) -> PrivateIndex:
        """Return the index with these records in place of their clients' former ones."""
        if not refs:
            return self
        number = {segment: i for i, segment in enumerate(dict.fromkeys(ref.segment for ref in refs.values()))}
        rows = [(i, number[r.segment], r.offset, r.length, r.checksum) for i, r in sorted(refs.items())]
        index = self._with_rows(tuple(number), np.array(rows, np.int64).T)
        older = 0 if self.base is None else self.base.table.shape[1]
        return index if index.table.shape[1] <= max(_RECENT, older // _PART) else PrivateIndex(base=index.whole)

    def _with_rows(self, segments: tuple[str, ...], rows: np.ndarray) -> PrivateIndex:
        """Return the index with a table's rows in place of their clients' former ones. The base stays what it is."""
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
        """The same records in one table, without a base."""
        return self if self.base is None else self.base._with_rows(self.segments, self.table)

    def bytes_by_segment(self) -> dict[str, int]:
        """Return the length of the records in each segment that holds any. This looks at all records."""
        whole = self.whole
        lengths = np.bincount(whole.table[1], weights=whole.table[3], minlength=len(whole.segments))
        return dict(zip(whole.segments, lengths.astype(np.int64).tolist(), strict=True))

    def files(self) -> set[str]:
        """Return the names of the segments and of the base's file that it refers to. This looks at all records."""
        return {*self.whole.segments, self.base_name} - {""}

    def within(self, segments: Collection[str]) -> PrivateIndex:
        """Return the records that lie in some segments. This looks at all records."""
        whole = self.whole
        chosen = np.array([segment in segments for segment in whole.segments], bool)[whole.table[1]]
        return PrivateIndex()._with_rows(whole.segments, whole.table[:, chosen])

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
        """The name of the base's file; empty without a base."""
        return "" if self.base is None else self.base.file_name

    @cached_property
    def file_name(self) -> str:
        """The name of the file for a table without a base, with a checksum of its content."""
        digest = hashlib.blake2b("\n".join(self.segments).encode(), digest_size=8)
        digest.update(self.table.tobytes())
        return f"{digest.hexdigest()}.index"

    def encode(self) -> bytes:
        """Return a table without a base as a safetensors file."""
        about = {"segments": "\n".join(self.segments)}
        return to_safetensors({"private": torch.from_numpy(self.table)}, about)

    @classmethod
    def read(cls, path: Path) -> PrivateIndex:
        """Read a file of :meth:`encode`.

        Raises:
            RunDirectoryError: it is missing or damaged.
        """
        if not path.exists():
            raise RunDirectoryError(f"{path} is missing: it says where clients' private state lies")
        try:
            with safetensors.safe_open(path, "numpy") as file:
                segments = tuple(plain_name(name) for name in file.metadata()["segments"].split("\n"))
                index = cls(segments, file.get_tensor("private"))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(f"{path}, which says where private state lies, cannot be read: {error}") from error
        if index.file_name != path.name:
            raise RunDirectoryError(
                f"{path}, which says where private state lies, is damaged: its checksum does not fit"
            )
        return index


class PrivateStore:
    """Clients' private state, in append-only segment files that any process of the run can read.

    A record is written once and never changed, so a crash can lose only records that no commit refers to yet. Each process appends
    to a segment of its own, one per round. Processes on other nodes can read a record once its writer has called :meth:`close`:
    a network file system passes writes on when a file is closed.
    """

    def __init__(self, folder: Path, also_read: Sequence[Path] = (), durable: bool = False) -> None:
        """Open it.

        Args:
            folder: where segments are written, and read first.
            also_read: further folders to read from (a replay reads a run's segments but writes elsewhere).
            durable: whether :meth:`close` syncs. Set it where the committing process has another kernel than the writer: its own
                sync does not flush the writer's pages.
        """
        self._durable = durable
        self.folder = folder
        self._folders = (folder, *also_read)
        self._writer = uuid.uuid4().hex[:8]
        self._segment = ""
        self._file: IO[bytes] | None = None

    def append(self, round_index: int, tensors: Mapping[str, Tensor]) -> PrivateRef:
        """Write one client's tensors. Call :meth:`close` before another process is told of them.

        Raises:
            ResourcesError: the disk is full.
        """
        segment = f"{round_index:06d}-{self._writer}.seg"
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
                if self._durable:
                    sync(self.folder)  # a new file is on the disk only when the folder is
                self._segment = segment
            if self._file is None:
                self._file = (self.folder / segment).open("ab", buffering=0)
            offset = self._file.seek(0, os.SEEK_END)
            for block in blocks:
                checksum = zlib.crc32(block, checksum)
                written = 0
                while written < block.nbytes:
                    written += self._file.write(block[written:])
        return PrivateRef(segment, offset, length, checksum)

    def read(self, ref: PrivateRef) -> dict[str, Tensor]:
        """Return the tensors of one record, by rising names.

        Raises:
            RunDirectoryError: the segment is missing or the record damaged.
        """
        # safetensors gives them in another order in each process, and what a method adds up along it would differ in its last bits.
        return dict(sorted(safetensors.torch.load(self._read_bytes(ref)).items()))

    def read_ahead(self, ref: PrivateRef) -> None:
        """Ask the kernel to fetch one record from the disk, without waiting for it. That it is missing is left to :meth:`read`."""
        path = self._path(ref.segment)
        if path is not None:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), ref.offset, ref.length, os.POSIX_FADV_WILLNEED)

    def _path(self, segment: str) -> Path | None:
        return next((path for folder in self._folders if (path := folder / segment).exists()), None)

    def _read_bytes(self, ref: PrivateRef) -> bytes:
        path = self._path(ref.segment)
        if path is None:
            raise RunDirectoryError(f"{self.folder / ref.segment} is missing: a client's private state was in it")
        with path.open("rb") as file:
            file.seek(ref.offset)
            data = file.read(ref.length)
        if len(data) != ref.length or zlib.crc32(data) != ref.checksum:
            raise RunDirectoryError(
                f"{path} is damaged at byte {ref.offset}: a client's private state cannot be read; "
                f"restore the file from a copy or start the run afresh"
            )
        return data

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Copy records into a segment of their own, close it and return their new places.

        Raises:
            RunDirectoryError: one of them is missing or damaged.
            ResourcesError: the disk is full.
        """
        segment = f"{round_index:06d}-{self._writer}-compact.seg"
        moved = {client: self._write(segment, [self._read_bytes(ref)]) for client, ref in refs.items()}
        self.close()
        return moved

    def remove(self, segments: Iterable[str]) -> None:
        """Remove segments that nothing refers to any more."""
        for segment in segments:
            (self.folder / segment).unlink(missing_ok=True)

    def retain(self, named: Collection[str]) -> None:
        """Remove orphans: files of calls whose results were lost.

        A folder without any of the named files is left alone, because it belongs to another run or has no records that count.

        Args:
            named: files to which commits of the run refer.
        """
        found = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        if not found.isdisjoint(named):
            self.remove(name for name in found.difference(named) if _OURS.fullmatch(name))

    def close(self) -> None:
        """Close the segment, so that processes on other nodes can read it; a later record reopens it.

        Raises:
            ResourcesError: the disk is full. A network file system may report it only here.
        """
        if self._file is None:
            return
        with writing(self.folder, self._file.tell(), "private state", RESUME), self._file as file:
            self._file = None
            if self._durable:
                os.fsync(file.fileno())

    def sync(self, segments: Iterable[str]) -> None:
        """Make the segments durable; the caller then may refer to them in a commit.

        Raises:
            ResourcesError: the disk is full, which some file systems tell only now; or one was written on another machine, into a
                folder that this one does not share.
        """
        paths = [self.folder / segment for segment in segments]
        for path in paths:
            if not path.exists():
                raise ResourcesError(
                    f"{path}, which a client actor has written, is not to be seen by the server: all nodes must share that folder; "
                    f"use a file system that they share, or place everything on one node"
                )
            with writing(self.folder, path.stat().st_size, "private state", RESUME):
                sync(path)
        if paths:
            with writing(self.folder, 0, "private state", RESUME):
                sync(self.folder)  # a new file is on the disk only when the folder is
