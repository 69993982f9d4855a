"""The file of a population: its arrays, mapped into memory rather than read, and as JSON the facts, which are all else it knows.

Features are not in it; the facts name the stores in the cache where they lie. The arrays, which are the argument of that name of
:class:`raydfl.data.population.Population` too, are columns of parts, ``PART/COLUMN``, and more about clients:

- Of each of the parts train, validation (both by client), server_validation and test the columns ``starts``, ``counts``, ``labels``
  and ``clips``, and ``column/NAME`` for each further column. Where clients have tests of their own also the part client_test, by
  client. Another pool than the first is the part ``train@NAME``.
- ``train/offsets`` and ``validation/offsets`` (int64 [clients + 1]); ``groups_of`` (int32 [clients], -1: none), ``noisy`` and
  ``label_errors`` (bool [clients]). Where a table of clients says who has which clips, none of these is there, but ``train/first``
  and ``train/stop`` (int32 [clients]): the part train then has each example once, and several clients may have it.
- The names of clients and groups, ``ids/`` and ``groups/`` with what :class:`raydfl.data.names.Names` is made of.
- With an attack also the parts attack (what clients train on when they attack, parallel to train) and triggered (test clips that
  carry the attack's trigger), and ``altered`` (bool [clients]: the features of its attack are in the last store).
- With features normalised by group ``statistics/values`` (float64 [2, groups + 1, bands], those of
  raydfl.data.features.statistics) and ``statistics/of`` (int32 [clients], the client's place in them).
- ``profile/NAME/of`` (int32 [clients]), the position of what is known of each client among the names ``profile/NAME/``. The facts
  name the type of values that are no text.
- What transforms need of the outside world, under ``transforms/``.
- Of a further view, where examples lie in it: the columns ``starts`` and ``counts`` (0: absent) of the parts ``train@NAME`` and so
  on; and ``presence/NAME`` (bool [clients]), who has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import RESUME, write_atomically, writing
from raydfl.data.array_file import digest, file_digest, map_arrays, write_arrays
from raydfl.data.features.cache import FeatureStore, open_store
from raydfl.data.shards import Site

FORMAT = 1
POPULATION_FILE = "population.safetensors"

TABLES = "transforms"
"""The beginning of the names of transforms' tables."""

PRESENCE = "presence"
"""The beginning of the names of what says which clients have a further view."""


def table_prefix(view: str) -> str:
    """Return what the names of the tables of a view's transforms begin with."""
    return f"{TABLES} {view}/" if view else f"{TABLES}/"


def folder_of(folder: Path, part: str) -> Path:
    """Return where a part of a population is kept whose own folder is ``folder``."""
    return folder / f"part-{part}"


def write(folder: Path, arguments: Mapping[str, Any], parts: Sequence[tuple[str, int, int]]) -> None:
    """Write the file of a population into a folder.

    Args:
        arguments: of Population by name, but for ``parts``.
        parts: of each its name, its first client and its bands.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    arrays: Mapping[str, np.ndarray] = arguments["arrays"]
    metadata = {"raydfl": json.dumps(_facts(arguments, parts))}
    needed = sum(array.nbytes for array in arrays.values())
    with writing(folder, needed, "the files of the population", RESUME):
        write_atomically(folder / POPULATION_FILE, lambda temporary: write_arrays(temporary, arrays, metadata))


def _facts(arguments: Mapping[str, Any], parts: Sequence[tuple[str, int, int]] = ()) -> dict[str, Any]:
    """Return what is kept beside the arrays, for arguments as in :func:`write`."""
    arrays, separator = arguments["arrays"], arguments["separator"]
    facts: dict[str, Any] = {
        "format": FORMAT,
        "classes": arguments["classes"],
        **({} if separator is None else {"separator": separator}),
        "length": arguments["length"],
        "stores": [str(store.folder) for store in arguments["stores"]],
        "skipped": arguments["skipped"],
        "messages": arguments["messages"],
        "bands": arguments["bands"],
        "views": {
            name: [None if store is None else str(store.folder), length]
            for name, (store, length) in arguments["views"].items()
        },
        "sites": [[site.name, site.first, site.stop, dict(site.shards)] for site in arguments["sites"]],
        "digest": digest(arrays, _derived(arrays)),
    }
    if arguments["columns"]:
        facts["columns"] = arguments["columns"]
    if arguments["profile_types"]:
        facts["profile_types"] = arguments["profile_types"]
    if len(arguments["pools"]) > 1:
        facts["pools"] = arguments["pools"]
    if parts:
        facts["parts"] = parts
    return facts


def read(
    folder: Path, verify: bool, verify_features: bool, bands: int | None
) -> tuple[dict[str, Any], list[tuple[str, int, int | None]]]:
    """Open the file of a population, in milliseconds and without a copy.

    Args:
        verify: read all of it and compare it with its digest.
        verify_features: the same with the features.
        bands: features of a frame, where no example will be read; no store is opened then.

    Returns:
        The arguments of Population by name, but for ``parts``; and of each part its name, its first client and ``bands`` for it.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: the file is missing or damaged, or of another format.
        DataError: the features in the cache are.
    """
    path = folder / POPULATION_FILE
    arrays, metadata = map_arrays(path)
    facts = json.loads(metadata["raydfl"])
    if facts["format"] != FORMAT:
        raise ValueError(f"it is of format {facts['format']}, this version of raydfl reads {FORMAT}")
    if verify and file_digest(path, _derived(arrays)) != facts["digest"]:
        raise ValueError("its content has changed")

    def opened(store: str | None) -> FeatureStore | None:
        return None if store is None or bands is not None else open_store(Path(store), verify_features)

    views = {name: (opened(store), length) for name, (store, length) in facts.get("views", {}).items()}
    arguments = {
        "classes": facts["classes"],
        "length": facts["length"],
        "stores": [opened(store) for store in facts["stores"]] if bands is None else [],
        "arrays": arrays,
        "skipped": facts["skipped"],
        "messages": facts["messages"],
        # A population of an early version says neither bands nor sites.
        "bands": facts.get("bands") if bands is None else bands,
        "sites": [Site(*site) for site in facts.get("sites", ())],
        "columns": facts.get("columns"),
        "pools": facts.get("pools", ("train",)),
        "separator": facts.get("separator"),
        "views": views,
        "profile_types": facts.get("profile_types"),  # an early version read all columns as text
    }
    return arguments, [(name, first, None if bands is None else own) for name, first, own in facts.get("parts", ())]


@contextmanager
def refusing_damage(folder: Path) -> Iterator[None]:
    """Say of the population in a folder that it cannot be opened, where something in the block finds it damaged.

    Raises:
        RunDirectoryError: so it is.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirectoryError(
            f"{folder / POPULATION_FILE} is missing or damaged ({reason}); the population of this run cannot be opened: start the "
            "run again in a new folder"
        ) from error


def is_written_in(folder: Path, arguments: Mapping[str, Any]) -> bool:
    """Return whether the file in a folder is of the population with these arguments, whose stores may lie in another cache."""
    return _identity(read_facts(folder)) == _identity(_facts(arguments))


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what is kept beside the arrays in the file of a folder."""
    _, metadata = map_arrays(folder / POPULATION_FILE)
    facts: dict[str, Any] = json.loads(metadata["raydfl"])
    return facts


def _identity(facts: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    """Return by what a population is known again: its digest, its labels and the names of its stores."""
    folders = [*facts["stores"], *(store for store, _ in facts.get("views", {}).values())]
    return facts["digest"], list(facts["classes"]), [Path(store).name for store in folders if store is not None]


def _derived(names: Iterable[str]) -> list[str]:
    """Return the names of arrays that follow from others."""
    # Statistics and tables are computed from features, whose last bits another machine's processor may round differently; presence
    # only says what the numbers of frames say already.
    return [name for name in names if name == "statistics/values" or name.startswith((TABLES, f"{PRESENCE}/"))]
