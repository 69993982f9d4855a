"""Many short strings in three arrays: memory-mapped, they cost a process nothing until they are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.sequences import OnDemand


class Names(OnDemand[str]):
    """An immutable sequence of distinct strings with fast look-up both ways.

    Args:
        text: uint8 [bytes], the strings in UTF-8 one after another.
        ends: int64 [strings], where each string ends in ``text``.
        order: int32 [strings], positions in the order of the strings' bytes.
    """

    def __init__(self, text: np.ndarray, ends: np.ndarray, order: np.ndarray) -> None:
        self._text, self._ends, self._order = text, ends, order

    @classmethod
    def of(cls, strings: Iterable[str]) -> Names:
        """Pack strings; what is packed already is returned as it is."""
        if isinstance(strings, Names):
            return strings
        encoded = [string.encode() for string in strings]
        order = sorted(range(len(encoded)), key=encoded.__getitem__)
        ends = np.cumsum([len(string) for string in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends, np.array(order, np.int32))

    @classmethod
    def numbered(cls, prefix: str, count: int) -> Names:
        """Return ``prefix0``, ``prefix1`` ..., numbers with as many digits as the last one; no string is made."""
        digits = len(str(count - 1))
        text = np.empty((count, len(prefix.encode()) + digits), np.uint8)
        text[:, : text.shape[1] - digits] = np.frombuffer(prefix.encode(), np.uint8)
        rest = np.arange(count, dtype=np.int32)
        for place in range(1, digits + 1):
            text[:, -place] = rest % 10 + ord("0")
            rest //= 10
        ends = np.arange(1, count + 1, dtype=np.int64) * text.shape[1]
        return cls(text.reshape(-1), ends, np.arange(count, dtype=np.int32))

    @classmethod
    def of_column(cls, column: pa.ChunkedArray) -> Names:
        """Pack a column of strings, large or not, without nulls; no string is made. It may have one several times."""
        chunks = [_unpacked(chunk) for chunk in column.chunks]
        starts = np.cumsum([0, *(len(text) for text, _ in chunks)])
        text = chunks[0][0] if len(chunks) == 1 else np.concatenate([text for text, _ in chunks])
        ends = np.concatenate([own + start for (_, own), start in zip(chunks, starts, strict=False)])
        if pc.all(pc.less(column[:-1], column[1:])).as_py() is not False:
            return cls(text, ends, np.arange(len(ends), dtype=np.int32))
        return cls(text, ends, pc.sort_indices(column).to_numpy().astype(np.int32))

    @classmethod
    def among(cls, arrays: Mapping[str, np.ndarray], kind: str) -> Names:
        """Return the names of a kind that are among further arrays, as ``KIND/text``, ``KIND/ends`` and ``KIND/order``."""
        return cls(*(arrays[f"{kind}/{argument}"] for argument in ("text", "ends", "order")))

    def repeated(self) -> str | None:
        """Return a string that is there more than once; ``None``: all are distinct."""
        strings = pa.LargeStringArray.from_buffers(
            len(self), pa.py_buffer(np.r_[0, self._ends]), pa.py_buffer(np.ascontiguousarray(self._text))
        )
        ordered = strings if _rising(self._order) else strings.take(pa.array(self._order))
        found = pc.index(pc.equal(ordered[:-1], ordered[1:]), True).as_py()
        return None if found < 0 else str(ordered[found])

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The constructor's arguments by name."""
        return {"text": self._text, "ends": self._ends, "order": self._order}

    def __len__(self) -> int:
        return len(self._ends)

    def item(self, position: int) -> str:
        """Return a string."""
        return self._bytes(position).decode()

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """Return the position of a string, by binary search.

        Raises:
            ValueError: it is not there.
        """
        wanted = value.encode()
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._bytes(int(self._order[middle])) < wanted:
                low = middle + 1
            else:
                high = middle
        if low < len(self):
            found = int(self._order[low])
            if self._bytes(found) == wanted and found in range(len(self))[start:stop]:
                return found
        raise ValueError(f"{value!r} is not among these {len(self)} names")

    def __contains__(self, value: object) -> bool:
        try:
            self.index(str(value))
        except ValueError:
            return False
        return isinstance(value, str)

    def _bytes(self, index: int) -> bytes:
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].tobytes()


def _unpacked(strings: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 [bytes], the text of strings, and int64 [strings], where each ends in it."""
    _, offsets, data = strings.buffers()
    width = np.int64 if pa.types.is_large_string(strings.type) else np.int32
    bounds = np.frombuffer(offsets, width)[strings.offset : strings.offset + len(strings) + 1].astype(np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return text[bounds[0] : bounds[-1]], bounds[1:] - bounds[0]


def _rising(order: np.ndarray) -> bool:
    """Return whether an order is 0, 1, 2 ..."""
    return bool(len(order) < 2 or (order[1:] > order[:-1]).all())
