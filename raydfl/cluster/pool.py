"""RayPool and pool_here: pools of a whole run. Its data may lie at several sites, and each site is a pool of its own."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.actor import ActorHandle

from raydfl.cluster.actors import ActorPool
from raydfl.cluster.client import ClientActor
from raydfl.cluster.faults import StragglerPolicy
from raydfl.cluster.resources import ActorKind, free_resources, wanted_text
from raydfl.cluster.sites import open_worker
from raydfl.core.errors import ResourcesError
from raydfl.core.tensors import FlatTensors
from raydfl.data import Population
from raydfl.engine import Config, Order, Pool, RaySettings, Reply, SerialPool, Worker, keys_of
from raydfl.engine.storage import PrivateRef, PrivateStore

_LOOK = 5.0
"""Seconds between two looks at what has not started."""

OnePool = TypeVar("OnePool", SerialPool, ActorPool)


class SitePools(Generic[OnePool]):
    """A pool for each site; an order goes to the one that has the data it is about.

    Args:
        pools: by name of the site; under an empty name the only one, where there are no sites.
        population: of a federation over sites; ``None``: there are none.
    """

    apart = False

    def __init__(self, pools: Mapping[str, OnePool], population: Population | None = None) -> None:
        self._pools: Mapping[str, OnePool] = pools
        self._population = population

    def _site_of(self, order: Order) -> str:
        if self._population is None:
            return ""
        shard = order.measure[0].shard if order.measure else None
        if shard is not None:
            return shard.site
        return self._population.site_of(self._population.index(order.task.client_id))

    def _parted(self, orders: Sequence[Order]) -> dict[str, list[Order]]:
        """Return the orders by site, the site of the first one first."""
        parts: dict[str, list[Order]] = {}
        for order in orders:
            parts.setdefault(self._site_of(order), []).append(order)
        return parts

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Do Worker.width at the site of the first order."""
        site, own = next(iter(self._parted(orders).items()))
        return self._pools[site].width(own, broadcast)

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Do PrivateStore.compact, each client's records at its site."""
        parts: dict[str, dict[int, PrivateRef]] = {}
        for client, ref in refs.items():
            site = "" if self._population is None else self._population.site_of(client)
            parts.setdefault(site, {})[client] = ref
        moved = (self._pools[site].compact(round_index, own) for site, own in parts.items())
        return {client: ref for part in moved for client, ref in part.items()}

    def remove(self, segments: Collection[str]) -> None:
        """Do PrivateStore.remove at each site, which may have some of them."""
        for pool in self._pools.values():
            pool.remove(segments)

    def retain(self, segments: Collection[str]) -> None:
        """Do PrivateStore.retain at each site."""
        for pool in self._pools.values():
            pool.retain(segments)

    def close(self) -> None:
        """Free what the pools hold."""
        for pool in self._pools.values():
            pool.close()


class _SerialSites(SitePools[SerialPool]):
    """Sites in this process, one after another."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        """Carry out the orders of one site after another, each when its replies are asked for."""
        parts = self._parted(orders).items()
        return itertools.chain.from_iterable(self._pools[site].run(own, broadcast) for site, own in parts)

    def places(self) -> int:
        """Return 1: this process."""
        return 1


def pool_here(run_dir: Path, config: Config, population: Population, key: str, scratch: Path | None = None) -> Pool:
    """Return a pool in this process; all sites' folders must be on this machine.

    Args:
        run_dir: of the run.
        config: of the run.
        population: of the federation.
        key: of the run at the sites, see :func:`raydfl.cluster.sites.run_folder`; empty without sites.
        scratch: where new private state is written, in place of where it belongs.
    """
    if config.data.sites:
        workers = {
            site: open_worker(config, site, key, run_dir, population, scratch=scratch) for site in config.data.sites
        }
        return _SerialSites({site: SerialPool(worker) for site, worker in workers.items()}, population)
    kept = run_dir / "private"
    private = PrivateStore(kept) if scratch is None else PrivateStore(scratch, [kept])
    return SerialPool(Worker(run_dir, config, private, population=population))


class RayPool(SitePools[ActorPool]):
    """Client actors: those of each site, or of the whole run, and one loop that waits for all their answers.

    All actors are asked for at once, so that a cluster that grows sees what is wanted; each gets work from when it is there, in the
    middle of a round too.
    """

    apart = True

    def __init__(
        self,
        start_actor: Callable[[str, ActorKind], ActorHandle[ClientActor]],
        settings: RaySettings,
        patience: StragglerPolicy | None = None,
        population: Population | None = None,
    ) -> None:
        """Open it.

        Args:
            start_actor: starts one more client actor at the site of that name (empty: anywhere), of a kind.
            settings: number of actors (at each site) and their resources.
            patience: with clients whose actor is lost or does not answer; by default a loss too many ends the run, and an
                answer is waited for as long as the actor lives.
            population: of a federation over sites; ``None``: there are none.

        Raises:
            ResourcesError: too few actors have started in time.
        """
        sites = [""] if population is None else [site.name for site in population.sites]
        patience, number = patience or StragglerPolicy(), itertools.count().__next__
        starts = {site: functools.partial(start_actor, site) for site in sites}
        super().__init__(
            {site: ActorPool(start, settings, patience, number) for site, start in starts.items()}, population
        )
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
        """Wait for those with which the first round begins."""
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
        """Return whether so many actors are there, and one at each site."""
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
        """Return a reason for each place whose actor trains, or has trained, on the CPU despite a share of a GPU."""
        return [reason for pool in self._pools.values() for reason in pool.fallbacks.values()]

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Reply]:
        """Hand out the first orders and return; the replies come in order of completion.

        Raises, when replies are asked for:
            ClientError: a method's code failed.
            ResourcesError: an order's actor was lost more often than ``ray.retries``, or no actor can be started any more.
        """
        references: dict[str, Any] = {key: ray.put(broadcast[key]) for key in sorted(keys_of(orders))}
        parts = self._parted(orders)
        for site, pool in self._pools.items():
            pool.begin(parts.get(site, []), references)
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
