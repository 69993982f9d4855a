"""Clients' private state on the disk, and the index that says where each client's newest record lies."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import safetensors.torch
from torch import Tensor

from raydfl.errors import RunDirectoryError
from raydfl.files import RESUME, sync, writing


@dataclass(frozen=True, slots=True)
class PrivateRef:
    """Where one client's private state lies: a record in a segment file."""

    segment: str
    offset: int
    length: int
    checksum: int


class PrivateIndex(Mapping[int, PrivateRef]):
    """Where the newest record of every client that ever took part lies, by client index. It never changes: see :meth:`changed`.

    Args:
        segments: names of the segment files.
        table: int64 [clients, 5], one row for each client, by rising client index: client index, position in ``segments``, offset,
            length, checksum.
    """

    def __init__(self, segments: tuple[str, ...] = (), table: np.ndarray | None = None) -> None:
        self.segments = segments
        self.table = np.zeros((0, 5), np.int64) if table is None else table

    def changed(self, refs: Mapping[int, PrivateRef]) -> PrivateIndex:
        """The index with these records in place of their clients' former ones."""
        if not refs:
            return self
        segments = list(dict.fromkeys((*self.segments, *(ref.segment for ref in refs.values()))))
        number = {segment: position for position, segment in enumerate(segments)}
        rows = np.array(
            [[i, number[r.segment], r.offset, r.length, r.checksum] for i, r in sorted(refs.items())], np.int64
        )
        places = np.searchsorted(self.table[:, 0], rows[:, 0])
        known = np.zeros(len(rows), bool)
        inside = places < len(self.table)
        known[inside] = self.table[places[inside], 0] == rows[inside, 0]
        table = self.table.copy()
        table[places[known]] = rows[known]
        table = np.insert(table, places[~known], rows[~known], axis=0)
        used = np.bincount(table[:, 1], minlength=len(segments)) > 0
        table[:, 1] = (np.cumsum(used) - 1)[table[:, 1]]
        return PrivateIndex(tuple(s for s, in_use in zip(segments, used, strict=True) if in_use), table)

    @cached_property
    def bytes(self) -> int:
        """Length of all records together."""
        return int(self.table[:, 3].sum())

    def __getitem__(self, client: int) -> PrivateRef:
        place = int(np.searchsorted(self.table[:, 0], client))
        if place == len(self.table) or self.table[place, 0] != client:
            raise KeyError(client)
        _, segment, offset, length, checksum = self.table[place].tolist()
        return PrivateRef(self.segments[segment], offset, length, checksum)

    def __iter__(self) -> Iterator[int]:
        return iter(self.table[:, 0].tolist())

    def __len__(self) -> int:
        return len(self.table)


class PrivateStore:
    """Clients' private state, in append-only segment files that any process of the run can read.

    A record is written once and never changed, so a crash can lose only records that no commit refers to yet. Each process appends
    to a segment of its own, one per round.
    """

    def __init__(self, folder: Path, also_read: Sequence[Path] = ()) -> None:
        """Open it.

        Args:
            folder: where segments are written, and read first.
            also_read: further folders to read from (a replay reads a run's segments but writes elsewhere).
        """
        self.folder = folder
        self._folders = (folder, *also_read)
        self._writer = uuid.uuid4().hex[:8]
        self._segment = ""
        self._file: IO[bytes] | None = None

    def append(self, round_index: int, tensors: Mapping[str, Tensor]) -> PrivateRef:
        """Write one client's tensors; they survive this process at once, and a power cut after the next commit.

        Raises:
            ResourcesError: the disk is full.
        """
        data = safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        segment = f"{round_index:06d}-{self._writer}.seg"
        return self._write(segment, data)

    def _write(self, segment: str, data: bytes) -> PrivateRef:
        with writing(self.folder, len(data), "private state", RESUME):
            if segment != self._segment or self._file is None:
                if self._file is not None:
                    self._file.close()
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = (self.folder / segment).open("ab", buffering=0)
                self._segment = segment
            offset = self._file.seek(0, os.SEEK_END)
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        return PrivateRef(segment, offset, len(data), zlib.crc32(data))

    def read(self, ref: PrivateRef) -> dict[str, Tensor]:
        """The tensors of one record.

        Raises:
            RunDirectoryError: the segment is missing or the record damaged.
        """
        return safetensors.torch.load(self._read_bytes(ref))

    def _read_bytes(self, ref: PrivateRef) -> bytes:
        for folder in self._folders:
            path = folder / ref.segment
            if path.exists():
                with path.open("rb") as file:
                    file.seek(ref.offset)
                    data = file.read(ref.length)
                if len(data) != ref.length or zlib.crc32(data) != ref.checksum:
                    raise RunDirectoryError(
                        f"{path} is damaged at byte {ref.offset}: a client's private state cannot be read; "
                        f"restore the file from a copy or start the run afresh"
                    )
                return data
        raise RunDirectoryError(f"{self.folder / ref.segment} is missing: a client's private state was in it")

    def compact(self, round_index: int, refs: PrivateIndex) -> dict[int, PrivateRef]:
        """Copy the records that still count out of segments that are mostly superseded; returns the moved ones.

        Old segments stay until no kept commit refers to them.
        """
        live = np.bincount(refs.table[:, 1], weights=refs.table[:, 3], minlength=len(refs.segments))
        sizes = [(self.folder / segment).stat().st_size for segment in refs.segments]
        sparse = live < 0.5 * np.array(sizes, np.float64)
        segment = f"{round_index:06d}-{self._writer}-compact.seg"
        clients = refs.table[sparse[refs.table[:, 1]], 0].tolist()
        return {client: self._write(segment, self._read_bytes(refs[client])) for client in clients}

    def close(self) -> None:
        """Close the segment that is written to; a later record opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def sync(self, segments: Iterable[str]) -> None:
        """Make the segments durable; the caller then may refer to them in a commit.

        Raises:
            ResourcesError: the disk is full, which some file systems tell only now.
        """
        for segment in segments:
            path = self.folder / segment
            with writing(self.folder, path.stat().st_size, "private state", RESUME):
                sync(path)
