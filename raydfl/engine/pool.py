"""Pools carry out orders: what they have in common, and the one that works in this process. Another: raydfl.cluster.pool."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from raydfl.core.tensors import FlatTensors
from raydfl.engine.orders import Order, Result, in_groups
from raydfl.engine.storage.private import PrivateRef, site_of
from raydfl.engine.telemetry import with_spans
from raydfl.engine.worker import Worker


class Pool(Protocol):
    """A pool of workers, which carries out clients' work."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Result]:
        """Yield the results of all orders, in order of completion. Work may begin before the first is asked for."""
        ...

    def places(self) -> int:
        """Return the number of clients (or groups) that can be worked on at a time; 0: as many as are asked for."""
        ...

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Return :meth:`Worker.width` of a process in which clients are trained."""
        ...

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """PrivateStore.compact, where private state may be read."""
        ...

    def remove(self, segments: Collection[str]) -> None:
        """PrivateStore.remove of segments that lie in sites' own folders."""
        ...

    def retain(self, segments: Collection[str]) -> None:
        """PrivateStore.retain at every site."""
        ...

    def close(self) -> None:
        """Free what the pool holds."""
        ...


class SerialPool:
    """Everything in this process, in the order given: for tests, debuggers and small work."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        """Open it.

        Args:
            workers: for each site's clients; under an empty name where there are no sites.
        """
        self._workers = workers

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Result]:
        """Carry out one group of orders after another, each when its results are asked for."""
        for group in in_groups(orders):
            begun = time.perf_counter()
            results = self._workers[group[0].site].carry_out(group, broadcast, begun)
            yield from with_spans(results, 0, begun, time.perf_counter())

    def places(self) -> int:
        """This process."""
        return 1

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Return the width of this process's worker."""
        site = orders[0].site
        return self._workers[site].width([order for order in orders if order.site == site], broadcast)

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Compact in this process."""
        return {
            client: ref
            for site, own in by_site(refs).items()
            for client, ref in self._workers[site].private.compact(round_index, own).items()
        }

    def remove(self, segments: Collection[str]) -> None:
        """Remove them in this process."""
        for segment in segments:
            self._workers[site_of(segment)].private.remove([segment])

    def retain(self, segments: Collection[str]) -> None:
        """In this process."""
        for site, worker in self._workers.items():
            if site:
                worker.private.retain(segments)

    def close(self) -> None:
        """Close the files that private state is written to."""
        for worker in self._workers.values():
            worker.private.close()


def by_site(refs: Mapping[int, PrivateRef]) -> dict[str, dict[int, PrivateRef]]:
    """Group the places of clients' private records by the site in whose folder they lie."""
    parts: dict[str, dict[int, PrivateRef]] = {}
    for client, ref in refs.items():
        parts.setdefault(site_of(ref.segment), {})[client] = ref
    return parts
