"""RayPool: the client actors of a whole run, at all its places."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from raydfl.cluster.actors import ActorPool
from raydfl.cluster.client import ClientActor
from raydfl.cluster.faults import StragglerPolicy
from raydfl.cluster.resources import ActorKind, free_resources, wanted_text
from raydfl.core.errors import ResourcesError
from raydfl.core.tensors import FlatTensors
from raydfl.engine import Order, RaySettings, Reply, Worker, keys_of

_LOOK = 5.0
"""Seconds between two looks at what has not started."""
T = TypeVar("T")


class RayPool:
    """Client actors at each place, and one loop that waits for all their answers.

    All actors are asked for at once, so that a cluster that grows sees what is wanted; each gets work from when it is there, in the
    middle of a round too.
    """

    apart = True

    def __init__(
        self,
        start_actor: Callable[[str, ActorKind], ActorHandle[ClientActor]],
        settings: RaySettings,
        patience: StragglerPolicy | None = None,
        places: Sequence[str] = ("",),
    ) -> None:
        """Open it.

        Args:
            start_actor: starts one more client actor at a place, of a kind.
            settings: number of actors (at each place) and their resources.
            patience: with clients whose actor is lost or does not answer; by default a loss too many ends the run, and an
                answer is waited for as long as the actor lives.
            places: names of the sites that have the data; an empty name stands for the whole cluster.

        Raises:
            ResourcesError: too few actors have started in time.
        """
        patience, number = patience or StragglerPolicy(), itertools.count().__next__
        starts = {place: functools.partial(start_actor, place) for place in places}
        self._pools = {place: ActorPool(start, settings, patience, number) for place, start in starts.items()}
        self._settings = settings
        self._few_since: float | None = None
        """Since when there are fewer actors than there have to be (time.monotonic)."""
        if settings.actors != "per_client":
            wanted = len(self._kinds())
            self._await_actors(min(settings.min_actors or wanted, wanted))

    def _kinds(self) -> list[ActorKind]:
        """Return the kinds of all actors that are there or asked for."""
        return [kind for pool in self._pools.values() for kind in pool.kinds]

    def _await_actors(self, needed: int) -> None:
        """Wait for the actors that the first round needs."""
        until = time.monotonic() + self._settings.ready_timeout
        while not self._enough(needed):
            left = until - time.monotonic()
            if left <= 0:
                raise self._not_started(needed)
            self._wait(min(left, _LOOK))

    def _wait(self, seconds: float) -> list[Any]:
        """Wait for an answer, of an actor that starts or to a call, and return the references to those that have come."""
        pools = self._pools.values()
        awaited = [each for pool in pools for each in pool.awaited()]
        # All that have come already: one at a time would look at all that are awaited for each.
        done, _ = ray.wait(awaited, num_returns=len(awaited), timeout=0)
        if not done:
            done, _ = ray.wait(awaited, num_returns=1, timeout=seconds)
        for pool in pools:
            pool.note_started()
        return done

    def _enough(self, needed: int) -> bool:
        """Return whether so many actors are there, and one at each place."""
        there = [pool.places() for pool in self._pools.values()]
        return sum(there) >= needed and all(there)

    def _check_enough(self) -> None:
        """Give up actors that do not start, where the cluster stays as it is.

        Raises:
            ResourcesError: for too long there have been fewer actors than there have to be.
        """
        now, settings = time.monotonic(), self._settings
        if settings.actors == "per_client":
            if any(pool.late() for pool in self._pools.values()):
                raise self._not_started(len(self._kinds()))
            return
        if not settings.autoscale and settings.min_actors is None:
            for pool in self._pools.values():
                pool.give_up_late()
        needed = settings.min_actors or 1
        if self._enough(needed):
            self._few_since = None
        elif self._few_since is None:
            self._few_since = now
        elif now > self._few_since + settings.ready_timeout:
            raise self._not_started(needed)

    def _not_started(self, needed: int) -> ResourcesError:
        there = sum(pool.places() for pool in self._pools.values())
        away = sorted(site for site, pool in self._pools.items() if site and not pool.places())
        where = f", none at site {', '.join(away)}, each of which has to have one" if away else ""
        return ResourcesError(
            f"{there} of {needed} client actors started within {self._settings.ready_timeout:g} s{where}; asked for: "
            f"{wanted_text(self._kinds())}, free in the cluster: {free_resources()}; lower ray.actors, ray.cpus or ray.gpus, or "
            f"raise ray.ready_timeout if nodes are still starting"
        )

    def places(self) -> int:
        """Return the number of client actors that are there; 0: each client has one."""
        return 0 if self._settings.actors == "per_client" else sum(pool.places() for pool in self._pools.values())

    def fallbacks(self) -> list[str]:
        """Return a reason for each actor that trains on the CPU despite a share of a GPU."""
        return [reason for pool in self._pools.values() for reason in pool.fallbacks]

    def ask(self, place: str, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Do :meth:`ActorPool.ask` at a place."""
        return self._pools[place].ask(job, wait)

    def close(self) -> None:
        """End all actors."""
        for pool in self._pools.values():
            pool.close()

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        """Hand out the first orders and return; the replies come in order of completion.

        Raises, when replies are asked for:
            ClientError: a method's code failed.
            ResourcesError: an order's actor was lost more often than ``ray.retries``, or no actor can be started any more.
        """
        references: dict[str, Any] = {key: ray.put(broadcast[key]) for key in sorted(keys_of(orders))}
        for place, pool in self._pools.items():
            pool.begin([order for order in orders if order.place == place], references)
        return self._replies()

    def _replies(self) -> Iterator[Reply]:
        pools = self._pools.values()
        while any(pool.busy for pool in pools):
            due = min(pool.due for pool in pools)
            done = self._wait(min(_LOOK, max(0.0, due - time.monotonic())))
            self._check_enough()
            overdue = due <= time.monotonic()
            for pool in pools:
                found = pool.end_silent(done) if overdue else []
                for reference in done:
                    found += pool.replies(reference)
                pool.hand_out()  # first: whoever gets the replies may work on them for long
                yield from found
