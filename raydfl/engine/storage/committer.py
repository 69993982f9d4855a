"""Background commits: snapshot the state at the end of a round and write it during the next round."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from raydfl.core.types import State
from raydfl.engine.fleet import NOBODY, InFlight
from raydfl.engine.storage import record
from raydfl.engine.storage.mirror import RunMirror
from raydfl.engine.storage.private import PrivateIndex, PrivateRef
from raydfl.engine.storage.record import MetricRow
from raydfl.engine.storage.store import RunStore

_MERGE = 100
"""Commits between two merges of their small files of rows."""
_SLACK = 64 << 20
"""Bytes of superseded private state that do not yet justify a compaction."""


class Committer:
    """Writer of commits, one at a time, in a background thread.

    A commit has two stages: :meth:`prepare` takes a snapshot, and :meth:`begin` starts the write. The orders of the next round go
    out between the two, so that clients do not wait for the disk.
    """

    def __init__(
        self, store: RunStore, newest: State, private: PrivateIndex, remove: Callable[[Collection[str]], None]
    ) -> None:
        """Create a committer that continues from the newest commit.

        Args:
            store: Locked store. Nobody else may change it during a commit.
            newest: State of the newest commit.
            private: Index of private state in the newest commit.
            remove: Removes unreferenced segments outside the run's folder.
        """
        self.round_index = newest.round_index
        """The last round that is committed or prepared."""
        self.mirror: RunMirror | None = None
        """Destination of a copy of each commit; ``None``: no copies."""
        self._seconds = 0.0
        """Duration of the last finished commit, in seconds."""
        self._waited = 0.0
        """Seconds that rounds waited for commits since the last :meth:`take_seconds`."""
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
        """Count the records of a former index that new private records supersede."""
        for client, ref in moved.items():
            self._usage.move(former.get(client), ref)

    def select_sparse(self, private: PrivateIndex) -> PrivateIndex | None:
        """Return the records of sparse segments, if segments exceed about twice the size of their live records."""
        return private.select_segments(self._usage.sparse()) if self._usage.wasteful else None

    def restore(self, private: PrivateIndex) -> None:
        """Make an earlier index current again. Its commit must still exist."""
        written = self._usage.written
        self._usage = SegmentUsage(private, self._store.sizes_of_segments())
        self._usage.written = written

    def add_rows(self, rows: Sequence[MetricRow]) -> None:
        """Add rows of a round to the next commit."""
        self._pending += rows

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds of the last finished commit, and the seconds of waiting for commits since the last call."""
        waited, self._waited = self._waited, 0.0
        return self._seconds, waited

    def prepare(
        self,
        state: State,
        private: PrivateIndex,
        best: bool = False,
        begun: tuple[int, ...] = (),
        in_flight: InFlight = NOBODY,
    ) -> None:
        """Take a snapshot for the next commit. Call :meth:`wait` for the previous commit first.

        Args:
            best: True keeps the commit until another round becomes the best.
            begun: Rounds completed before each phase, if a phase ended early.
            in_flight: Clients in flight.
        """
        if self._under_way is not None or self._prepared is not None:
            raise AssertionError("a commit is still under way")
        segments = self._usage.take()
        args = (_snapshot(state), private, segments, best, begun, in_flight, self._pending)
        self._prepared = functools.partial(self._write, *args)
        self._pending = []
        self.round_index = state.round_index

    def begin(self) -> None:
        """Start the write of the prepared commit, if any."""
        if self._prepared is not None:
            self._under_way, self._prepared = self._thread.submit(self._prepared), None

    def _write(
        self,
        state: State,
        private: PrivateIndex,
        segments: tuple[frozenset[str], frozenset[str]],
        best: bool,
        begun: tuple[int, ...],
        in_flight: InFlight,
        rows: Sequence[MetricRow],
    ) -> tuple[float, Sequence[MetricRow]]:
        """Write a commit; return its duration in seconds, and its rows."""
        started = time.perf_counter()
        # Rows go first, so that LATEST never points to a commit without its rows.
        record.write_rows(record.rows_path(self._store.folder, state.round_index), rows)
        self._store.commit(state, private, *segments, best, begun, in_flight)
        self._commits += 1
        if self._commits % _MERGE == 0:
            record.compact(self._store.folder, gather=_MERGE)
        # Without private state in this process's reach, the next call of wait() asks the workers instead.
        superseded = self._store.take_forgotten() if self._store.private_here else []
        if self.mirror is not None:
            self.mirror.push(superseded)
        return time.perf_counter() - started, rows

    def wait(self) -> Sequence[MetricRow]:
        """Wait for the current commit, if any, and return its rows.

        Raises:
            ResourcesError: The disk is full, or the mirror cannot be reached. The previous commit stays valid.
        """
        under_way, self._under_way = self._under_way, None
        rows: Sequence[MetricRow] = ()
        if under_way is not None:
            asked = time.perf_counter()
            self._seconds, rows = under_way.result()
            self._waited += time.perf_counter() - asked
        if not self._store.private_here and (forgotten := self._store.take_forgotten()):
            self._remove(forgotten)
        return rows

    def close(self) -> None:
        """Write the prepared commit and end the thread. :meth:`wait` raises the errors of the commit."""
        try:
            self.begin()
        finally:
            self._thread.shutdown()


def _snapshot(state: State) -> State:
    """Copy a state, to protect it from changes by the method's next round."""
    tensors = {key: {name: tensor.clone() for name, tensor in group.items()} for key, group in state.tensors.items()}
    return State(state.round_index, tensors, copy.deepcopy(dict(state.extra)))


class SegmentUsage:
    """Sizes of the segments of private state, in total and of their live records.

    A round updates a few entries, so that compaction and removal need no scan of all segments.
    """

    def __init__(self, index: PrivateIndex, sizes: Mapping[str, int]) -> None:
        """Count the live records of a commit.

        Args:
            index: Index of all clients' newest records.
            sizes: Bytes of the segments, by name. Missing segments (of a replayed run) count as fully live.
        """
        self._live = index.bytes_by_segment()
        self._sizes = {segment: max(live, sizes.get(segment, 0)) for segment, live in self._live.items()}
        self.live = sum(self._live.values())
        """Bytes of all clients' newest records."""
        self.bytes = sum(self._sizes.values())
        """Bytes of the segments with live records."""
        self.written: set[str] = set()
        """The segments that were written since the last commit."""

    def move(self, former: PrivateRef | None, ref: PrivateRef) -> None:
        """Replace a client's newest record by ``ref``."""
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
        """Return the segments with live records, and the segments written since the last call."""
        written, self.written = frozenset(self.written), set()
        return frozenset(self._live), written

    @property
    def wasteful(self) -> bool:
        """True if the segments exceed about twice the size of their live records."""
        return self.bytes > 2 * self.live + _SLACK

    def sparse(self) -> set[str]:
        """Return the segments whose live records fill less than half. Scans all segments."""
        return {segment for segment, live in self._live.items() if 2 * live < self._sizes[segment]}
