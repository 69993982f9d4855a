"""Transfer of a population and its features through a URI, to nodes without a common file system.

``URI/KEY`` holds a feature store, and ``URI/population-DIGEST`` the tables of a population. Both names are digests of the
content, so several runs share a copy, and a complete copy never changes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raydfl.core.errors import DataError, ResourcesError
from raydfl.core.files import CHOOSE_CACHE, default_cache, free_bytes, full_disk, plain_name, writing
from raydfl.core.lock import hold_lock
from raydfl.core.remote import RemoteFolder, below, split_uri
from raydfl.data.population import Population
from raydfl.data.population_folder import FACTS, translate_damage

_STORE = "store.json"
_ADVICE = "check the URI and the access of every node to it, then resume the run"


def upload_population(folder: Path, uri: str) -> str:
    """Upload a saved population and its features, unless the URI has them.

    Args:
        folder: Folder of the population.
        uri: URI of a folder for the files of all populations.

    Returns:
        The population's URI, for :func:`fetch_population`.

    Raises:
        ResourcesError: The URI cannot be written.
    """
    stored = json.loads((folder / FACTS).read_text())
    facts = json.loads(stored["facts"])
    for store in _list_stores(facts):
        _upload(store, json.loads((store / _STORE).read_bytes())["files"], _STORE, below(uri, store.name))
    place = below(uri, f"population-{stored['digest']}")
    _upload(folder, facts["files"], FACTS, place)
    return place


def fetch_population(uri: str, cache: Path | None) -> Population:
    """Load a population of :func:`upload_population`, and copy files that this node's cache lacks.

    Several processes may call this function concurrently. The first copies, and the rest wait.

    Args:
        uri: URI of the population.
        cache: Folder of the feature cache on this node; ``None``: the default cache.

    Raises:
        DataError: The URI has no such population.
        ResourcesError: The URI cannot be read, or the disk is full or not writable.
    """
    place, name = split_uri(uri)
    cache = (default_cache() if cache is None else cache).expanduser().absolute()
    folder = cache / "populations" / plain_name(name)
    _fetch(uri, FACTS, folder)
    with translate_damage(folder):
        stores = _list_stores(json.loads(json.loads((folder / FACTS).read_text())["facts"]))
    for store in stores:
        _fetch(below(place, plain_name(store.name)), _STORE, cache / store.name)
    return Population.load(folder, cache=cache)


def _list_stores(facts: Mapping[str, Any]) -> list[Path]:
    """Return the folders of all feature stores of a population."""
    views = [view for part in facts["parts"].values() for view in part["views"].values()]
    return [Path(store) for view in views for store in view["stores"]]


def _upload(folder: Path, names: Iterable[str], last: str, uri: str) -> None:
    """Upload files of a folder. The file ``last`` marks a complete copy."""
    remote = RemoteFolder(uri, _ADVICE)
    there = remote.files()
    if last in there:
        return
    for name in [*names, last]:
        if there.get(name) != (folder / name).stat().st_size:
            remote.upload(folder / name, name)


def _fetch(uri: str, last: str, folder: Path) -> None:
    """Download the files of a folder. The file ``last`` marks a complete copy."""
    with writing(folder.parent, 0, folder.name, CHOOSE_CACHE):
        if (folder / last).exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock")
        lock.touch()
    with hold_lock(lock):
        if (folder / last).exists():
            return
        remote = RemoteFolder(uri, _ADVICE)
        files = remote.files()
        if last not in files:
            raise DataError(f"{uri} has no {last}. Resume the run, so that it uploads its data again")
        missing = {
            name: size
            for name, size in files.items()
            if not (path := folder / name).exists() or path.stat().st_size != size
        }
        needed = sum(missing.values())
        if free_bytes(folder.parent) < needed:
            raise full_disk(folder.parent, needed, "the features", CHOOSE_CACHE)
        with contextlib.suppress(KeyError):
            missing[last] = missing.pop(last)  # the last one
        for name in missing:
            try:
                remote.download(name, folder / name, CHOOSE_CACHE)
            except FileNotFoundError as error:
                raise ResourcesError(f"{below(uri, name)} has been removed during its copy; {_ADVICE}") from error
