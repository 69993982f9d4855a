"""The run directory: immutable files, and one pointer that makes them true.

    config.yaml             the resolved configuration
    run.json                what the run is: method, data, classes, models
    population/             who has which clips (raydfl.data.population)
    private/*.seg           clients' private state: records of many clients, appended by the process that trained them
    commits/RRRRRR-crc.safetensors   the server's state after round R, and where each client's private state lies
    rows/RRRRRR.parquet     what was measured up to that commit
    LATEST                  the name of the commit that counts

A commit first makes everything durable that it refers to, then moves LATEST by a rename. Until then nothing of it counts; what a
crash leaves behind is removed when the run is opened again. A commit's file name carries its checksum.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from raydfl.errors import RunDirectoryError
from raydfl.files import RESUME, sync, write_durably, writing
from raydfl.types import State

_COMMIT = re.compile(r"^(\d{6,})-([0-9a-f]{8})\.safetensors$")
_SEPARATOR = "|"


@dataclass(frozen=True, slots=True)
class PrivateRef:
    """Where one client's private state lies: a record in a segment file."""

    segment: str
    offset: int
    length: int
    checksum: int


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

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Copy the records that still count out of segments that are mostly superseded; returns the moved ones.

        Old segments stay until no kept commit refers to them.
        """
        live: dict[str, int] = {}
        for ref in refs.values():
            live[ref.segment] = live.get(ref.segment, 0) + ref.length
        sparse = {s for s, size in live.items() if size < 0.5 * (self.folder / s).stat().st_size}
        moved = {}
        for index, ref in refs.items():
            if ref.segment in sparse:
                moved[index] = self._write(f"{round_index:06d}-{self._writer}-compact.seg", self._read_bytes(ref))
        return moved

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


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed round: the server's state and where each client's private state lies (by client index)."""

    state: State
    private: Mapping[int, PrivateRef]
    name: str


class RunStore:
    """One run directory, opened by one process at a time."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep
        self.private_folder = folder / "private"
        self._lock: IO[bytes] | None = None

    def lock(self, wait: float = 20.0) -> None:
        """Become the one process that may commit; the lock ends with the process.

        Raises:
            RunDirectoryError: another process holds it for longer than ``wait`` seconds.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = (self.folder / ".lock").open("ab+")
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    holder = file.read().decode() or "unknown"
                    file.close()
                    raise RunDirectoryError(
                        f"{self.folder} is in use by process {holder}; wait for it or end it, then try again"
                    ) from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        self._lock = file

    def unlock(self) -> None:
        """Let another process open the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def commit(self, state: State, private: Mapping[int, PrivateRef], new_segments: Iterable[str] = ()) -> str:
        """Make ``state`` the truth of the run; returns the commit's name.

        Args:
            private: of every client that ever took part, its newest record.
            new_segments: segments written since the last commit, to be made durable first.

        Raises:
            ResourcesError: the disk is full; the last commit still counts.
        """
        PrivateStore(self.private_folder).sync(new_segments)
        data = _encode(state, private)
        name = f"{state.round_index:06d}-{zlib.crc32(data):08x}.safetensors"
        folder = self.folder / "commits"
        write_durably(folder / name, data)
        write_durably(self.folder / "LATEST", name.encode())
        self._forget(name)
        return name

    def _forget(self, newest: str) -> None:
        """Remove commits beyond the kept ones, and segments that no kept commit refers to."""
        names = self.commits()
        names = names[: names.index(newest) + 1]
        for name in names[: -self.keep]:
            (self.folder / "commits" / name).unlink(missing_ok=True)
        kept = names[-self.keep :]
        oldest = int(kept[0].split("-")[0])
        needed: set[str] | None = None
        for path in self.private_folder.glob("*.seg") if self.private_folder.exists() else ():
            if int(path.name.split("-")[0]) > oldest:
                continue  # too young to be superseded in every kept commit
            if needed is None:
                needed = set().union(*(_segments(self.folder / "commits" / name) for name in kept))
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def commits(self) -> list[str]:
        """Names of the commit files, oldest first."""
        folder = self.folder / "commits"
        if not folder.exists():
            return []
        return sorted(
            (p.name for p in folder.iterdir() if _COMMIT.match(p.name)), key=lambda n: (int(n.split("-")[0]), n)
        )

    def rounds(self) -> list[int]:
        """Rounds after which a commit is kept, ascending."""
        return [int(name.split("-")[0]) for name in self.commits()]

    def latest(self) -> str | None:
        """Name of the commit that counts; ``None`` before the first.

        Raises:
            RunDirectoryError: LATEST does not name a commit.
        """
        path = self.folder / "LATEST"
        if not path.exists():
            return None
        name = path.read_text(errors="replace").strip()
        if not _COMMIT.match(name):
            raise RunDirectoryError(
                f"{path} does not name a commit but holds {name[:60]!r}; write the newest name in commits/ into it"
            )
        return name

    def load(self, name: str) -> Commit:
        """A commit by its name.

        Raises:
            RunDirectoryError: it is missing or damaged.
        """
        path = self.folder / "commits" / name
        match = _COMMIT.match(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RunDirectoryError(f"commit {path} cannot be read: {error.strerror}") from error
        if match is None or zlib.crc32(data) != int(match.group(2), 16):
            raise RunDirectoryError(f"commit {path} is damaged: its checksum does not fit its content")
        try:
            state, private = _decode(data)
        except (SafetensorError, KeyError, ValueError) as error:
            raise RunDirectoryError(f"commit {path} cannot be decoded: {error}") from error
        return Commit(state, private, name)

    def open_latest(self) -> tuple[Commit | None, list[str]]:
        """The newest commit that is whole, and warnings about damaged ones that were passed over.

        What a crash left behind (commits that never counted, segments nobody refers to, rows of rounds that were not committed) is
        removed. Call it with the lock held.

        Raises:
            RunDirectoryError: there are commits but none is whole.
        """
        latest = self.latest()
        if latest is None:
            if any(self.rounds()):
                raise RunDirectoryError(
                    f"{self.folder / 'LATEST'} is missing, but commits/ holds rounds; write the newest name in commits/ into it"
                )
            return None, []
        warnings = []
        names = self.commits()
        counted = [n for n in names if int(n.split("-")[0]) < int(latest.split("-")[0])] + [latest]
        for name in reversed(counted):
            try:
                commit = self.load(name)
                break
            except RunDirectoryError as error:
                warnings.append(str(error))
        else:
            raise RunDirectoryError("; ".join(warnings) + "; no earlier commit is whole: start the run afresh")
        if warnings:
            write_durably(self.folder / "LATEST", name.encode())
        self._clean(commit)
        return commit, warnings

    def _clean(self, commit: Commit) -> None:
        for other in self.commits():
            if int(other.split("-")[0]) >= commit.state.round_index and other != commit.name:
                (self.folder / "commits" / other).unlink(missing_ok=True)
        needed = set().union(*(_segments(self.folder / "commits" / name) for name in self.commits()))
        if self.private_folder.exists():
            for path in self.private_folder.glob("*.seg"):
                if path.name not in needed:
                    path.unlink(missing_ok=True)

    def bytes_of_segments(self) -> int:
        """Bytes of all private segments on disk."""
        if not self.private_folder.exists():
            return 0
        return sum(p.stat().st_size for p in self.private_folder.glob("*.seg"))


def _encode(state: State, private: Mapping[int, PrivateRef]) -> bytes:
    segments = sorted({ref.segment for ref in private.values()})
    number = {segment: i for i, segment in enumerate(segments)}
    index = np.array(
        [[i, number[r.segment], r.offset, r.length, r.checksum] for i, r in sorted(private.items())], dtype=np.int64
    ).reshape(-1, 5)
    tensors = {"private": torch.from_numpy(index)}
    for key, group in state.tensors.items():
        for name, value in group.items():
            tensors[f"{key}{_SEPARATOR}{name}"] = value.detach().cpu().contiguous()
    about = {
        "round_index": state.round_index,
        "extra": dict(state.extra),
        "keys": {key: list(group) for key, group in state.tensors.items()},
        "segments": segments,
    }
    return safetensors.torch.save(tensors, metadata={"raydfl": json.dumps(about)})


def _about(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about: dict[str, Any] = json.loads(header["__metadata__"]["raydfl"])
    return about


def _segments(path: Path) -> set[str]:
    """Segments that a commit refers to, from its header alone."""
    with path.open("rb") as file:
        head = file.read(8)
        data = head + file.read(int.from_bytes(head, "little"))
    return set(_about(data)["segments"])


def _decode(data: bytes) -> tuple[State, dict[int, PrivateRef]]:
    about = _about(data)
    tensors = safetensors.torch.load(data)
    segments, keys = about["segments"], about["keys"]
    private = {
        int(i): PrivateRef(segments[s], int(offset), int(length), int(checksum))
        for i, s, offset, length, checksum in tensors["private"].tolist()
    }
    groups = {key: {name: tensors[f"{key}{_SEPARATOR}{name}"] for name in names} for key, names in keys.items()}
    return State(int(about["round_index"]), groups, about["extra"]), private
