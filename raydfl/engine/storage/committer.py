"""Commits: what is to be made true of a round is held fast at its end, and written while the next round computes."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from raydfl.core.types import State
from raydfl.engine.storage import record
from raydfl.engine.storage.mirror import RunMirror
from raydfl.engine.storage.private import PrivateIndex, PrivateRef
from raydfl.engine.storage.record import MetricRow
from raydfl.engine.storage.store import RunStore

_MERGE = 100
"""Commits after which their small files of rows are merged into one."""
_SLACK = 64 << 20
"""Bytes of superseded private state that are not worth moving anything."""


class Committer:
    """Writes one commit after another in a thread of its own, none before the one before it is on the disk.

    A commit has two stages: :meth:`prepare` holds fast what it shall be, :meth:`begin` has it written. Between them the next round
    is handed out, so that clients need not wait for the disk.
    """

    def __init__(
        self, store: RunStore, newest: State, private: PrivateIndex, remove: Callable[[Collection[str]], None]
    ) -> None:
        """Open it.

        Args:
            store: must be locked; while a commit is under way nobody else may change what is in it.
            newest: the state of the newest commit.
            private: where private state lies by that commit.
            remove: removes segments that no commit refers to, outside the run's folder.
        """
        self.round_index = newest.round_index
        """The last round that is committed, or will be once :meth:`begin` has been called."""
        self.mirror: RunMirror | None = None
        """The mirror to which each commit is copied; ``None``: there is none."""
        self._seconds = 0.0
        """Seconds that the last finished commit took."""
        self._waited = 0.0
        """Seconds for which rounds had to wait for commits, since :meth:`take_seconds`."""
        self._store = store
        self._remove = remove
        self._pending: list[MetricRow] = []
        """Rows of the rounds since the last commit."""
        self._usage = SegmentUsage(private, store.sizes_of_segments())
        self._thread = ThreadPoolExecutor(1, "commit")
        self._prepared: Callable[[], tuple[float, Sequence[MetricRow]]] | None = None
        self._under_way: Future[tuple[float, Sequence[MetricRow]]] | None = None
        self._commits = 0

    def note_moved(self, former: PrivateIndex, moved: Mapping[int, PrivateRef]) -> None:
        """Keep count of what clients' new private records supersede in a former index."""
        for client, ref in moved.items():
            self._usage.move(former.get(client), ref)

    def worth_moving(self, private: PrivateIndex) -> PrivateIndex | None:
        """Return the private records that fill little of their segments, if these take more than about twice what counts."""
        return private.within(self._usage.sparse()) if self._usage.wasteful else None

    def go_back_to(self, private: PrivateIndex) -> None:
        """Take note that an earlier index counts again, whose commit must be kept."""
        written = self._usage.written
        self._usage = SegmentUsage(private, self._store.sizes_of_segments())
        self._usage.written = written

    def add_rows(self, rows: Sequence[MetricRow]) -> None:
        """Add rows of a round to the next commit."""
        self._pending += rows

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds of the last finished commit, and those that rounds have waited for commits since the last call."""
        waited, self._waited = self._waited, 0.0
        return self._seconds, waited

    def prepare(
        self,
        state: State,
        private: PrivateIndex,
        best: bool = False,
        begun: tuple[int, ...] = (),
    ) -> None:
        """Hold fast what the next commit shall be. The one before must have been waited for.

        Args:
            best: see :meth:`RunStore.commit`.
            begun: see :attr:`Commit.begun`.
        """
        if self._under_way is not None or self._prepared is not None:
            raise AssertionError("a commit is still under way")
        segments = self._usage.take()
        self._prepared = functools.partial(self._write, _held(state), private, segments, best, begun, self._pending)
        self._pending = []
        self.round_index = state.round_index

    def begin(self) -> None:
        """Have what is prepared written, if anything is."""
        if self._prepared is not None:
            self._under_way, self._prepared = self._thread.submit(self._prepared), None

    def _write(
        self,
        state: State,
        private: PrivateIndex,
        segments: tuple[frozenset[str], frozenset[str]],
        best: bool,
        begun: tuple[int, ...],
        rows: Sequence[MetricRow],
    ) -> tuple[float, Sequence[MetricRow]]:
        """Write a commit; return the seconds that it took, and its rows."""
        started = time.perf_counter()
        # Rows first: what LATEST names is never without its record.
        record.write_rows(record.rows_path(self._store.folder, state.round_index), rows)
        self._store.commit(state, private, *segments, best, begun)
        self._commits += 1
        if self._commits % _MERGE == 0:
            record.compact(self._store.folder, gather=_MERGE)
        if self.mirror is not None:
            self.mirror.push()
        return time.perf_counter() - started, rows

    def wait(self) -> Sequence[MetricRow]:
        """Wait until the commit under way, if there is one, is on the disk, and return its rows.

        Raises:
            ResourcesError: the disk is full, and the commit before still counts; or the mirror cannot be reached.
        """
        under_way, self._under_way = self._under_way, None
        rows: Sequence[MetricRow] = ()
        if under_way is not None:
            asked = time.perf_counter()
            self._seconds, rows = under_way.result()
            self._waited += time.perf_counter() - asked
        forgotten = self._store.take_forgotten()
        if forgotten:
            self._remove(forgotten)
        return rows

    def close(self) -> None:
        """Write what is prepared, and let the commit under way end, well or not: :meth:`wait` tells."""
        try:
            self.begin()
        finally:
            self._thread.shutdown()


def _held(state: State) -> State:
    """Return a state that stays as it is, whatever a method does to the one that it gets in the next round."""
    tensors = {key: {name: tensor.clone() for name, tensor in group.items()} for key, group in state.tensors.items()}
    return State(state.round_index, tensors, copy.deepcopy(dict(state.extra)))


class SegmentUsage:
    """The use of segments: for each that holds a client's newest record, its bytes and how many of them still count.

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
        self.written: set[str] = set()
        """The segments that were written since the last commit."""

    def move(self, former: PrivateRef | None, ref: PrivateRef) -> None:
        """Note that a client's newest record is now ``ref``."""
        self.written.add(ref.segment)
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

    def take(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the segments that hold anything that counts, and those that were written since this was last asked."""
        written, self.written = frozenset(self.written), set()
        return frozenset(self._live), written

    @property
    def wasteful(self) -> bool:
        """Return whether the segments take more than about twice what counts."""
        return self.bytes > 2 * self.live + _SLACK

    def sparse(self) -> set[str]:
        """Return the segments of which less than half still counts. This looks at all of them."""
        return {segment for segment, live in self._live.items() if 2 * live < self._sizes[segment]}
