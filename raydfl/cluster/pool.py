"""RayPool: the client actors of a run at all its places."""

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
from raydfl.cluster.idle import IdleActors
from raydfl.cluster.nodes import SuitableNodes
from raydfl.cluster.resources import ActorKind, format_free_resources, format_kinds
from raydfl.cluster.use import NodeUse, UseMeter, name_node_types
from raydfl.core.errors import ResourcesError
from raydfl.core.tensors import FlatTensors
from raydfl.engine import EarlyOrders, Order, RaySettings, Reply, Worker, keys_of

_LOOK = 5.0
"""Maximum seconds between two checks of starting actors."""
_GATHER = 0.005
"""Milliseconds to wait for further replies, for each pending call. Actors are not idle, because their next call is queued."""
T = TypeVar("T")


class RayPool:
    """Client actors at each place, with a common loop for their replies.

    All actors are requested at once, so that an autoscaler sees the full demand. An actor receives orders as soon as it has
    started, also in the middle of a round.
    """

    concurrent = True

    @property
    def early(self) -> int:
        """Number of running early orders."""
        return sum(len(pool.early.running) for pool in self._pools.values())

    def __init__(
        self,
        start_actor: Callable[[str, ActorKind, Any], ActorHandle[ClientActor]],
        settings: RaySettings,
        patience: StragglerPolicy | None = None,
        places: Sequence[str] = ("",),
        nodes: SuitableNodes | None = None,
    ) -> None:
        """Start all actors, and wait until enough of them are running.

        Args:
            start_actor: Starts a client actor of a kind at a place, for the slot with a key.
            settings: Number of actors (at each place) and their resources.
            patience: Policy for clients with a lost or late actor. By default, too many losses end the run, and calls have no time
                limit.
            places: Names of the sites with the data. An empty name means the whole cluster.
            nodes: Suitable nodes for actors; ``None``: an actor that cannot open the run ends it.

        Raises:
            ResourcesError: Too few actors started in time.
        """
        patience, number = patience or StragglerPolicy(), itertools.count().__next__
        starts = {place: functools.partial(start_actor, place) for place in places}
        self._meter = UseMeter(ray.get_runtime_context().get_node_id())
        self._pools = {
            place: ActorPool(start, settings, patience, number, self._meter, nodes) for place, start in starts.items()
        }
        self._nodes = nodes
        self._settings = settings
        self._few_since: float | None = None
        """Start of the current shortage of actors (time.monotonic)."""
        if settings.actors != "per_client":
            total = len(self._kinds())
            self._await_actors(min(settings.min_actors or total, total))

    def _kinds(self) -> list[ActorKind]:
        """Return the kinds of all actors, running or starting."""
        return [kind for pool in self._pools.values() for kind in pool.kinds]

    def _await_actors(self, needed: int) -> None:
        """Wait until the first round can start."""
        until = time.monotonic() + self._settings.ready_timeout
        while not self._has_enough(needed):
            left = until - time.monotonic()
            if left <= 0:
                raise self._make_start_error(needed)
            self._wait(min(left, _LOOK))

    def _wait(self, seconds: float) -> list[Any]:
        """Wait for a reply or a started actor, and return the finished references."""
        pools = self._pools.values()
        pending = [reference for pool in pools for reference in pool.list_pending()]
        done, _ = ray.wait(pending, num_returns=1, timeout=seconds)
        if done:
            # Each ray.wait and each schedule go through all actors. So a large pool takes many replies at once.
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=int(_GATHER * len(pending)) / 1000)
        for pool in pools:
            pool.update_started()
        return done

    def _has_enough(self, needed: int) -> bool:
        """Return whether enough actors are running, with at least one at each place."""
        running = [pool.count_workers() for pool in self._pools.values()]
        return sum(running) >= needed and all(running)

    def _check_enough(self) -> None:
        """Give up late actors, if the cluster does not grow.

        Raises:
            ResourcesError: Too few actors have been running for ``ray.ready_timeout``.
        """
        now, settings = time.monotonic(), self._settings
        if settings.actors == "per_client":
            if any(pool.list_late() for pool in self._pools.values()):
                raise self._make_start_error(len(self._kinds()))
            return
        if not settings.autoscale and settings.min_actors is None:
            for pool in self._pools.values():
                pool.give_up_late()
                pool.reopen()
        needed = settings.min_actors or 1
        if self._has_enough(needed):
            self._few_since = None
        elif self._few_since is None:
            self._few_since = now
        elif now > self._few_since + settings.ready_timeout:
            raise self._make_start_error(needed)

    def _make_start_error(self, needed: int) -> ResourcesError:
        running, kinds = sum(pool.count_workers() for pool in self._pools.values()), self._kinds()
        empty = sorted(site for site, pool in self._pools.items() if site and not pool.count_workers())
        where = f", none at site {', '.join(empty)}, but each site needs at least one actor" if empty else ""
        return ResourcesError(
            f"{running} of {needed} client actors started within {self._settings.ready_timeout:g} s{where}. Requested: "
            f"{format_kinds(kinds)}. Free in the cluster: {format_free_resources(kinds)}. Lower ray.actors, ray.cpus or ray.gpus, "
            f"or raise ray.ready_timeout if nodes are still starting."
            + "".join(f" Not used: {reason}" for reason in (self._nodes.excluded.values() if self._nodes else ()))
        )

    def count_workers(self) -> int:
        """Return the number of running client actors. 0 with ``per_client``: each client has its own actor."""
        return (
            0 if self._settings.actors == "per_client" else sum(pool.count_workers() for pool in self._pools.values())
        )

    def fallbacks(self) -> list[str]:
        """List reasons for training on the CPU despite a share of a GPU, for each affected actor."""
        return [reason for pool in self._pools.values() for reason in pool.fallbacks]

    def use(self) -> dict[str, NodeUse]:
        """Return the use of nodes since the start, by type of node."""
        return self._meter.summarise(name_node_types())

    def ask(self, place: str, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Run a job on a running actor of a place; ``None`` without an actor or after its loss."""
        return self._pools[place].ask(job, wait)

    def close(self, idle: IdleActors | None = None) -> None:
        """End all actors, or keep actors of the cluster for the next run.

        Args:
            idle: Keeps the actors; ``None``: end them.
        """
        for place, pool in self._pools.items():
            pool.close(None if place else idle)

    def run(
        self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors], early: EarlyOrders | None = None
    ) -> Iterator[Reply]:
        """Send the first orders, and return an iterator over replies in order of completion.

        Args:
            orders: Orders of a round or of an evaluation.
            broadcast: Server's tensors by key, also those of early orders.
            early: Orders to start if actors have no other work. They must have the place of the first pool.

        The iterator raises:
            ClientError: A method's code failed.
            ResourcesError: An order's actor was lost more often than ``ray.retries``, or actors cannot be started.
        """
        new = [order for order in (*orders, *(early.orders if early else ())) if not self._has_begun(order)]
        references: dict[str, Any] = {key: ray.put(broadcast[key]) for key in sorted(keys_of(new))}
        sizes = {key: broadcast[key].vector.nbytes for key in references}
        self._meter.begin_round(sizes, {key for pool in self._pools.values() for key in pool.list_keys()})
        ready: list[Reply] = []
        for place, pool in self._pools.items():
            ready += pool.start([order for order in orders if order.place == place], references, early)
        return itertools.chain(ready, self._replies())

    def _has_begun(self, order: Order) -> bool:
        return any(pool.early.has_begun(order) for pool in self._pools.values())

    def _replies(self) -> Iterator[Reply]:
        pools = self._pools.values()
        while any(pool.busy for pool in pools):
            due = min(pool.due for pool in pools)
            done = self._wait(min(_LOOK, max(0.0, due - time.monotonic())))
            self._check_enough()
            overdue = due <= time.monotonic()
            for pool in pools:
                replies = pool.replace_late(done) if overdue else []
                for reference in done:
                    replies += pool.take_replies(reference)
                pool.hand_out()  # Before the yield, because the caller may work on the replies for long.
                yield from replies
