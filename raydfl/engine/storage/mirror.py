"""Mirror of a run behind a URI: the run works in a local folder, and each commit is uploaded.

The files of a commit are immutable. An upload copies the new files, then ``LATEST``, then removes superseded files. After a crash
at any moment, the mirror holds a complete commit. If the local folder is missing or behind, it is downloaded first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import RESUME, default_cache, write_durably
from raydfl.core.noise_key import KEY_FILE
from raydfl.core.remote import RemoteFolder, below, check_uri, is_uri, split_uri
from raydfl.core.yaml import parse_yaml
from raydfl.engine.storage.store import RunStore

_IMMUTABLE = re.compile(r"(commits|private|rows)/.*|population/.*(?<!\.json)")
"""Names of immutable files. A new feature cache changes ``population.json``."""
_OF_COMMITS = ("commits", "private", "rows")
"""Folders with files that a commit may supersede."""
_SEGMENT = re.compile(r"private/(\d+)-\S+\.seg")
"""Segments of private state, with the round of their writing or compaction."""
_ADVICE = "check the URI and the access to it"
_AGAIN = 3
"""Attempts to download a run that another machine changes meanwhile."""


def local_runs(runs: str, cache: Path | None) -> Path:
    """Return the local folder of all runs: ``runs`` itself, or for a URI a folder below the feature cache.

    All nodes of a cluster see the feature cache under the same path.
    """
    if not is_uri(runs):
        return Path(runs)
    digest = hashlib.blake2b(runs.encode(), digest_size=4).hexdigest()
    words = re.sub(r"[^A-Za-z0-9]+", "-", runs.partition("?")[0]).strip("-")
    return (default_cache() if cache is None else cache).expanduser().absolute() / "runs" / f"{words}-{digest}"


def mirror_of(runs: str, run_dir: Path) -> RunMirror | None:
    """Return the mirror of a run; ``None`` if ``runs`` (``run.dir``) is a path."""
    return RunMirror(run_dir, below(runs, run_dir.name)) if is_uri(runs) else None


def private_uri(runs: str, run_dir: Path) -> str:
    """Return the URI of a run's private state; empty if ``runs`` (``run.dir``) is a path."""
    return below(below(runs, run_dir.name), "private") if is_uri(runs) else ""


def local_run(run: str | Path, overrides: Sequence[str] = (), private: bool = True) -> Path:
    """Return a run's local folder. For a URI, download the run first if the folder is missing or behind.

    Args:
        run: Folder or URI of the run.
        overrides: Settings ``key=value``. ``data.cache`` determines the local folder.
        private: Whether to download clients' private state.

    Raises:
        RunDirectoryError: The URI holds no run.
        ResourcesError: The URI cannot be reached.
        ConfigError: The URI is invalid.
    """
    if not is_uri(run):
        return Path(run)
    uri = str(run)
    check_uri(uri, "the run")
    runs, name = split_uri(uri)
    place = RemoteFolder(uri, _ADVICE)
    text = place.read("config.yaml")
    if text is None:
        raise RunDirectoryError(f"there is no run at {uri}: it holds no config.yaml. Check the URI")
    folder = local_runs(runs, _find_cache(text, overrides)) / name
    RunMirror(folder, uri).fetch(private)
    return folder


def _find_cache(config: bytes, overrides: Sequence[str]) -> Path | None:
    """Return the cache from the overrides, or the run's cache if it exists here; ``None``: the default cache."""
    asked = [override.partition("=")[2] for override in overrides if override.startswith("data.cache=")]
    if asked:
        return Path(asked[-1])
    values = parse_yaml(config.decode(errors="replace"), "the run's config.yaml", saved=True)
    data = values.get("data") if isinstance(values, dict) else None
    kept = data.get("cache") if isinstance(data, dict) else None
    return Path(kept) if isinstance(kept, str) and Path(kept).is_dir() else None


class RunMirror:
    """Copy of a run's folder behind a URI."""

    def __init__(self, folder: Path, uri: str) -> None:
        """Create a mirror without accessing the URI.

        Args:
            folder: Local folder of the run.
            uri: URI of the run.
        """
        self.folder = folder
        self.uri = uri
        again = (
            f"nothing is lost: the run is in {folder}. Resume it when the URI is available again: raydfl resume {uri}"
        )
        self._place = RemoteFolder(uri, again if (folder / "run.json").exists() else _ADVICE)
        self._there: dict[str, int] = {}
        self._latest: str | None = None
        self._failed: Exception | None = None

    # -- from there ----------------------------------------------------------------------------------------------------

    def fetch(self, private: bool = True) -> bool:
        """Download the mirror's newest commit if the local folder is behind.

        Args:
            private: Whether to download clients' private state. Client actors read it at the URI.

        Returns:
            Whether anything was downloaded.

        Raises:
            RunDirectoryError: The local folder holds another run.
            ResourcesError: The URI cannot be read, or the disk is full.
        """
        about, latest = self._place.read("run.json"), self._place.read("LATEST")
        if about is None or latest is None:
            return False
        store = RunStore(self.folder)
        try:
            store.lock(wait=0.0)
        except RunDirectoryError:
            return False  # the run is in progress on this machine, so the mirror has nothing newer
        try:
            if not self._is_behind(about, latest):
                return False
            for _ in range(_AGAIN):
                try:
                    self._download(about, private)
                    return True
                except FileNotFoundError:  # another machine has committed meanwhile
                    about = self._place.read("run.json") or about
            raise RunDirectoryError(f"{self.uri} changes faster than it can be read. Try again when the run has ended")
        finally:
            store.unlock()

    def _is_behind(self, about: bytes, latest: bytes) -> bool:
        path = self.folder / "run.json"
        if not path.exists():
            return True
        self._check_same(about, path.read_bytes())
        here = self.folder / "LATEST"
        return not here.exists() or _parse_round(here.read_bytes()) < _parse_round(latest)

    def _check_same(self, remote: bytes, local: bytes) -> None:
        if _identify(remote) != _identify(local):
            raise RunDirectoryError(
                f"{self.folder} and {self.uri} hold different runs of the same name. Remove one of them, or give the new run "
                f"another run.name"
            )

    def _download(self, about: bytes, private: bool) -> None:
        latest = self._place.read("LATEST")
        files = self._place.files()
        if latest is None:
            raise RunDirectoryError(f"{self.uri} has lost its LATEST during the download. Try again")
        for name, size in files.items():
            path = self.folder / name
            known = _IMMUTABLE.fullmatch(name) and path.exists() and path.stat().st_size == size
            known = known or (not private and _SEGMENT.fullmatch(name) is not None)
            if name not in ("run.json", "LATEST") and not known and not _is_hidden(name):
                self._place.download(name, path, RESUME)
        for path in (self.folder / "rows").glob("*.parquet"):
            if f"rows/{path.name}" not in files:
                path.unlink()
        # These two files come last: they make the folder a run, and the commit valid.
        write_durably(self.folder / "run.json", about)
        write_durably(self.folder / "LATEST", latest)

    # -- to there ------------------------------------------------------------------------------------------------------

    def sync(self, referenced: Collection[str] | None = None) -> None:
        """Upload the whole local folder. No other process may work in it.

        Args:
            referenced: Names of all private segments in commits. Further segments are removed, as leftovers of a crash. ``None``:
                keep all segments.

        Raises:
            RunDirectoryError: The mirror holds another run, or is ahead of the local folder.
            ResourcesError: The URI cannot be used.
        """
        self._there = self._place.files()
        latest = self._place.read("LATEST")
        self._latest = None if latest is None else latest.decode()
        about = self._place.read("run.json")
        here = (self.folder / "run.json").read_bytes()
        if about is not None and _identify(about) != _identify(here):
            if latest is not None and _parse_round(latest) > 0:
                self._check_same(about, here)
            self._place.remove(["LATEST", *self._there])  # a run that never began
            self._there, self._latest = {}, None
        elif latest is not None and _parse_round(latest) > _parse_round((self.folder / "LATEST").read_bytes()):
            raise RunDirectoryError(f"{self.uri} is ahead of {self.folder}. Continue with: raydfl resume {self.uri}")
        self._push(everything=True)
        if referenced is not None:
            names = [name for name in self._there if _SEGMENT.fullmatch(name)]
            self._remove([name for name in names if name.rpartition("/")[2] not in referenced])

    def put(self, name: str) -> None:
        """Upload a file outside of commits.

        Raises:
            ResourcesError: The URI cannot be used.
        """
        self._place.upload(self.folder / name, name)

    def push(self, superseded: Iterable[str] = ()) -> None:
        """Upload the newest commit. Workers may already write for the next one.

        Args:
            superseded: Unreferenced private segments, to remove.

        Raises:
            RunDirectoryError: Another process has committed to the mirror.
            ResourcesError: The URI cannot be used.
        """
        if self._failed is not None:
            raise self._failed  # the failed push has already exhausted its retries
        try:
            self._push(everything=False)
            self._remove([f"private/{segment}" for segment in superseded])
        except Exception as error:
            self._failed = error
            raise

    def _push(self, everything: bool) -> None:
        latest = (self.folder / "LATEST").read_bytes()
        local = self._files(everything, _parse_round(latest))
        for name, size in local.items():
            if not _IMMUTABLE.fullmatch(name) or self._there.get(name) != size:
                self._place.upload(self.folder / name, name)
                self._there[name] = size
        if self._latest != latest.decode():
            remote = self._place.read("LATEST")
            if (None if remote is None else remote.decode()) != self._latest:
                raise RunDirectoryError(
                    f"another process has committed to {self.uri} since the start of this process. Stop all processes of the run, "
                    f"then continue with: raydfl resume {self.uri}"
                )
            self._place.write("LATEST", latest)
            self._latest = latest.decode()
        listed = [name for name in self._there if name.partition("/")[0] in _OF_COMMITS and name not in local]
        self._remove(
            [name for name in listed if not _SEGMENT.fullmatch(name)]
        )  # workers upload segments without this process

    def _remove(self, names: Sequence[str]) -> None:
        self._place.remove(names)
        for name in names:
            self._there.pop(name, None)

    def _files(self, everything: bool, round_index: int) -> dict[str, int]:
        """Return the sizes of the files to mirror, in bytes by name; for a commit, only files up to its round."""
        folders = [self.folder / name for name in _OF_COMMITS] if not everything else [self.folder]
        sizes: dict[str, int] = {}
        for folder in folders:
            for path in folder.rglob("*"):
                name = path.relative_to(self.folder).as_posix()
                if name == "LATEST" or _is_hidden(name) or not path.is_file():
                    continue
                segment = _SEGMENT.fullmatch(name)
                if everything or segment is None or int(segment[1]) <= round_index:
                    sizes[name] = path.stat().st_size
        return sizes


def _is_hidden(name: str) -> bool:
    """Return whether a file is a lock or an unfinished file, or the secret key of the noise."""
    return name == KEY_FILE or any(part.startswith(".") for part in name.split("/"))


def _parse_round(latest: bytes) -> int:
    """Parse the round of LATEST; -1 if it is invalid."""
    number = latest.decode(errors="replace").partition("-")[0]
    return int(number) if number.isdigit() else -1


def _identify(about: bytes) -> Any:
    """Return the identity of a run, different for runs with the same name."""
    try:
        facts = json.loads(about)
        return facts["id"], facts["created"], facts["digest"]
    except Exception:  # noqa: BLE001  (damaged in any way: compared as bytes)
        return about
