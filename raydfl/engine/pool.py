"""Interface of worker pools, and the pool in this process. raydfl.cluster.pool has the pool of Ray actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from raydfl.core.tensors import FlatTensors
from raydfl.engine.orders import Order, Reply, split_pieces
from raydfl.engine.telemetry import add_spans
from raydfl.engine.worker import Worker

T = TypeVar("T")
EARLY = 2
"""Largest number of early orders for each worker: one in execution, and its successor."""


@dataclass(frozen=True, slots=True)
class EarlyOrders:
    """Orders of clients in flight (``train.fleet``), for workers without other work.

    Their replies are kept for the server step of their arrival. There, an order with the same ``start`` is not carried out again.
    """

    orders: Sequence[Order]
    """The next arrivals, by virtual time. They may have begun."""
    starts: frozenset[int]
    """Numbers of all clients in flight. The early work of other starts is dropped."""


class Pool(Protocol):
    """Workers at one or several sites. An order is executed at its site, where its data is stored."""

    concurrent: bool
    """Whether workers run while the caller continues."""

    @property
    def early(self) -> int:
        """Number of running early orders."""
        ...

    def run(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], early: EarlyOrders | None = None
    ) -> Iterator[Reply]:
        """Yield the replies to all orders, in order of completion. Work may begin before the first iteration.

        Args:
            orders: Orders of a round or of an evaluation.
            broadcast: Server's tensors by key, also those of early orders.
            early: Orders to begin if workers have no other work. A pool without concurrent workers ignores them.
        """
        ...

    def count_workers(self) -> int:
        """Return the number of clients (or groups) that can be processed concurrently; 0: no limit."""
        ...

    def ask(self, place: str, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Run a function on a worker of a site.

        Args:
            place: Name of the site; empty: the run's own machines.
            job: Function of a worker.
            wait: Whether to wait for the result.

        Returns:
            The result; ``None`` without ``wait``, if the site has no worker, or if the worker is lost.
        """
        ...

    def close(self) -> None:
        """Release the pool's resources."""
        ...


class SerialPool:
    """Pool in this process, with a worker for each site, for tests, debuggers and small work. Preserves the order."""

    concurrent = False
    early = 0

    def __init__(self, *workers: Worker) -> None:
        self.workers = {worker.place: worker for worker in workers}

    def run(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], early: EarlyOrders | None = None
    ) -> Iterator[Reply]:
        """Carry out groups or blocks of orders sequentially, each at the iteration that needs its replies."""
        for piece in split_pieces(orders):
            start = time.perf_counter()
            replies = self.workers[piece[0].place].carry_out(piece, broadcast, start)
            yield from add_spans(replies, 0, start, time.perf_counter())

    def count_workers(self) -> int:
        """Return 1, for this process."""
        return 1

    def ask(self, place: str, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Run the function immediately."""
        return self.workers[place].do(job)

    def close(self) -> None:
        """Close the files of private state."""
        for worker in self.workers.values():
            worker.private.close()


def ask_everywhere(pool: Pool, places: Iterable[str], job: Callable[[Worker], object], wait: bool = True) -> None:
    """Run a function on a worker of each site."""
    for place in places:
        pool.ask(place, job, wait)
