"""Run directory: immutable files, and a pointer to the current commit.

    config.yaml             the resolved configuration
    run.json                description of the run: method, data, classes, models
    population/             the clips of each client (raydfl.data.population)
    private/*.seg           segments of clients' private state, appended by the processes that train the clients
    private/*.index         index of private state after some round, named after its checksum
    commits/RRRRRR-crc.safetensors   the server's state after round R, the name of an index, and changes since that index
    rows/RRRRRR.parquet     rows of the metrics table up to the commit
    LATEST                  name of the current commit

A commit makes all its files durable, then replaces LATEST by a rename. Only then is it valid. Leftovers of a crash are removed when
the run is opened again. The file name of a commit includes its checksum.

A new index is written only after many changes (raydfl.engine.storage.private.PrivateIndex). Therefore the cost of a commit depends
on the clients trained since the last commit, not on the number of clients. A file in private/ is removed together with the last
commit that refers to it.
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
from torch import Tensor

from raydfl.core.errors import ConfigError, RunDirectoryError, translate_failures
from raydfl.core.files import plain_name, remove_parts, write_durably
from raydfl.core.lock import FileLock
from raydfl.core.tensor_file import has_a_format, to_safetensors
from raydfl.core.types import State
from raydfl.engine.storage.private import PrivateIndex, PrivateStore, UploadedPrivateStore

_COMMIT = re.compile(r"^(\d{6,})-([0-9a-f]{8})\.safetensors$")
_FOLDERS = ("commits", "population", "private", "rows")
"""Folders with files that a run replaces or removes."""
_SEPARATOR = "|"
_FORMAT = 2
"""Format of a commit. Format 2 names tensors by the position of their key in ``keys``, format 1 (still readable) by the key."""
_PATIENCE = 600.0
"""Age in seconds after which an unfinished file in the run's folder counts as orphaned. Some of its writers hold no lock."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Committed round: the server's state and the index of clients' private state."""

    state: State
    private: PrivateIndex
    together: int
    block: int
    name: str
    begun: tuple[int, ...] = ()
    """Rounds completed before each phase, if a phase ended early; empty: as configured."""


class RunStore:
    """Run directory, opened by one process at a time."""

    def __init__(self, folder: Path, keep: int = 3, private_here: bool = True, uploads: str = "") -> None:
        """Open a run directory.

        Args:
            folder: Folder of the run.
            keep: Number of commits to keep.
            private_here: Whether this process can access clients' private records. If False, the caller must ask the workers to
                remove the segments from :meth:`take_forgotten`.
            uploads: URI of the folder to which workers upload private records; empty: they are in the run's folder.
        """
        self.folder = folder
        self.keep = keep
        self.private_here = private_here
        self.private_folder = folder / "private"
        private = UploadedPrivateStore(self.private_folder, uploads) if uploads else PrivateStore(self.private_folder)
        self._private: PrivateStore = private
        self.together = 1
        """Clients trained in one batched computation. Every commit stores it."""
        self.block = 1
        """Clients in a block, whose updates are added before they reach the server. Every commit stores it."""
        self._lock = FileLock(folder / ".lock")
        self._forgotten: list[str] = []
        self.files: dict[str, frozenset[str]] = {}
        """Files in private/ that each kept commit refers to, by the commit's name, oldest first."""
        self._best = ""
        """Name of the best round's commit, which is kept in addition to the newest commits."""

    def lock(self, wait: float = 20.0) -> None:
        """Acquire the exclusive right to commit. The lock ends with the process.

        Args:
            wait: Seconds to wait for another process.

        Raises:
            RunDirectoryError: Another process holds the lock, or a folder of the run is a link to a folder outside of it.
        """
        own = Path(os.path.realpath(self.folder))
        for path in (self.folder / name for name in _FOLDERS):
            if not Path(os.path.realpath(path)).is_relative_to(own):
                raise RunDirectoryError(
                    f"{path} is a link to {os.path.realpath(path)}, outside the run's folder. A run removes files from its "
                    f"folders, and this folder may belong to another run. Replace the link by the folder itself. To use another "
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
        """Commit a state; return the commit's name.

        Args:
            state: Server's state.
            private: Index of all clients' newest records.
            segments: Segments that ``private`` refers to. A segment is removed once no kept commit refers to it.
            written: Segments written since the last commit, which must become durable first.
            best: Whether to keep the commit until another commit becomes the best.
            begun: Rounds completed before each phase, if a phase ended early.

        Raises:
            ResourcesError: The disk is full. The previous commit stays valid.
        """
        if self.private_here:
            self._private.sync(written & segments)
        if private.base is not None and not (path := self.private_folder / private.base_name).exists():
            write_durably(path, private.base.encode())
        data = _encode(state, private, self.together, self.block, begun)
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
        """Keep the commit of a round, if it exists, until another commit becomes the best.

        Raises:
            RunDirectoryError: The commit is damaged.
        """
        name = self.commit_of(round_index)
        if name is not None:
            self._best = self.load(name).name

    def commit_of(self, round_index: int) -> str | None:
        """Return the name of a round's commit; ``None`` if it is not kept."""
        return next((name for name in self.commits() if round_of(name) == round_index), None)

    def _forget(self, newest: str, files: frozenset[str]) -> None:
        """Remove superseded commits, and their files and ``files`` unless a remaining commit refers to them."""
        names, gone = self.commits(), files
        for name in names[: names.index(newest) + 1][: -self.keep]:
            if name != self._best:
                (self.folder / "commits" / name).unlink(missing_ok=True)
                gone |= self.files.pop(name, frozenset())
        for file in gone.difference(*self.files.values()):
            self._remove(file)

    def _remove(self, name: str) -> None:
        """Remove a file in private/, and queue a segment for removal by the mirror or the workers."""
        if name.endswith(".seg"):
            self._forgotten.append(name)
        (self.private_folder / name).unlink(missing_ok=True)

    def take_forgotten(self) -> list[str]:
        """Return the segments that have lost their last reference since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def commits(self) -> list[str]:
        """Return the names of the commit files, oldest first."""
        folder = self.folder / "commits"
        if not folder.exists():
            return []
        return sorted((p.name for p in folder.iterdir() if _COMMIT.match(p.name)), key=lambda n: (round_of(n), n))

    def rounds(self) -> list[int]:
        """Return the rounds of all kept commits, ascending."""
        return [round_of(name) for name in self.commits()]

    def latest(self) -> str | None:
        """Return the name of the current commit; ``None`` before the first commit.

        Raises:
            RunDirectoryError: LATEST does not name a commit.
        """
        path = self.folder / "LATEST"
        if not path.exists():
            return None
        name = path.read_text(errors="replace").strip()
        if not _COMMIT.match(name):
            raise RunDirectoryError(
                f"{path} does not name a commit but holds {name[:60]!r}. Write the newest name in commits/ into it"
            )
        return name

    def newest(self) -> Commit | None:
        """Load the current commit; ``None`` before the first commit.

        Raises:
            RunDirectoryError: The commit is missing or damaged, or LATEST does not name a commit.
        """
        name = self.latest()
        return None if name is None else self.load(name)

    def load(self, name: str) -> Commit:
        """Load a commit by its name.

        Raises:
            RunDirectoryError: The commit is missing or damaged.
        """
        path = self.folder / "commits" / name
        match = _COMMIT.match(name)
        with translate_failures(lambda reason: RunDirectoryError(f"commit {path} cannot be read: {reason}")):
            data = path.read_bytes()
        if match is None or zlib.crc32(data) != int(match.group(2), 16):
            raise RunDirectoryError(f"commit {path} is damaged: its checksum does not match its content")
        with translate_failures(lambda reason: RunDirectoryError(f"commit {path} cannot be decoded: {reason}")):
            state, private, base, together, block, begun = _decode(data)
            for file in (*private.segments, *([base] if base else [])):
                plain_name(file)
        try:
            older = PrivateIndex.read(self.private_folder / base) if base else None
        except RunDirectoryError as error:
            raise RunDirectoryError(f"commit {path} cannot be used: {error}") from error
        return Commit(state, PrivateIndex(private.segments, private.table, older), together, block, name, begun)

    def open_latest(self) -> tuple[Commit | None, list[str]]:
        """Load the newest intact commit; also return warnings about newer, damaged commits.

        Removes leftovers of a crash: invalid commits, unfinished files and unreferenced segments. To remove rows of uncommitted
        rounds, call :func:`raydfl.engine.storage.record.discard_rows`. The caller must hold the lock.

        Raises:
            RunDirectoryError: All commits are damaged.
        """
        remove_parts(self.folder / "commits")
        remove_parts(self.folder, name="LATEST")  # written with the lock only
        remove_parts(self.folder, _PATIENCE)
        latest = self.latest()
        if latest is None:
            if any(self.rounds()):
                raise RunDirectoryError(
                    f"{self.folder / 'LATEST'} is missing, but commits/ holds rounds. Write the newest name in commits/ into it"
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
            raise RunDirectoryError(
                "; ".join(warnings) + "; no earlier commit is intact. Restart the run in a new folder"
            )
        if warnings:
            write_durably(self.folder / "LATEST", name.encode())
        self._clean(commit)
        return commit, warnings

    def _clean(self, commit: Commit) -> None:
        """Remove files without a reference from this or an earlier commit."""
        self.files = {}
        for name in self.commits():
            if round_of(name) >= commit.state.round_index and name != commit.name:
                (self.folder / "commits" / name).unlink(missing_ok=True)
            elif commit.private:  # an index only grows, so earlier commits of an empty one have no files
                with contextlib.suppress(RunDirectoryError):  # the files of a damaged commit are of no use
                    private = (commit if name == commit.name else self.load(name)).private
                    self.files[name] = frozenset(private.files())
        PrivateStore(self.private_folder).retain(set().union(*self.files.values()))

    def sizes_of_segments(self) -> dict[str, int]:
        """Return the bytes of all accessible private segments, by name."""
        return self._private.sizes()


def round_of(commit: str) -> int:
    """Parse the round from a commit's name.

    >>> round_of("000012-0badcafe.safetensors")
    12
    """
    return int(commit.partition("-")[0])


def as_stored(state: State) -> State:
    """Convert a state to its form after a commit, so that continued and resumed runs have equal states.

    Its ``extra`` passes through JSON (tuples become lists, keys become strings). No two tensors share memory.

    Raises:
        ConfigError: A value cannot be stored. The message names it.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for key, group in state.tensors.items():
        groups[key] = {name: _make_storable(value, key, name) for name, value in group.items()}
    ends = 0
    lying = [(value.data_ptr(), key, name) for key, group in groups.items() for name, value in group.items()]
    for start, key, name in sorted(lying):
        if start < ends:  # overlaps the previous tensor, which restored tensors never do
            groups[key][name] = groups[key][name].clone()
        ends = max(ends, start + groups[key][name].nbytes)
    return State(state.round_index, groups, _to_plain(state.extra))


def _make_storable(value: object, key: object, name: object) -> Tensor:
    """Convert a tensor of a state to its stored form."""
    where = f"the method's State.tensors[{key!r}][{name!r}]"
    if not (isinstance(key, str) and isinstance(name, str)):
        raise ConfigError(f"{where}: the keys and names of a state's tensors must be strings")
    if not isinstance(value, Tensor):
        raise ConfigError(f"{where} is a {type(value).__name__}, not a tensor. Store small JSON values in State.extra")
    if not has_a_format(value):
        raise ConfigError(
            f"{where} is a {value.layout} tensor of {value.dtype}. A commit cannot store it; use a dense float32 tensor"
        )
    plain = type(value) is Tensor and not value.requires_grad
    return (value if plain else value.detach()).cpu().contiguous()


def _to_plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Pass ``State.extra`` through JSON."""

    def build_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        plain = dict(pairs)
        if len(plain) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ConfigError(
                f"the method's State.extra has a dict with the key {twice!r} twice, as a string and as another type. JSON converts "
                f"all keys to strings; rename one"
            )
        return plain

    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(extra)), object_pairs_hook=build_dict)
    except (TypeError, ValueError, RecursionError) as error:
        culprit = _find_unstorable(extra, "") if isinstance(error, TypeError) else None
        place, problem = culprit or ("", f"cannot be stored: {error}")
        raise ConfigError(
            f"the method's State.extra{place} {problem}. It may hold JSON values only (strings, numbers, lists and dicts). "
            f"Store tensors in State.tensors"
        ) from error
    return plain


def _find_unstorable(value: Any, place: str) -> tuple[str, str] | None:
    """Find the place of a value that JSON cannot store, and the reason."""
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
    culprits = (_find_unstorable(inner, f"{place}[{key!r}]") for key, inner in items)
    return next(filter(None, culprits), None)


def _encode(state: State, private: PrivateIndex, together: int, block: int, begun: tuple[int, ...]) -> bytes:
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
    if block > 1:  # commits without blocks keep the form of earlier versions
        about["block"] = block
    return to_safetensors(tensors, {"raydfl": json.dumps(about)})


def _read_about(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about: dict[str, Any] = json.loads(header["__metadata__"]["raydfl"])
    return about


def _decode(data: bytes) -> tuple[State, PrivateIndex, str, int, int, tuple[int, ...]]:
    """Return the state, the private index without its base, the base's file, batch width and block of clients, and begun phases."""
    about = _read_about(data)
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
        int(about.get("block", 1)),
        begun,
    )
