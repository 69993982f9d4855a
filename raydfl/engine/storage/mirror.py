"""A run whose folder is kept behind a URI: it works in a local folder, of which each commit is copied there.

All files of a commit are immutable, so copies are simple: first what is not there yet, then ``LATEST``, then what the commit no
longer needs is removed. After a crash at any moment the place holds a whole commit. When the local folder has gone, or is behind,
it is fetched back first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import RESUME, default_cache, write_durably
from raydfl.core.remote import RemoteFolder, below, check_uri, is_uri, parted
from raydfl.core.yaml import parse_yaml
from raydfl.engine.storage.store import RunStore

_IMMUTABLE = re.compile(r"(commits|private|rows)/.*|population/.*(?<!\.json)")
"""Names of files that never change; a new cache of features changes ``population.json``."""
_OF_COMMITS = ("commits", "private", "rows")
"""Folders in which a commit may make files superfluous."""
_SEGMENT = re.compile(r"private/(\d+)-\S+\.seg")
"""Private state that was written in a round, or gathered after it."""
_AGAIN = 3
"""Times that a run which another machine changes meanwhile is fetched."""


def local_runs(runs: str, cache: Path | None) -> Path:
    """Return the local folder of all runs: ``runs`` itself, or for a URI a folder of its own below the feature cache.

    All nodes of a cluster must see the cache under the same path anyway.
    """
    if not is_uri(runs):
        return Path(runs)
    digest = hashlib.blake2b(runs.encode(), digest_size=4).hexdigest()
    words = re.sub(r"[^A-Za-z0-9]+", "-", runs.partition("?")[0]).strip("-")
    return (default_cache() if cache is None else cache).expanduser().absolute() / "runs" / f"{words}-{digest}"


def mirror_of(runs: str, run_dir: Path) -> RunMirror | None:
    """Return the mirror of a run whose ``run.dir`` is ``runs``; ``None`` where that is a path."""
    return RunMirror(run_dir, below(runs, run_dir.name)) if is_uri(runs) else None


def local_run(run: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Return a run's local folder, which for a URI is fetched first, if it is not there or behind.

    Args:
        overrides: settings, of which ``data.cache`` may say where the local folder shall be.

    Raises:
        RunDirectoryError: there is no run at the URI.
        ResourcesError: it cannot be reached.
        ConfigError: it is no URI that is understood.
    """
    if not is_uri(run):
        return Path(run)
    uri = str(run)
    check_uri(uri, "the run")
    runs, name = parted(uri)
    place = RemoteFolder(uri, "check the URI and the access to it")
    text = place.read("config.yaml")
    if text is None:
        raise RunDirectoryError(f"there is no run at {uri}: it holds no config.yaml")
    folder = local_runs(runs, _cache(text, overrides)) / name
    RunMirror(folder, uri).fetch()
    return folder


def _cache(config: bytes, overrides: Sequence[str]) -> Path | None:
    """Return the cache that is asked for, or the one of the run if this machine has it; else the usual one."""
    asked = [override.partition("=")[2] for override in overrides if override.startswith("data.cache=")]
    if asked:
        return Path(asked[-1])
    values = parse_yaml(config.decode(errors="replace"), "the run's config.yaml", saved=True)
    data = values.get("data") if isinstance(values, dict) else None
    kept = data.get("cache") if isinstance(data, dict) else None
    return Path(kept) if isinstance(kept, str) and Path(kept).is_dir() else None


class RunMirror:
    """The copy of one run's folder behind a URI."""

    def __init__(self, folder: Path, uri: str) -> None:
        """Nothing is looked at yet.

        Args:
            folder: the local folder, in which the run works.
            uri: of the run.
        """
        self.folder = folder
        self.uri = uri
        again = f"raydfl resume {uri}"
        self._place = RemoteFolder(
            uri, f"nothing is lost: the run is in {folder}, and goes on there when the URI can be used again: {again}"
        )
        self._there: dict[str, int] = {}
        self._latest: str | None = None
        self._failed: Exception | None = None

    # -- from there ----------------------------------------------------------------------------------------------------

    def fetch(self) -> bool:
        """Bring the local folder up to the commit that is there, unless it is at that commit or further.

        Returns:
            Whether anything was fetched.

        Raises:
            RunDirectoryError: the local folder holds another run.
            ResourcesError: the URI cannot be read, or the disk is full.
        """
        about, latest = self._place.read("run.json"), self._place.read("LATEST")
        if about is None or latest is None:
            return False
        store = RunStore(self.folder)
        try:
            store.lock(wait=0.0)
        except RunDirectoryError:
            return False  # a run that is under way on this machine: there is nothing newer
        try:
            if not self._behind(about, latest):
                return False
            for _ in range(_AGAIN):
                try:
                    self._download(about)
                    return True
                except FileNotFoundError:  # another machine has committed meanwhile
                    about = self._place.read("run.json") or about
            raise RunDirectoryError(f"{self.uri} changes faster than it can be read; try again when the run has ended")
        finally:
            store.unlock()

    def _behind(self, about: bytes, latest: bytes) -> bool:
        path = self.folder / "run.json"
        if not path.exists():
            return True
        self._check_same(about, path.read_bytes())
        here = self.folder / "LATEST"
        return not here.exists() or _round(here.read_bytes()) < _round(latest)

    def _check_same(self, there: bytes, here: bytes) -> None:
        if _created(there) != _created(here):
            raise RunDirectoryError(
                f"{self.folder} and {self.uri} hold different runs of the same name; remove the one that is not wanted, "
                f"or give the new run another run.name"
            )

    def _download(self, about: bytes) -> None:
        latest = self._place.read("LATEST")
        there = self._place.files()
        if latest is None:
            raise RunDirectoryError(f"{self.uri} has lost its LATEST while it was read; try again")
        for name, size in there.items():
            path = self.folder / name
            known = _IMMUTABLE.fullmatch(name) and path.exists() and path.stat().st_size == size
            if name not in ("run.json", "LATEST") and not known and not _hidden(name):
                self._place.download(name, path, RESUME)
        for path in (self.folder / "rows").glob("*.parquet"):
            if f"rows/{path.name}" not in there:
                path.unlink()
        # Last what makes it a run, and the commit that counts.
        write_durably(self.folder / "run.json", about)
        write_durably(self.folder / "LATEST", latest)

    # -- to there ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make the place hold all of the local folder. No other process may be working in that.

        Raises:
            RunDirectoryError: the place holds another run, or is ahead of the local folder.
            ResourcesError: the URI cannot be used.
        """
        self._there = self._place.files()
        latest = self._place.read("LATEST")
        self._latest = None if latest is None else latest.decode()
        about = self._place.read("run.json")
        here = (self.folder / "run.json").read_bytes()
        if about is not None and _created(about) != _created(here):
            if latest is not None and _round(latest) > 0:
                self._check_same(about, here)
            self._place.remove(["LATEST", *self._there])  # a run that never began
            self._there, self._latest = {}, None
        elif latest is not None and _round(latest) > _round((self.folder / "LATEST").read_bytes()):
            raise RunDirectoryError(f"{self.uri} is further than {self.folder}; go on with: raydfl resume {self.uri}")
        self._push(everything=True)

    def put(self, name: str) -> None:
        """Copy one file that is no part of a commit.

        Raises:
            ResourcesError: the URI cannot be used.
        """
        self._place.upload(self.folder / name, name)

    def push(self) -> None:
        """Copy the newest commit; those that take part in the run may already be writing for the next one.

        Raises:
            RunDirectoryError: another process has committed there.
            ResourcesError: the URI cannot be used.
        """
        if self._failed is not None:
            raise self._failed  # it has been tried for long enough
        try:
            self._push(everything=False)
        except Exception as error:
            self._failed = error
            raise

    def _push(self, everything: bool) -> None:
        latest = (self.folder / "LATEST").read_bytes()
        here = self._files(everything, _round(latest))
        for name, size in here.items():
            if not _IMMUTABLE.fullmatch(name) or self._there.get(name) != size:
                self._place.upload(self.folder / name, name)
                self._there[name] = size
        if self._latest != latest.decode():
            there = self._place.read("LATEST")
            if (None if there is None else there.decode()) != self._latest:
                raise RunDirectoryError(
                    f"another process has committed to {self.uri} since this one began; end one of them, then go on with: "
                    f"raydfl resume {self.uri}"
                )
            self._place.write("LATEST", latest)
            self._latest = latest.decode()
        gone = [name for name in self._there if name.partition("/")[0] in _OF_COMMITS and name not in here]
        self._place.remove(gone)
        for name in gone:
            del self._there[name]

    def _files(self, everything: bool, round_index: int) -> dict[str, int]:
        """Return the bytes of what shall be there, by name: with a commit, only what belongs to commits up to this round's."""
        folders = [self.folder / name for name in _OF_COMMITS] if not everything else [self.folder]
        found: dict[str, int] = {}
        for folder in folders:
            for path in folder.rglob("*"):
                name = path.relative_to(self.folder).as_posix()
                if name == "LATEST" or _hidden(name) or not path.is_file():
                    continue
                segment = _SEGMENT.fullmatch(name)
                if everything or segment is None or int(segment[1]) <= round_index:
                    found[name] = path.stat().st_size
        return found


def _hidden(name: str) -> bool:
    """Return whether it is no file of the run but a lock, or one that is still being written."""
    return any(part.startswith(".") for part in name.split("/"))


def _round(latest: bytes) -> int:
    """Return the round that LATEST names; -1 if it names none."""
    number = latest.decode(errors="replace").partition("-")[0]
    return int(number) if number.isdigit() else -1


def _created(about: bytes) -> Any:
    """Return what tells one run from another of the same name."""
    try:
        facts = json.loads(about)
        return facts["id"], facts["created"], facts["digest"]
    except (ValueError, KeyError, TypeError):
        return about
