"""Client ids in an Arrow column, and conversion of Arrow columns to NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import RunDirectoryError
from raydfl.core.part_names import qualify
from raydfl.core.sequences import OnDemand


def to_numbers(column: pa.Array) -> np.ndarray:
    """Convert a column of integers or booleans to a NumPy array. A dictionary column gives its codes, -1 for null."""
    if pa.types.is_dictionary(column.type):
        column = column.indices.fill_null(-1) if column.null_count else column.indices
    # Arrow's to_numpy would import pandas in all worker processes.
    first, stop, content = column.offset, column.offset + len(column), column.buffers()[1] or b""
    if pa.types.is_boolean(column.type):
        return np.unpackbits(np.frombuffer(content, np.uint8), count=stop, bitorder="little")[first:].view(np.bool_)
    kind = np.dtype(str(column.type))
    return np.frombuffer(content, kind, stop)[first:] if stop else np.zeros(0, kind)


class ClientIds(OnDemand[str]):
    """A sequence of client ids with binary search.

    Args:
        column: large_string [clients], distinct and without nulls.
        by_id: int32 [clients], permutation that sorts the ids by their bytes. ``None``: the ids are sorted.
    """

    def __init__(self, column: pa.LargeStringArray, by_id: np.ndarray | None) -> None:
        self.column, self.by_id = column, by_id
        # Bounds and encoding are checked by Python, because Arrow trusts the file.
        _, ends, text = column.buffers()
        self._ends = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
        self._text = memoryview(b"" if text is None else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ClientIds, (self.column, self.by_id)

    @classmethod
    def from_strings(cls, ids: Iterable[str] | pa.LargeStringArray) -> ClientIds:
        """Build the index of ids, from strings or an Arrow array."""
        if isinstance(ids, ClientIds):
            return ids
        column = ids if isinstance(ids, pa.LargeStringArray) else pa.array(list(ids), pa.large_string())
        is_sorted = pc.all(pc.less(column[:-1], column[1:])).as_py() is not False
        return cls(column, None if is_sorted else pc.sort_indices(column).to_numpy().astype(np.int32))

    @classmethod
    def from_table(cls, clients: pa.RecordBatch) -> ClientIds:
        """Read the ids from a table of clients."""
        by_id = to_numbers(clients.column("by_id")) if "by_id" in clients.schema.names else None
        return cls(clients.column("client"), by_id)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns ``client`` and ``by_id`` of a table of clients."""
        return {"client": self.column} | ({} if self.by_id is None else {"by_id": pa.array(self.by_id)})

    def select_part(self, part: str) -> pa.LargeStringArray:
        """Return the ids with the prefix of a part: ``digits/george``."""
        prefix, large = qualify(part, "/", ""), pa.large_string()
        if not prefix:  # avoids a copy of millions of ids
            return self.column
        return pc.binary_join_element_wise(pa.scalar(prefix, large), self.column, pa.scalar("", large))

    def find_duplicate(self) -> str | None:
        """Return a duplicate id; ``None`` if all ids are distinct."""
        if self.by_id is None:
            return None
        ordered = self.column.take(pa.array(self.by_id))
        place = pc.index(pc.equal(ordered[:-1], ordered[1:]), True).as_py()
        return None if place < 0 else str(ordered[place])

    def __len__(self) -> int:
        return len(self.column)

    def item(self, position: int) -> str:
        """Return the id at a position.

        Raises:
            RunDirectoryError: the table of clients is damaged.
        """
        try:
            return str(self._text[self._ends[position] : self._ends[position + 1]], "utf-8")
        except UnicodeDecodeError as error:
            raise RunDirectoryError(
                f"the population is damaged: the id of client {position} is not text ({error}). Restart the run in a new folder"
            ) from error

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the position of an id.

        Raises:
            ValueError: the id is unknown.
        """
        key, order, low, high = value.encode(), self.by_id, 0, len(self)
        while low < high:
            middle = (low + high) // 2
            place = middle if order is None else int(order[middle])
            if bytes(self._text[self._ends[place] : self._ends[place + 1]]) < key:
                low = middle + 1
            else:
                high = middle
        if low < len(self):
            position = low if order is None else int(order[low])
            if self.item(position) == value and position in range(len(self))[start:stop]:
                return position
        raise ValueError(f"{value!r} is not among {len(self)} ids")

    def __contains__(self, value: object) -> bool:
        try:
            self.index(str(value))
        except ValueError:
            return False
        return isinstance(value, str)
