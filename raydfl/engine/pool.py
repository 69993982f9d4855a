"""Pools carry out orders: what they have in common, and the one that works in this process. Others: raydfl.cluster.pool."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from raydfl.core.tensors import FlatTensors
from raydfl.engine.orders import Order, Reply, in_groups
from raydfl.engine.storage.private import PrivateRef
from raydfl.engine.telemetry import with_spans
from raydfl.engine.worker import Worker


class Pool(Protocol):
    """A pool of workers, which carries out clients' work."""

    apart: bool
    """True if it works while its caller does something else."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        """Yield the replies to all orders, in order of completion. Work may begin before the first is asked for."""
        ...

    def places(self) -> int:
        """Return the number of clients (or groups) that can be worked on at a time; 0: as many as are asked for."""
        ...

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Return :meth:`Worker.width` of a process in which clients are trained."""
        ...

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Do PrivateStore.compact, where private state may be read."""
        ...

    def remove(self, segments: Collection[str]) -> None:
        """Do PrivateStore.remove wherever segments may lie outside the run's folder."""
        ...

    def retain(self, segments: Collection[str]) -> None:
        """Do PrivateStore.retain wherever segments may lie outside the run's folder."""
        ...

    def close(self) -> None:
        """Free what the pool holds."""
        ...


class SerialPool:
    """Everything in this process, in the order given: for tests, debuggers and small work."""

    apart = False

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        """Carry out one group of orders after another, each when its replies are asked for."""
        for group in in_groups(orders):
            begun = time.perf_counter()
            replies = self._worker.carry_out(group, broadcast, begun)
            yield from with_spans(replies, 0, begun, time.perf_counter())

    def places(self) -> int:
        """Return 1: this process."""
        return 1

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Return the width of this process's worker."""
        return self._worker.width(orders, broadcast)

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Do PrivateStore.compact."""
        return self._worker.private.compact(round_index, refs)

    def remove(self, segments: Collection[str]) -> None:
        """Do PrivateStore.remove."""
        self._worker.private.remove(segments)

    def retain(self, segments: Collection[str]) -> None:
        """Do PrivateStore.retain."""
        self._worker.private.retain(segments)

    def close(self) -> None:
        """Close the file that private state is written to."""
        self._worker.private.close()
