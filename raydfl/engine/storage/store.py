"""The run directory: immutable files, and one pointer that makes them true.

    config.yaml             the resolved configuration
    run.json                what the run is: method, data, classes, models
    population/             who has which clips (raydfl.data.population)
    private/*.seg           clients' private state: records of many clients, appended by the process that trained them
    private/*.index         where each client's private state lay after some round; the name is a checksum
    commits/RRRRRR-crc.safetensors   the server's state after round R, the name of an index and what has changed since it was made
    rows/RRRRRR.parquet     what was measured up to that commit
    LATEST                  the name of the commit that counts

A commit first makes everything durable that it refers to, then moves LATEST by a rename. Until then nothing of it counts; what a
crash leaves behind is removed when the run is opened again. A commit's file name carries its checksum.

An index is made anew only when much has changed (raydfl.engine.storage.private.PrivateIndex): the cost of a commit depends on what
was trained since the last, and not on how many clients there are. A file in private/ is removed with the last kept commit that
refers to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.files import plain_name, remove_parts, write_durably
from raydfl.core.lock import FileLock
from raydfl.core.tensor_file import has_a_format, to_safetensors
from raydfl.core.types import State
from raydfl.engine.storage.private import PrivateIndex, PrivateStore

_COMMIT = re.compile(r"^(\d{6,})-([0-9a-f]{8})\.safetensors$")
_FOLDERS = ("commits", "population", "private", "rows")
"""Folders in which a run replaces and removes files."""
_SEPARATOR = "|"
_FORMAT = 2
"""Format of a commit: tensors are named by their key's place in ``keys``. In format 1, which is read too, by the key itself."""
_PATIENCE = 600.0
"""Seconds after which an unfinished file beside LATEST is a dead process's: not all that is written there needs the lock."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed round: the server's state and where each client's private state lies (by client index)."""

    state: State
    private: PrivateIndex
    together: int
    name: str
    begun: tuple[int, ...] = ()
    """Rounds completed before each phase, where one has ended early; empty: as configured."""


class RunStore:
    """One run directory, opened by one process at a time."""

    def __init__(self, folder: Path, keep: int = 3, private_here: bool = True) -> None:
        """Open it.

        Args:
            folder: of the run.
            keep: commits that are kept.
            private_here: whether clients' private records lie in the run's folder; else only the workers reach them, and who has
                the store has them remove what :meth:`take_forgotten` names.
        """
        self.folder = folder
        self.keep = keep
        self.private_here = private_here
        self.private_folder = folder / "private"
        self.together = 1
        """Clients trained in one computation: a fact of the run, which every commit carries."""
        self._lock = FileLock(folder / ".lock")
        self._forgotten: list[str] = []
        self.files: dict[str, frozenset[str]] = {}
        """The files in private/ to which each kept commit refers, by its name, oldest first."""
        self._best = ""
        """Name of the commit of the best round, which is kept beside the newest ones."""

    def lock(self, wait: float = 20.0) -> None:
        """Become the one process that may commit; the lock ends with the process.

        Raises:
            RunDirectoryError: another process holds it for longer than ``wait`` seconds, or one of the run's folders is a link
                to a place outside the run's folder.
        """
        own = Path(os.path.realpath(self.folder))
        for path in (self.folder / name for name in _FOLDERS):
            if not Path(os.path.realpath(path)).is_relative_to(own):
                raise RunDirectoryError(
                    f"{path} is a link to {os.path.realpath(path)}, outside the run's folder. A run removes files from its "
                    f"folders, and this one may belong to another run. Replace the link by the folder itself. To use another "
                    f"disk, move the whole run"
                )
        self._lock.acquire(wait)

    def unlock(self) -> None:
        """Let another process open the run."""
        self._lock.release()

    def commit(
        self,
        state: State,
        private: PrivateIndex,
        segments: frozenset[str] = frozenset(),
        written: frozenset[str] = frozenset(),
        best: bool = False,
        begun: tuple[int, ...] = (),
    ) -> str:
        """Make ``state`` the truth of the run; returns the commit's name.

        Args:
            private: of every client that ever took part, its newest record.
            segments: to which ``private`` refers. One is removed when no kept commit refers to it.
            written: segments that were written since the last commit, to be made durable first.
            best: whether it is kept until another one is the best.
            begun: see :attr:`Commit.begun`.

        Raises:
            ResourcesError: the disk is full; the last commit still counts.
        """
        if self.private_here:
            PrivateStore(self.private_folder).sync(written & segments)
        if private.base is not None and not (path := self.private_folder / private.base_name).exists():
            write_durably(path, private.base.encode())
        data = _encode(state, private, self.together, begun)
        name = f"{state.round_index:06d}-{zlib.crc32(data):08x}.safetensors"
        folder = self.folder / "commits"
        write_durably(folder / name, data)
        write_durably(self.folder / "LATEST", name.encode())
        self.files[name] = segments | ({private.base_name} - {""})
        if best:
            self._best = name
        self._forget(name, written - segments)
        return name

    def keep_best(self, round_index: int) -> None:
        """Keep the commit of a round, if there is one, until another one is the best.

        Raises:
            RunDirectoryError: it is damaged.
        """
        name = self.commit_of(round_index)
        if name is not None:
            self._best = self.load(name).name

    def commit_of(self, round_index: int) -> str | None:
        """Return the name of the commit of a round; ``None``: it is not kept."""
        return next((name for name in self.commits() if round_of(name) == round_index), None)

    def _forget(self, newest: str, files: frozenset[str]) -> None:
        """Remove commits beyond the kept ones. Remove their files, and the given ones, to which no kept one refers."""
        names, gone = self.commits(), files
        for name in names[: names.index(newest) + 1][: -self.keep]:
            if name != self._best:
                (self.folder / "commits" / name).unlink(missing_ok=True)
                gone |= self.files.pop(name, frozenset())
        for file in gone.difference(*self.files.values()):
            self._remove(file)

    def _remove(self, name: str) -> None:
        """Remove a file in private/, or have the workers do it."""
        if name.endswith(".seg") and not self.private_here:
            self._forgotten.append(name)
        else:
            (self.private_folder / name).unlink(missing_ok=True)

    def take_forgotten(self) -> list[str]:
        """Return the segments outside the run's folder to which, since this was last asked, no kept commit refers any more."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def commits(self) -> list[str]:
        """Return the names of the commit files, oldest first."""
        folder = self.folder / "commits"
        if not folder.exists():
            return []
        return sorted((p.name for p in folder.iterdir() if _COMMIT.match(p.name)), key=lambda n: (round_of(n), n))

    def rounds(self) -> list[int]:
        """Return the rounds after which a commit is kept, ascending."""
        return [round_of(name) for name in self.commits()]

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

    def newest(self) -> Commit | None:
        """Return the commit that counts; ``None`` before the first.

        Raises:
            RunDirectoryError: it is missing or damaged, or LATEST names none.
        """
        name = self.latest()
        return None if name is None else self.load(name)

    def load(self, name: str) -> Commit:
        """Return a commit by its name.

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
            state, private, base, together, begun = _decode(data)
            for file in (*private.segments, *([base] if base else [])):
                plain_name(file)
        except (SafetensorError, KeyError, ValueError) as error:
            raise RunDirectoryError(f"commit {path} cannot be decoded: {error}") from error
        try:
            older = PrivateIndex.read(self.private_folder / base) if base else None
        except RunDirectoryError as error:
            raise RunDirectoryError(f"commit {path} cannot be used: {error}") from error
        return Commit(state, PrivateIndex(private.segments, private.table, older), together, name, begun)

    def open_latest(self) -> tuple[Commit | None, list[str]]:
        """Return the newest commit that is whole, and warnings about damaged ones that were passed over.

        What a crash left behind (commits that never counted, unfinished files, segments nobody refers to) is removed; the rows of
        rounds that were not committed are raydfl.engine.storage.record's. Call it with the lock held.

        Raises:
            RunDirectoryError: there are commits but none is whole.
        """
        remove_parts(self.folder / "commits")
        remove_parts(self.folder, name="LATEST")  # written with the lock only
        remove_parts(self.folder, _PATIENCE)
        latest = self.latest()
        if latest is None:
            if any(self.rounds()):
                raise RunDirectoryError(
                    f"{self.folder / 'LATEST'} is missing, but commits/ holds rounds; write the newest name in commits/ into it"
                )
            return None, []
        warnings = []
        names = self.commits()
        counted = [n for n in names if round_of(n) < round_of(latest)] + [latest]
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
        """Remove what no commit up to this one refers to."""
        self.files = {}
        for name in self.commits():
            if round_of(name) >= commit.state.round_index and name != commit.name:
                (self.folder / "commits" / name).unlink(missing_ok=True)
            elif commit.private:  # else there is none in earlier commits either: an index only grows
                with contextlib.suppress(RunDirectoryError):  # nobody can go back to a damaged one
                    private = (commit if name == commit.name else self.load(name)).private
                    self.files[name] = frozenset(private.files())
        PrivateStore(self.private_folder).retain(set().union(*self.files.values()))

    def sizes_of_segments(self) -> dict[str, int]:
        """Return the bytes of all private segments on the disk, by name."""
        if not self.private_folder.exists():
            return {}
        with os.scandir(self.private_folder) as entries:  # there are many: Path objects take longer
            return {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".seg")}


def round_of(commit: str) -> int:
    """Return the round after which a commit of that name was made.

    >>> round_of("000012-0badcafe.safetensors")
    12
    """
    return int(commit.partition("-")[0])


def as_stored(state: State) -> State:
    """Return a state as it will be read back from a commit, so that a run which goes on sees what one that is resumed sees.

    Its ``extra`` is what JSON makes of it (tuples are lists, all keys texts); no two tensors lie in the same memory.

    Raises:
        ConfigError: something in it cannot be stored; says what and where.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for key, group in state.tensors.items():
        groups[key] = {name: _storable(value, key, name) for name, value in group.items()}
    ends = 0
    lying = [(value.data_ptr(), key, name) for key, group in groups.items() for name, value in group.items()]
    for start, key, name in sorted(lying):
        if start < ends:
            groups[key][name] = groups[key][name].clone()
        ends = max(ends, start + groups[key][name].nbytes)
    return State(state.round_index, groups, _plain(state.extra))


def _storable(value: object, key: object, name: object) -> Tensor:
    """Return a tensor of a state as it is stored."""
    where = f"the method's State.tensors[{key!r}][{name!r}]"
    if not (isinstance(key, str) and isinstance(name, str)):
        raise ConfigError(f"{where}: the keys and names of a state's tensors are texts")
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{where} is a {type(value).__name__}, not a tensor; small facts that JSON can hold go into State.extra"
        )
    if not has_a_format(value):
        raise ConfigError(
            f"{where} is a {value.layout} tensor of {value.dtype}, which a commit cannot hold; use float32"
        )
    plain = type(value) is Tensor and not value.requires_grad
    return (value if plain else value.detach()).cpu().contiguous()


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what JSON makes of ``State.extra``."""

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        plain = dict(pairs)
        if len(plain) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ConfigError(
                f"the method's State.extra has a dict with the key {twice!r} twice, as a text and as something else; all keys "
                f"become texts"
            )
        return plain

    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(extra)), object_pairs_hook=of_pairs)
    except (TypeError, ValueError, RecursionError) as error:
        found = _unstorable(extra, "") if isinstance(error, TypeError) else None
        place, what = found or ("", f"cannot be stored: {error}")
        raise ConfigError(
            f"the method's State.extra{place} {what}; it holds what JSON can: texts, numbers of Python, lists and dicts of them; "
            f"tensors go into State.tensors"
        ) from error
    return plain


def _unstorable(value: Any, place: str) -> tuple[str, str] | None:
    """Find where JSON cannot hold a value, and why."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict) or not place:
        wrong = [key for key in value if not isinstance(key, (str, int, float, bool, type(None)))]
        if wrong:
            return place, f"has the key {wrong[0]!r} of type {type(wrong[0]).__name__}"
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        return place, f"is of type {type(value).__name__}"
    found = (_unstorable(inner, f"{place}[{key!r}]") for key, inner in items)
    return next(filter(None, found), None)


def _encode(state: State, private: PrivateIndex, together: int, begun: tuple[int, ...]) -> bytes:
    tensors = {"private": torch.from_numpy(private.table)}
    for place, group in enumerate(state.tensors.values()):
        for name, value in group.items():
            tensors[f"{place}{_SEPARATOR}{name}"] = value
    about = {
        "format": _FORMAT,
        "round_index": state.round_index,
        "extra": dict(state.extra),
        "keys": {key: list(group) for key, group in state.tensors.items()},
        "base": private.base_name,
        "segments": private.segments,
        "together": together,
    }
    if begun:
        about["begun"] = begun
    return to_safetensors(tensors, {"raydfl": json.dumps(about)})


def _about(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about: dict[str, Any] = json.loads(header["__metadata__"]["raydfl"])
    return about


def _decode(data: bytes) -> tuple[State, PrivateIndex, str, int, tuple[int, ...]]:
    """Return the state, the private index without its base, the base's file, clients trained together, and begun phases."""
    about = _about(data)
    tensors = safetensors.torch.load(data)
    private = PrivateIndex(tuple(about["segments"]), tensors["private"].numpy())
    first = "format" not in about
    groups = {
        key: {name: tensors[f"{key if first else place}{_SEPARATOR}{name}"] for name in names}
        for place, (key, names) in enumerate(about["keys"].items())
    }
    begun = tuple(int(first) for first in about.get("begun", ()))
    return (
        State(int(about["round_index"]), groups, about["extra"]),
        private,
        about["base"],
        int(about["together"]),
        begun,
    )
