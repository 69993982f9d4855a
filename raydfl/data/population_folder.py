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

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import RESUME, write_atomically, writing
from raydfl.core.settings import FIRST_VIEW
from raydfl.data import population_v1
from raydfl.data.client_ids import to_numbers
from raydfl.data.tables import Tables, encode, join_tables

FORMAT = 3
_FACTS, _CLIPS, _CLIENTS = "population.json", "clips.arrow", "clients.arrow"
_CHUNK = 1 << 22


def part_folder(folder: Path, part: str) -> Path:
    """Return the folder of a part in the folder of a population; the single part without a name has the folder itself."""
    return folder / f"part-{part}" if part else folder


def write(folder: Path, parts: Mapping[str, Any], tables: Tables, again: bool = False) -> None:
    """Write a population. The facts are written last.

    Args:
        parts: facts about each part, plain values.
        tables: of all parts.
        again: the folder holds equal tables; only the facts are written.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    kept = _read_facts(folder) if again else {}
    again = kept.get("format") == FORMAT
    arrays = {} if again else tables.arrays
    batches = {} if again else {_CLIPS: tables.clips, _CLIENTS: tables.clients}
    needed = sum(each.nbytes for each in (*batches.values(), *arrays.values()))
    with writing(folder, needed, "the files of the population", RESUME):
        for name, batch in batches.items():
            write_atomically(folder / name, functools.partial(write_table, batch))
        for name, array in arrays.items():
            write_atomically(folder / f"{name}.npy", functools.partial(_save_array, array))
        names = [*batches, *(f"{name}.npy" for name in arrays)]
        files = {name: [(folder / name).stat().st_size, digest_file(folder / name)] for name in names}
        if again:
            files = kept["files"]
        text = json.dumps({"format": FORMAT, "parts": parts, "files": files})
        content = json.dumps({"facts": text, "digest": _digest(text)})
        write_atomically(folder / _FACTS, lambda path: path.write_text(content))


def read(folder: Path, verify: bool = False) -> tuple[dict[str, Any], Tables]:
    """Map the tables of a population, and read the facts about each part.

    Args:
        verify: compare the files with their digests.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: a file is missing or damaged, or of another format.
    """
    if population_v1.is_in(folder) and not (folder / _FACTS).exists():
        return _convert(folder, verify, *population_v1.convert(folder, verify))
    facts = _read_facts(folder)
    for name, (size, digest) in facts["files"].items():
        found = (folder / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found} bytes instead of {size}")
        if verify and digest_file(folder / name) != digest:
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
    """Convert a population of format 1 or 2, in which each part has a folder of its own."""
    found: dict[str, Any] = {}
    parts: dict[str, Tables] = {}
    for name, *_ in facts["parts"]:
        own, parts[name] = read(part_folder(folder, name), verify)
        (found[name],) = own.values()
        parts[name] = parts[name].split()[""]
    if not found:
        found[""], parts[""] = _convert_part(facts, tables)
    return found, join_tables(parts)


def _convert_part(facts: dict[str, Any], tables: Tables) -> tuple[dict[str, Any], Tables]:
    """Convert facts and tables of a population of one part. The names of pools and values were in the tables."""
    clips = dict(zip(tables.clips.schema.names, tables.clips.columns, strict=True))
    listed = {name: own for name, own in clips.items() if pa.types.is_dictionary(own.type) and name != "role"}
    values = {name.removeprefix("column:"): column.dictionary.to_pylist() for name, column in listed.items()}
    clips |= {name: pa.array(to_numbers(column)) for name, column in listed.items()}
    clients, shards = tables.clients, facts.get("shards")
    if sites := facts.get("sites"):  # of early versions: name, first client, stop, ranges of shards by split
        shards = [(split, *bounds, name) for name, _, _, of in sites for split, own in of.items() for bounds in own]
        codes = np.repeat(np.arange(len(sites), dtype=np.int32), [stop - first for _, first, stop, _ in sites])
        clients = clients.append_column("place", encode(codes, [name for name, *_ in sites]))
    views = {FIRST_VIEW: {name: facts[name] for name in ("length", "stores", "bands")}}
    for name, (store, length) in facts["views"].items():
        views[name] = {"length": length, "stores": [] if store is None else [store], "bands": None}
    found = {
        "labels": facts["classes"],
        "views": views,
        "pools": values.pop("pool", ["train"]),
        "columns": values,
        "shards": shards,
        **{name: facts[name] for name in ("separator", "skipped", "messages")},
    }
    return found, Tables(pa.record_batch(clips), clients, tables.arrays)


def upgrade_population(folder: Path) -> None:
    """Replace the files of format 1 by tables.

    Raises:
        RunDirectoryError: the file is damaged.
        ResourcesError: the disk is full or the folder cannot be written.
    """
    with translate_damage(folder):
        if not population_v1.is_in(folder):
            return
        write(folder, *read(folder, verify=True))
    for file in [folder, *folder.glob("part-*")]:
        population_v1.remove(file)


@contextmanager
def translate_damage(folder: Path) -> Iterator[None]:
    """Turn an error of :func:`read` into a message about the population in the folder.

    Raises:
        RunDirectoryError: the block found it missing or damaged.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (
            f"{Path(error.filename).name}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        )
        raise RunDirectoryError(
            f"the population in {folder} is missing or damaged ({reason}); start the run again in a new folder"
        ) from error


def _read_facts(folder: Path) -> dict[str, Any]:
    stored = json.loads((folder / _FACTS).read_text())
    facts: dict[str, Any] = json.loads(stored["facts"])
    if facts["format"] not in (2, FORMAT):
        raise ValueError(f"it is of format {facts['format']}, this version of raydfl reads {FORMAT}")
    if _digest(stored["facts"]) != stored["digest"]:
        raise ValueError(f"the content of {_FACTS} has changed")
    return facts


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _save_array(array: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, array)


def write_table(table: pa.RecordBatch, path: Path) -> None:
    """Write a table without compression, so that :func:`map_table` needs no copy."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_batch(table)


def map_table(path: Path) -> pa.RecordBatch:
    """Map a table into memory.

    Raises:
        OSError, ValueError: the file is missing or damaged.
    """
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0)


def digest_file(path: Path) -> str:
    """Compute the hexadecimal digest of a file, with a few megabytes in memory."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
