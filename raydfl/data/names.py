"""Many short strings in three arrays: memory-mapped, they cost a process nothing until they are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

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
        """Pack strings."""
        encoded = [string.encode() for string in strings]
        order = sorted(range(len(encoded)), key=encoded.__getitem__)
        ends = np.cumsum([len(string) for string in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends, np.array(order, np.int32))

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
