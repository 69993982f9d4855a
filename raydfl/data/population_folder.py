"""The folder of a population: two Arrow tables, arrays in NumPy's format, and ``population.json`` with the facts and digests."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydfl.core.errors import RunDirectoryError, translate_failures
from raydfl.core.files import RESUME, file_digest, write_atomically, writing
from raydfl.core.settings import FIRST_VIEW
from raydfl.data import population_v1
from raydfl.data.client_ids import to_numbers
from raydfl.data.tables import Tables, encode, join_tables

FORMAT = 3
"""Format of new populations. 1: arrays in a safetensors file. 2: tables of each part. 3: tables of all parts."""
FACTS, _CLIPS, _CLIENTS = "population.json", "clips.arrow", "clients.arrow"


def part_folder(folder: Path, part: str) -> Path:
    """Return the subfolder of a part. A part without a name uses the folder of the population itself."""
    return folder / f"part-{part}" if part else folder


def write(folder: Path, parts: Mapping[str, Any], tables: Tables, again: bool = False) -> None:
    """Write a population to a folder.

    Args:
        folder: the folder.
        parts: facts about each part as plain values (:meth:`Part.to_facts`).
        tables: tables of all parts.
        again: the folder contains equal tables. Write only the facts.

    Raises:
        ResourcesError: the disk is full, or the folder is not writable.
    """
    saved = _read_facts(folder) if again else {}
    again = saved.get("format") == FORMAT
    arrays = {} if again else tables.arrays
    batches = {} if again else {_CLIPS: tables.clips, _CLIENTS: tables.clients}
    needed = sum(content.nbytes for content in (*batches.values(), *arrays.values()))
    with writing(folder, needed, "the files of the population", RESUME):
        for name, batch in batches.items():
            write_atomically(folder / name, functools.partial(write_table, batch))
        for name, array in arrays.items():
            write_atomically(folder / f"{name}.npy", functools.partial(_save_array, array))
        names = [*batches, *(f"{name}.npy" for name in arrays)]
        files = {name: [(folder / name).stat().st_size, file_digest(folder / name)] for name in names}
        if again:
            files = saved["files"]
        text = json.dumps({"format": FORMAT, "parts": parts, "files": files})
        content = json.dumps({"facts": text, "digest": _digest(text)})
        # The facts come last: without them, an interrupted write is a missing population, not a damaged one.
        write_atomically(folder / FACTS, lambda path: path.write_text(content))


def read(folder: Path, verify: bool = False) -> tuple[dict[str, Any], Tables]:
    """Memory-map the tables of a population, and read the facts about each part.

    Args:
        folder: the folder of the population.
        verify: verify the digests of all files.

    Returns:
        The facts by part, and the tables of all parts.

    Raises:
        Exception: a file is missing or damaged, or its format is unknown. :func:`translate_damage` explains it.
    """
    if population_v1.is_in(folder) and not (folder / FACTS).exists():
        return _convert(folder, verify, *population_v1.convert(folder, verify))
    facts = _read_facts(folder)
    for name, (size, digest) in facts["files"].items():
        actual = (folder / name).stat().st_size
        if actual != size:
            raise ValueError(f"{name} has {actual} bytes instead of {size}")
        if verify and file_digest(folder / name) != digest:
            raise ValueError(f"the content of {name} has changed")
    arrays = {
        name.removesuffix(".npy"): np.load(folder / name, mmap_mode="r")
        for name in facts["files"]
        if name.endswith(".npy")
    }
    tables = Tables(map_table(folder / _CLIPS), map_table(folder / _CLIENTS), arrays)
    if facts["format"] < FORMAT:
        return _convert(folder, verify, facts, tables)
    return facts["parts"], tables


def _convert(folder: Path, verify: bool, facts: dict[str, Any], tables: Tables) -> tuple[dict[str, Any], Tables]:
    """Convert a population of format 1 or 2, with a separate folder for each part."""
    part_facts: dict[str, Any] = {}
    parts: dict[str, Tables] = {}
    for name, *_ in facts["parts"]:
        single, parts[name] = read(part_folder(folder, name), verify)
        (part_facts[name],) = single.values()
        parts[name] = parts[name].split()[""]
    if not part_facts:
        part_facts[""], parts[""] = _convert_part(facts, tables)
    return part_facts, join_tables(parts)


def _convert_part(facts: dict[str, Any], tables: Tables) -> tuple[dict[str, Any], Tables]:
    """Convert facts and tables of a single part. Format 2 stored the values of codes in the tables, format 3 in the facts."""
    clips = dict(zip(tables.clips.schema.names, tables.clips.columns, strict=True))
    coded = {name: column for name, column in clips.items() if pa.types.is_dictionary(column.type) and name != "role"}
    values = {name.removeprefix("column:"): column.dictionary.to_pylist() for name, column in coded.items()}
    clips |= {name: pa.array(to_numbers(column)) for name, column in coded.items()}
    clients, shards = tables.clients, facts.get("shards")
    if sites := facts.get("sites"):  # in early versions: name, first client, stop, ranges of shards by split
        shards = [
            (split, *bounds, name)
            for name, _, _, splits in sites
            for split, ranges in splits.items()
            for bounds in ranges
        ]
        codes = np.repeat(np.arange(len(sites), dtype=np.int32), [stop - first for _, first, stop, _ in sites])
        clients = clients.append_column("place", encode(codes, [name for name, *_ in sites]))
    views = {FIRST_VIEW: {name: facts[name] for name in ("length", "stores", "bands")}}
    for name, (store, length) in facts["views"].items():
        views[name] = {"length": length, "stores": [] if store is None else [store], "bands": None}
    converted = {
        "labels": facts["classes"],
        "views": views,
        "pools": values.pop("pool", ["train"]),
        "columns": values,
        "shards": shards,
        **{name: facts[name] for name in ("separator", "skipped", "messages")},
    }
    return converted, Tables(pa.record_batch(clips), clients, tables.arrays)


def upgrade_population(folder: Path) -> None:
    """Convert the files of format 1 in a folder to tables.

    Raises:
        RunDirectoryError: the file is damaged.
        ResourcesError: the disk is full, or the folder is not writable.
    """
    with translate_damage(folder):
        if not population_v1.is_in(folder):
            return
        write(folder, *read(folder, verify=True))
    for file in [folder, *folder.glob("part-*")]:
        population_v1.remove(file)


@contextmanager
def translate_damage(folder: Path) -> Iterator[None]:
    """Convert errors of :func:`read` to a message about the population in the folder.

    Raises:
        RunDirectoryError: the population is missing or damaged.
    """
    with translate_failures(
        lambda reason: RunDirectoryError(
            f"the population in {folder} is missing or damaged ({reason}). Restore it from a copy, or restart the run in a "
            f"new folder"
        )
    ):
        yield


def _read_facts(folder: Path) -> dict[str, Any]:
    stored = json.loads((folder / FACTS).read_text())
    facts: dict[str, Any] = json.loads(stored["facts"])
    if facts["format"] not in (2, FORMAT):
        raise ValueError(f"its format is {facts['format']}, but this version of raydfl reads format {FORMAT}")
    if _digest(stored["facts"]) != stored["digest"]:
        raise ValueError(f"the content of {FACTS} has changed")
    return facts


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _save_array(array: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, array)


def write_table(table: pa.RecordBatch, path: Path) -> None:
    """Write a table without compression, so that :func:`map_table` can map it."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_batch(table)


def map_table(path: Path) -> pa.RecordBatch:
    """Memory-map a table.

    Raises:
        OSError, ArrowException: the file is missing or damaged.
    """
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0)
