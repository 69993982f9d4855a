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
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from raydfl.errors import RunDirectoryError
from raydfl.files import write_durably
from raydfl.private import PrivateIndex, PrivateStore
from raydfl.types import State

_COMMIT = re.compile(r"^(\d{6,})-([0-9a-f]{8})\.safetensors$")
_SEPARATOR = "|"


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed round: the server's state and where each client's private state lies (by client index)."""

    state: State
    private: PrivateIndex
    together: int
    name: str


class RunStore:
    """One run directory, opened by one process at a time."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep
        self.private_folder = folder / "private"
        self.together = 1
        """Clients trained in one computation: a fact of the run, which every commit carries."""
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

    def commit(self, state: State, private: PrivateIndex, new_segments: Iterable[str] = ()) -> str:
        """Make ``state`` the truth of the run; returns the commit's name.

        Args:
            private: of every client that ever took part, its newest record.
            new_segments: segments written since the last commit, to be made durable first.

        Raises:
            ResourcesError: the disk is full; the last commit still counts.
        """
        PrivateStore(self.private_folder).sync(new_segments)
        data = _encode(state, private, self.together)
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
            state, private, together = _decode(data)
        except (SafetensorError, KeyError, ValueError) as error:
            raise RunDirectoryError(f"commit {path} cannot be decoded: {error}") from error
        return Commit(state, private, together, name)

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


def _encode(state: State, private: PrivateIndex, together: int) -> bytes:
    tensors = {"private": torch.from_numpy(private.table)}
    for key, group in state.tensors.items():
        for name, value in group.items():
            tensors[f"{key}{_SEPARATOR}{name}"] = value.detach().cpu().contiguous()
    about = {
        "round_index": state.round_index,
        "extra": dict(state.extra),
        "keys": {key: list(group) for key, group in state.tensors.items()},
        "segments": private.segments,
        "together": together,
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


def _decode(data: bytes) -> tuple[State, PrivateIndex, int]:
    about = _about(data)
    tensors = safetensors.torch.load(data)
    private = PrivateIndex(tuple(about["segments"]), tensors["private"].numpy())
    groups = {
        key: {name: tensors[f"{key}{_SEPARATOR}{name}"] for name in names} for key, names in about["keys"].items()
    }
    return State(int(about["round_index"]), groups, about["extra"]), private, int(about["together"])
