"""How much of each segment of private state still counts, followed from record to record."""

from __future__ import annotations

from collections.abc import Mapping

from raydfl.private import PrivateIndex, PrivateRef


class Ledger:
    """Of every segment that holds a client's newest record, its bytes and those of them that still count.

    A round changes a few entries; nobody needs to look at all segments to know what has become worth moving or removing.
    """

    def __init__(self, index: PrivateIndex, sizes: Mapping[str, int]) -> None:
        """Begin with what a commit says.

        Args:
            index: where everybody's newest record lies.
            sizes: bytes of the segments, by name. Those of others (a replay leaves them where they are) count as all needed.
        """
        self._live = index.bytes_by_segment()
        self._sizes = {segment: max(live, sizes.get(segment, 0)) for segment, live in self._live.items()}
        self.live = sum(self._live.values())
        """Bytes of all clients' newest records."""
        self.bytes = sum(self._sizes.values())
        """Bytes of the segments that they are in."""
        self._written: set[str] = set()
        self._emptied: set[str] = set()

    def move(self, former: PrivateRef | None, ref: PrivateRef) -> None:
        """A client's newest record is now ``ref``."""
        self._written.add(ref.segment)
        self._emptied.discard(ref.segment)
        self._live[ref.segment] = self._live.get(ref.segment, 0) + ref.length
        self._sizes[ref.segment] = self._sizes.get(ref.segment, 0) + ref.length
        self.live += ref.length
        self.bytes += ref.length
        if former is None:
            return
        self.live -= former.length
        self._live[former.segment] -= former.length
        if not self._live[former.segment]:
            del self._live[former.segment]
            self.bytes -= self._sizes.pop(former.segment)
            self._emptied.add(former.segment)

    def sparse(self) -> set[str]:
        """Segments of which less than half still counts. This looks at all of them."""
        return {segment for segment, live in self._live.items() if 2 * live < self._sizes[segment]}

    def take(self) -> tuple[set[str], set[str]]:
        """Since this was last asked: the segments that were written, and those that no longer hold anything that counts."""
        taken = self._written - self._emptied, self._emptied
        self._written, self._emptied = set(), set()
        return taken
