"""Columns of a table as NumPy arrays, and the ids of clients as a column of text."""

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
    """View a column of integers as NumPy array, and a dictionary column as its codes, -1 for null. Truth values are unpacked."""
    if pa.types.is_dictionary(column.type):
        column = column.indices.fill_null(-1) if column.null_count else column.indices
    # Arrow's to_numpy would import pandas in every process.
    first, stop, content = column.offset, column.offset + len(column), column.buffers()[1] or b""
    if pa.types.is_boolean(column.type):
        return np.unpackbits(np.frombuffer(content, np.uint8), count=stop, bitorder="little")[first:].view(np.bool_)
    kind = np.dtype(str(column.type))
    return np.frombuffer(content, kind, stop)[first:] if stop else np.zeros(0, kind)


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

    def __reduce__(self) -> tuple[Any, ...]:
        return ClientIds, (self.column, self.by_id)

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
        by_id = to_numbers(clients.column("by_id")) if "by_id" in clients.schema.names else None
        return cls(clients.column("client"), by_id)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns of a table of clients that hold the ids."""
        return {"client": self.column} | ({} if self.by_id is None else {"by_id": pa.array(self.by_id)})

    def select_part(self, part: str) -> pa.LargeStringArray:
        """Return the ids as a federation of several parts has them: ``digits/george``."""
        prefix, large = qualify(part, "/", ""), pa.large_string()
        if not prefix:  # millions of ids are not copied
            return self.column
        return pc.binary_join_element_wise(pa.scalar(prefix, large), self.column, pa.scalar("", large))

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
        """Return an id.

        Raises:
            RunDirectoryError: the file of the clients is damaged.
        """
        try:
            return str(self._text[self._ends[position] : self._ends[position + 1]], "utf-8")
        except UnicodeDecodeError as error:
            raise RunDirectoryError(
                f"the population is damaged: the id of client {position} is no text ({error}); start the run again in a new folder"
            ) from error

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
