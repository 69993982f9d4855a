"""RayPool: carries out orders on client actors, which come and go."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from raydfl.cluster.client import ClientActor
from raydfl.cluster.faults import LOST, StragglerPolicy, _apart, task_cause
from raydfl.cluster.resources import ActorKind, actor_kinds, alive_nodes, free_resources, wanted_text
from raydfl.cluster.scheduling import Lane, schedule
from raydfl.core.errors import ResourcesError
from raydfl.core.tensors import FlatTensors
from raydfl.engine import SERVER, Order, RaySettings, Result, by_site, in_groups, with_spans
from raydfl.engine.storage import PrivateRef, site_of

logger = logging.getLogger(__name__)


_LOOK = 5.0
"""Seconds between two looks at what has not started."""


@dataclass(slots=True)
class _Slot:
    """A place for an actor: the actor that has it now, and what it was given."""

    kind: ActorKind
    actor: ActorHandle[ClientActor]
    ready: Any
    deadline: float
    """When to give up waiting for ``ready``; infinite once it has answered."""
    node: str = ""
    """Id of the actor's node, once it has answered."""
    load: int = 0
    """Calls that it has not answered."""
    work: float = 0.0
    """Cost of the orders in those calls."""
    free_at: float = 0.0
    """When it will have answered them all, as far as can be foreseen (time.monotonic)."""
    limit: float = math.inf
    """Seconds that it has for its one call, where there is a deadline."""
    due: float = math.inf
    """When they are over (time.monotonic)."""

    @property
    def site(self) -> str:
        """The site whose clients alone it serves."""
        return self.kind.site

    @property
    def starting(self) -> bool:
        """Whether the actor, or its node, is not there yet."""
        return self.deadline < math.inf


class RayPool:
    """Client actors, each carrying out many clients' orders.

    The longest orders go out first, to the actor that will be free first; each is given its next orders while it works, so that it
    never waits for the server. Orders of a lost actor go to others, and a new actor takes its place; that work is done twice
    changes nothing, because a client's work depends on its order alone. All actors are asked for at once, so that a cluster that
    grows sees what is wanted; each gets work from when it is there, in the middle of a round too. Where there is a deadline, each
    actor has the work of one client (or one group) at a time, so that it is known who does not answer.
    """

    def __init__(
        self,
        start_actor: Callable[[ActorKind], ActorHandle[ClientActor]],
        settings: RaySettings,
        patience: StragglerPolicy | None = None,
        sites: Sequence[str] = ("",),
    ) -> None:
        """Open it.

        Args:
            start_actor: makes one more client actor of a kind.
            settings: number of actors (at each site) and their resources.
            sites: where clients' data lie; an empty name: wherever the run is.
            patience: with clients whose actor is lost or does not answer; by default a loss too many ends the run, and an
                answer is waited for as long as the actor lives.
        """
        self._start_actor = start_actor
        self._sites = tuple(sites)
        self._settings = settings
        self._patience = patience or StragglerPolicy()
        self._slots: dict[Any, _Slot] = {}
        self._sent: dict[Any, float] = {}
        """When the calls under way went out (time.perf_counter)."""
        self._numbers: dict[Any, int] = {}
        """Of places for actors, by key, in the order of their first answers."""
        self._pace: dict[tuple[ActorKind, bool], float] = {}
        """Seconds for a unit of cost, lately, by kind of actor: of training (True), and of evaluation."""
        self._failed_starts = 0
        """Actors that ended while they started, since one last has started."""
        self._few_since: float | None = None
        """Since when there are fewer actors than there have to be (time.monotonic)."""
        if settings.actors != "per_client":
            kinds = actor_kinds(settings, 0, self._sites)
            for number, kind in enumerate(kinds):
                self._open(number, kind)
            self._await_actors(min(settings.min_actors or len(kinds), len(kinds)))

    def _open(self, key: Any, kind: ActorKind) -> _Slot:
        actor = self._start_actor(kind)
        slot = _Slot(kind, actor, actor.ready.remote(), time.monotonic() + self._settings.ready_timeout)
        self._slots[key] = slot
        return slot

    def _replace(self, key: Any) -> None:
        """End the actor, if it has not ended yet, and ask for another one in its place."""
        kind = self._slots[key].kind
        self._close(key)
        self._open(key, kind)

    def _await_actors(self, needed: int) -> None:
        """Wait for those with which the first round begins."""
        until = time.monotonic() + self._settings.ready_timeout
        while not self._enough(needed):
            left = until - time.monotonic()
            if left <= 0:
                raise self._not_started(needed)
            ray.wait(self._starting(), num_returns=1, timeout=min(left, _LOOK))
            self._note_started()

    def _there(self) -> list[_Slot]:
        return [slot for slot in self._slots.values() if not slot.starting]

    def _starting(self) -> list[Any]:
        return [slot.ready for slot in self._slots.values() if slot.starting]

    def _enough(self, needed: int) -> bool:
        """Whether so many actors are there, and one at each site."""
        there = self._there()
        return len(there) >= needed and {slot.site for slot in there} >= set(self._sites)

    def _note_started(self) -> None:
        """Take note of actors that have started, and ask for others in the places of those that ended while they did.

        Raises:
            ResourcesError: they end again and again.
        """
        starting = self._starting()
        if not starting:
            return
        done = set(ray.wait(starting, num_returns=len(starting), timeout=0)[0])
        for key, slot in list(self._slots.items()):
            if slot.ready not in done:
                continue
            try:
                slot.node = ray.get(slot.ready)
            except RayTaskError as error:
                raise task_cause(error) from error
            except LOST as error:
                self._failed_starts += 1
                if getattr(error, "actor_init_failed", False) or self._failed_starts > self._settings.retries:
                    raise ResourcesError(f"a client actor ended while it started: {why_ended(error)}") from error
                self._replace(key)
            else:
                slot.deadline = math.inf
                slot.due = time.monotonic() + slot.limit
                self._failed_starts = 0

    def _not_started(self, needed: int) -> ResourcesError:
        settings = self._settings
        wanted = [slot.kind for slot in self._slots.values()]
        there = self._there()
        away = sorted(site for site in {*self._sites} - {slot.site for slot in there} if site)
        where = f", none at site {', '.join(away)}, each of which has to have one" if away else ""
        return ResourcesError(
            f"{len(there)} of {needed} client actors started within {settings.ready_timeout:g} s{where}; asked for: "
            f"{wanted_text(wanted)}, free in the cluster: {free_resources()}; lower ray.actors, ray.cpus or ray.gpus, or raise "
            f"ray.ready_timeout if nodes are still starting"
        )

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Result]:
        """Hand out the first orders and return; the results come in order of completion.

        Raises, when results are asked for:
            ClientError: a method's code failed.
            ResourcesError: an order's actor was lost more often than ``ray.retries``, or no actor can be started any more.
        """
        references = {
            key: ray.put(broadcast[key]) for key in sorted({k for order in orders for k in order.task.receive})
        }
        waiting = sorted(in_groups(orders), key=lambda group: (_cost(group), -group[0].position))  # taken from the end
        in_flight: dict[Any, tuple[list[Order], Any, _Slot]] = {}
        self._sent.clear()  # of calls that were lost
        self._hand_out(waiting, in_flight, references, {})
        return self._results(waiting, in_flight, references)

    def _results(
        self,
        waiting: list[list[Order]],
        in_flight: dict[Any, tuple[list[Order], Any, _Slot]],
        references: Mapping[str, Any],
    ) -> Iterator[Result]:
        losses: dict[int, int] = {}
        again: Counter[int] = Counter()
        while waiting or in_flight:
            self._hand_out(waiting, in_flight, references, losses)
            due = min((slot.due for slot in self._slots.values()), default=math.inf)
            patience = min(_LOOK, max(0.0, due - time.monotonic()))
            done, _ = ray.wait([*in_flight, *self._starting()], num_returns=1, timeout=patience)
            self._note_started()
            self._check_enough()
            if due <= time.monotonic():
                yield from self._end_silent(waiting, in_flight, done)
            if not done or done[0] not in in_flight:
                continue
            given, key, slot = in_flight.pop(done[0])
            slot.load -= 1
            slot.work -= _cost(given)
            slot.limit = slot.due = math.inf
            try:
                results = ray.get(done[0])
            except LOST as error:
                again.update(order.position for order in given)
                if self._slots.get(key) is slot:  # else another call of its has already told of its end
                    self._replace(key)
                if self._replace_gone(slot.node):
                    waiting += in_groups(given)  # it left with its node: no client's doing
                    continue
                for group in in_groups(given):
                    for left_out in self._again(group, waiting, losses, error):
                        yield dataclasses.replace(left_out, retried=again[left_out.position] - 1)
                continue
            except RayTaskError as error:
                raise task_cause(error) from error
            self._learn(given, results, slot)
            number = self._numbers.setdefault(key, len(self._numbers))
            yield from with_spans(results, number, self._sent.pop(done[0]), time.perf_counter(), again)

    def places(self) -> int:
        """Client actors that are there."""
        return 0 if self._settings.actors == "per_client" else len(self._there())

    def _again(
        self, group: list[Order], waiting: list[list[Order]], losses: dict[int, int], error: Exception
    ) -> Iterator[Result]:
        """Let a group wait whose actor was lost. One that was lost too often is tried apart, and then the client is left out.

        Raises:
            ResourcesError: it has been lost too often, and clients are not to be left out.
        """
        for order in group:
            losses[order.position] = losses.get(order.position, 0) + 1
        times = losses[group[0].position]
        if times <= self._patience.tries(self._settings.retries):
            waiting.append(group)
        elif not self._patience.drop_lost or group[0].task.client_id == SERVER:
            raise self._lost_too_often(group[0], times, error) from error
        else:
            reason = f"lost: its actor was lost {times} times: {type(error).__name__}: {why_ended(error)}"
            yield from _apart(group, waiting, reason)

    def _end_silent(
        self,
        waiting: list[list[Order]],
        in_flight: dict[Any, tuple[list[Order], Any, _Slot]],
        done: Sequence[Any],
    ) -> Iterator[Result]:
        """End the actors whose answers are overdue, and put new ones in their places."""
        for reference, (given, key, slot) in list(in_flight.items()):
            if slot.due > time.monotonic() or reference in done:
                continue
            if slot.starting:  # it has not begun
                slot.due = time.monotonic() + slot.limit
                continue
            del in_flight[reference]
            self._replace(key)
            yield from _apart(given, waiting, f"late: no answer after {slot.limit:g} s (train.deadline and ray.grace)")

    def _learn(self, orders: Sequence[Order], results: Sequence[Result], slot: _Slot) -> None:
        """Foresee from what a call took when the actor will be free."""
        training = orders[0].measure is None
        cost = _cost(orders)
        if cost > 0:
            pace = sum(result.seconds for result in results) / cost
            before = self._pace.get((slot.kind, training), pace)
            self._pace[slot.kind, training] = 0.7 * before + 0.3 * pace
        slot.free_at = time.monotonic() + slot.work * self._pace_of(slot.kind, training)

    def _pace_of(self, kind: ActorKind, training: bool) -> float:
        """Seconds for a unit of cost; of a kind of which nothing is known yet, as the slowest known; 0: nothing is known."""
        known = [pace for (_, what), pace in self._pace.items() if what == training]
        return self._pace.get((kind, training), max(known, default=0.0))

    def _replace_gone(self, node: str) -> bool:
        """Ask for others in the places of all actors of a node, if it is gone; actors without work do not tell of their end."""
        if not node or node in alive_nodes():
            return False
        for key, slot in list(self._slots.items()):
            if slot.node == node:
                self._replace(key)
        return True

    def _hand_out(
        self,
        waiting: list[list[Order]],
        in_flight: dict[Any, tuple[list[Order], Any, _Slot]],
        references: Mapping[str, Any],
        losses: Mapping[int, int],
    ) -> None:
        """Give waiting groups to actors. One that was in a lost call goes alone: it may be what ended the actor."""
        if self._settings.actors == "per_client":
            while waiting:
                site = waiting[-1][0].site
                key = (waiting[-1][0].task.client_id, site)  # the server's own data lie at several sites
                slot = self._slots.get(key) or self._open(key, actor_kinds(self._settings, 1, [site])[0])
                self._call(key, slot, waiting.pop(), in_flight, references)
            return
        for site in self._sites if waiting else ():
            self._hand_out_at(site, waiting, in_flight, references, losses)

    def _hand_out_at(
        self,
        site: str,
        waiting: list[list[Order]],
        in_flight: dict[Any, tuple[list[Order], Any, _Slot]],
        references: Mapping[str, Any],
        losses: Mapping[int, int],
    ) -> None:
        """Give the waiting groups of one site to actors there."""
        groups = [group for group in reversed(waiting) if group[0].site == site]
        if not groups:
            return
        now, training = time.monotonic(), groups[0][0].measure is None
        calls = schedule(
            [_cost(group) for group in groups],
            [
                self._patience.deadline is not None or any(order.position in losses for order in group)
                for group in groups
            ],
            [
                Lane(key, slot.load, slot.free_at, self._pace_of(slot.kind, training))
                for key, slot in self._slots.items()
                if slot.site == site and not slot.starting
            ],
            now,
        )
        for key, chosen in calls:
            given = [order for position in chosen for order in groups[position]]
            self._call(key, self._slots[key], given, in_flight, references)
        gone = {id(groups[position]) for _, chosen in calls for position in chosen}
        waiting[:] = [group for group in waiting if id(group) not in gone]

    def _call(
        self,
        key: Any,
        slot: _Slot,
        given: list[Order],
        in_flight: dict[Any, tuple[list[Order], Any, _Slot]],
        references: Mapping[str, Any],
    ) -> None:
        receive = sorted({name for order in given for name in order.task.receive})
        sent = time.perf_counter()
        reference: Any = slot.actor.carry_out.remote(given, receive, *[references[name] for name in receive])
        in_flight[reference] = (given, key, slot)
        self._sent[reference] = sent
        slot.load, slot.work = slot.load + 1, slot.work + _cost(given)
        pace = self._pace_of(slot.kind, given[0].measure is None)
        slot.free_at = max(slot.free_at, time.monotonic()) + _cost(given) * pace
        if given[0].measure is None:
            slot.limit = self._patience.limit(len(given))
            slot.due = time.monotonic() + slot.limit

    def _check_enough(self) -> None:
        """Give up actors that do not start, where the cluster stays as it is (the others take over their orders).

        Raises:
            ResourcesError: for too long there have been fewer actors than there have to be.
        """
        now, settings = time.monotonic(), self._settings
        late = [key for key, slot in self._slots.items() if now > slot.deadline]
        if settings.actors == "per_client":
            if late:
                raise self._not_started(len(self._slots))
            return
        if not settings.autoscale and settings.min_actors is None:
            for key in late:
                if sum(slot.site == self._slots[key].site for slot in self._slots.values()) > 1:
                    logger.warning("a client actor could not be started again; going on with %d", len(self._slots) - 1)
                    self._close(key)
        needed = settings.min_actors or 1
        if self._enough(needed):
            self._few_since = None
        elif self._few_since is None:
            self._few_since = now
        elif now > self._few_since + settings.ready_timeout:
            raise self._not_started(needed)

    def _lost_too_often(self, order: Order, times: int, error: Exception) -> ResourcesError:
        return ResourcesError(
            f"the actor of client {order.task.client_id!r} was lost {times} times in round {order.round_index + 1}: "
            f"{type(error).__name__}: {why_ended(error)}; check memory (an out-of-memory kill ends an actor), lower ray.actors "
            f"or raise ray.retries, then resume the run"
        )

    def _close(self, key: Any) -> None:
        ray.kill(self._slots.pop(key).actor)

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Of one of the actors, with a GPU if there is one; 1 where every client has an actor of its own."""
        if not self._slots:
            return 1
        here = [slot for slot in self._there() if slot.site == orders[0].site]
        slot = max(here, key=lambda slot: slot.kind.gpus)
        orders = [order for order in orders if order.site == slot.site]
        keys = sorted(broadcast)
        try:
            width: int = ray.get(cast(Any, slot.actor.width.remote(orders, keys, *[broadcast[k] for k in keys])))
        except RayTaskError as error:
            raise task_cause(error) from error
        except LOST as error:
            raise ResourcesError(
                f"a client actor was lost while it was measured how many clients to train together: {why_ended(error)}; "
                f"check memory, or set train.together to a number"
            ) from error
        return width

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Compact on one of the actors of each site: private state never passes through the server."""
        moved: dict[int, PrivateRef] = {}
        for site, own in by_site(refs).items():
            slot = self._one_at(site)
            if slot is None:
                continue
            try:
                moved |= ray.get(cast(Any, slot.actor.compact.remote(round_index, own)))
            except RayTaskError as error:
                raise task_cause(error) from error
            except LOST:
                continue  # nothing is lost: it is tried again after a later commit
        return moved

    def _one_at(self, site: str) -> _Slot | None:
        return next((slot for slot in self._there() if slot.site == site), None)

    def remove(self, segments: Collection[str]) -> None:
        """Asked of one of the actors of each site, and not waited for: what is left is removed when the run is next opened."""
        for site in sorted({site_of(segment) for segment in segments}):
            slot = self._one_at(site)
            if slot is not None:
                slot.actor.remove.remote([segment for segment in segments if site_of(segment) == site])

    def retain(self, segments: Collection[str]) -> None:
        """Asked of one of the actors of each site."""
        for site in self._sites:
            slot = self._one_at(site)
            if site and slot is not None:
                try:
                    ray.get(cast(Any, slot.actor.retain.remote(segments)))
                except RayTaskError as error:
                    raise task_cause(error) from error
                except LOST:
                    continue  # they only take room

    def close(self) -> None:
        """End the actors."""
        for key in list(self._slots):
            self._close(key)


def why_ended(error: BaseException) -> str:
    """Why an actor ended, in one line. One that raised when it was made: what it raised, which comes last."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1 if getattr(error, "actor_init_failed", False) else 0]


def _cost(orders: Sequence[Order]) -> float:
    return sum(order.cost for order in orders)
