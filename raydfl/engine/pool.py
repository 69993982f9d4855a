"""Pools of workers: the interface, and the pool that works in this process. raydfl.cluster.pool has the pool of Ray actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from raydfl.core.tensors import FlatTensors
from raydfl.engine.orders import Order, Reply, split_groups
from raydfl.engine.telemetry import add_spans
from raydfl.engine.worker import Worker

T = TypeVar("T")


class Pool(Protocol):
    """Workers at one or several places. An order goes to a worker at its place, which alone has the data."""

    apart: bool
    """True if it works while its caller does something else."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        """Yield the replies to all orders, in order of completion. Work may begin before the first is asked for."""
        ...

    def places(self) -> int:
        """Return the number of clients (or groups) that can be worked on at a time; 0: as many as are asked for."""
        ...

    def ask(self, place: str, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Have a worker at a place do a job.

        Returns:
            The result; ``None`` if no worker is there, if the worker is lost, or without ``wait``.
        """
        ...

    def close(self) -> None:
        """Free what the pool holds."""
        ...


class SerialPool:
    """A worker for each place, all in this process and in the order given: for tests, debuggers and small work."""

    apart = False

    def __init__(self, *workers: Worker) -> None:
        self.workers = {worker.place: worker for worker in workers}

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        """Carry out one group of orders after another, each when its replies are asked for."""
        for group in split_groups(orders):
            begun = time.perf_counter()
            replies = self.workers[group[0].place].carry_out(group, broadcast, begun)
            yield from add_spans(replies, 0, begun, time.perf_counter())

    def places(self) -> int:
        """Return 1: this process."""
        return 1

    def ask(self, place: str, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Do the job now."""
        return job(self.workers[place])

    def close(self) -> None:
        """Close the files of private state."""
        for worker in self.workers.values():
            worker.private.close()


def ask_everywhere(pool: Pool, places: Iterable[str], job: Callable[[Worker], object], wait: bool = True) -> None:
    """Have a worker at each place do a job."""
    for place in places:
        pool.ask(place, job, wait)
