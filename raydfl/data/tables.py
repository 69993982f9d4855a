"""The tables of clips and clients: how they are made, written and mapped into memory, and how a client is found by its id.

raydfl.data.population lists their columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.sequences import OnDemand

ROLES = ("train", "validation", "client_test", "server_validation", "test", "attack", "triggered")
"""Uses of an example, in the order of the table of clips. Attackers train on ``attack`` in place of ``train``."""
POOLED = ("train", "attack")
"""Roles whose examples are in pools."""
_CHUNK = 1 << 22


def clips_table(
    columns: Mapping[str, np.ndarray], pools: Sequence[str], further: Mapping[str, Sequence[str]]
) -> pa.RecordBatch:
    """Make a table of clips.

    Args:
        columns: by name; ``role``, ``pool`` and further columns as codes.
        pools: names of the pools.
        further: values of the further columns by name.
    """
    values = {"role": ROLES, "pool": pools, **{f"column:{name}": own for name, own in further.items()}}
    return pa.record_batch(
        {name: encode(own, values[name]) if name in values else pa.array(own) for name, own in columns.items()}
    )


def no_clips() -> pa.RecordBatch:
    """Make a table without clips, for a federation whose clips are elsewhere."""
    kinds = {"role": np.int8, "pool": np.int8, "client": np.int32}
    return clips_table({name: np.zeros(0, kind) for name, kind in kinds.items()}, ("train",), {})


def table_prefix(view: str) -> str:
    """Return the prefix of the names of the tables of a view's transforms."""
    return f"transforms-{view}." if view else "transforms."


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


def encode(codes: np.ndarray, values: Sequence[Any] | pa.Array) -> pa.DictionaryArray:
    """Make a dictionary column.

    Args:
        codes: int [rows]: the position of each row's value; negative for null.
        values: the distinct values.
    """
    absent = codes < 0
    known = values if isinstance(values, pa.Array) else pa.array(values, None if len(values) else pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=absent if absent.any() else None), known)


def to_numbers(column: pa.Array) -> np.ndarray:
    """Convert a column to NumPy without a copy where possible; a dictionary column to its codes, -1 for null."""
    if pa.types.is_dictionary(column.type):
        column = column.indices.fill_null(-1) if column.null_count else column.indices
    found: np.ndarray = column.to_numpy(zero_copy_only=False)
    return found


class ClientIds(OnDemand[str]):
    """The ids of clients in their order, found by binary search.

    Args:
        column: large_string [clients], distinct, without nulls.
        by_id: int32 [clients]: positions in the order of the ids' bytes. ``None``: the ids ascend.
    """

    def __init__(self, column: pa.LargeStringArray, by_id: np.ndarray | None) -> None:
        self.column, self.by_id = column, by_id
        # Arrow's own access to strings trusts the file.
        _, ends, text = column.buffers()
        self._ends = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
        self._text = memoryview(b"" if text is None else text)

    @classmethod
    def from_strings(cls, ids: Iterable[str] | pa.LargeStringArray) -> ClientIds:
        """Index ids, which may be an Arrow array already."""
        if isinstance(ids, ClientIds):
            return ids
        column = ids if isinstance(ids, pa.LargeStringArray) else pa.array(list(ids), pa.large_string())
        rising = pc.all(pc.less(column[:-1], column[1:])).as_py() is not False
        return cls(column, None if rising else pc.sort_indices(column).to_numpy().astype(np.int32))

    @classmethod
    def from_table(cls, clients: pa.RecordBatch) -> ClientIds:
        """Read the ids of a table of clients."""
        by_id = clients.column("by_id").to_numpy() if "by_id" in clients.schema.names else None
        return cls(clients.column("client"), by_id)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns of a table of clients that hold the ids."""
        return {"client": self.column} | ({} if self.by_id is None else {"by_id": pa.array(self.by_id)})

    def find_duplicate(self) -> str | None:
        """Return an id that occurs twice, ``None`` if all are distinct."""
        if self.by_id is None:
            return None
        ordered = self.column.take(pa.array(self.by_id))
        place = pc.index(pc.equal(ordered[:-1], ordered[1:]), True).as_py()
        return None if place < 0 else str(ordered[place])

    def __len__(self) -> int:
        return len(self.column)

    def item(self, position: int) -> str:
        """Return an id."""
        return str(self._text[self._ends[position] : self._ends[position + 1]], "utf-8")

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Find the position of an id.

        Raises:
            ValueError: there is no such id.
        """
        wanted, order, low, high = value.encode(), self.by_id, 0, len(self)
        while low < high:
            middle = (low + high) // 2
            place = middle if order is None else int(order[middle])
            if bytes(self._text[self._ends[place] : self._ends[place + 1]]) < wanted:
                low = middle + 1
            else:
                high = middle
        if low < len(self):
            found = low if order is None else int(order[low])
            if self.item(found) == value and found in range(len(self))[start:stop]:
                return found
        raise ValueError(f"{value!r} is not among these {len(self)} ids")

    def __contains__(self, value: object) -> bool:
        try:
            self.index(str(value))
        except ValueError:
            return False
        return isinstance(value, str)
