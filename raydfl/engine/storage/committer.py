"""Commits that are written while the next round computes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from raydfl.core.types import State
from raydfl.engine.storage import record
from raydfl.engine.storage.mirror import RunMirror
from raydfl.engine.storage.private import PrivateIndex
from raydfl.engine.storage.record import MetricRow
from raydfl.engine.storage.store import RunStore

_MERGE = 100
"""Commits after which their small files of rows are merged into one."""


class Committer:
    """Writes one commit after another in a thread of its own, none before the one before it is on the disk."""

    def __init__(self, store: RunStore) -> None:
        """``store`` must be locked; while a commit is under way nobody else may change what is in it."""
        self._store = store
        self._thread = ThreadPoolExecutor(1, "commit")
        self._under_way: Future[float] | None = None
        self._rows: Sequence[MetricRow] = ()
        self._commits = 0
        self.mirror: RunMirror | None = None
        """Where each commit is copied to; ``None``: nowhere."""

    def start(
        self,
        state: State,
        private: PrivateIndex,
        written: Iterable[str],
        superseded: Iterable[str],
        rows: Sequence[MetricRow],
    ) -> None:
        """Begin to make a round true, with the segments as for RunStore.commit. The one before must have been waited for."""
        if self._under_way is not None:
            raise AssertionError("a commit is still under way")
        self._rows = rows
        self._under_way = self._thread.submit(self._write, state, private, tuple(written), tuple(superseded), rows)

    def _write(
        self,
        state: State,
        private: PrivateIndex,
        written: Sequence[str],
        superseded: Sequence[str],
        rows: Sequence[MetricRow],
    ) -> float:
        started = time.perf_counter()
        # Rows first: what LATEST names is never without its record.
        record.write_rows(record.rows_path(self._store.folder, state.round_index), rows)
        self._store.commit(state, private, written, superseded)
        self._commits += 1
        if self._commits % _MERGE == 0:
            record.compact(self._store.folder, gather=_MERGE)
        if self.mirror is not None:
            self.mirror.push()
        return time.perf_counter() - started

    def wait(self) -> tuple[Sequence[MetricRow], float]:
        """Until the commit under way, if there is one, is on the disk: its rows, and the seconds that it took.

        Raises:
            ResourcesError: the disk is full, and the commit before still counts; or the mirror cannot be reached.
        """
        if self._under_way is None:
            return (), 0.0
        under_way, rows = self._under_way, self._rows
        self._under_way, self._rows = None, ()
        return rows, under_way.result()

    def close(self) -> None:
        """Let the commit under way end, well or not: :meth:`wait` tells."""
        self._thread.shutdown()
