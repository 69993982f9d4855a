"""ActorPool: the client actors of one site, which come and go, and the orders that they work on or that wait for one."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from raydfl.cluster.client import ClientActor
from raydfl.cluster.faults import LOST, StragglerPolicy, leave_out, task_cause, why_ended
from raydfl.cluster.resources import ActorKind, actor_kinds, alive_nodes
from raydfl.cluster.scheduling import Backlog, Lane, schedule
from raydfl.core.errors import ResourcesError
from raydfl.engine import SERVER, Order, RaySettings, Reply, Worker, in_groups, with_spans

logger = logging.getLogger(__name__)
T = TypeVar("T")

StartActor = Callable[[ActorKind], ActorHandle[ClientActor]]
"""Starts one more client actor of a kind."""


@dataclass(slots=True)
class _Slot:
    """A place for an actor: the actor that has it now, and what it was given."""

    kind: ActorKind
    actor: ActorHandle[ClientActor]
    ready: Any
    deadline: float
    """The time at which to give up waiting for ``ready``; infinite once it has answered."""
    node: str = ""
    """Id of the actor's node, once it has answered."""
    fallback: str = ""
    """The reason for training on the CPU despite a share of a GPU; empty: there is none."""
    load: int = 0
    """Calls that it has not answered."""
    work: float = 0.0
    """Cost of the orders in those calls."""
    free_at: float = 0.0
    """The time at which it will have answered them all, as far as can be foreseen (time.monotonic)."""
    limit: float = math.inf
    """Seconds that it has for its one call, where there is a deadline."""
    due: float = math.inf
    """The time at which they are over (time.monotonic)."""

    @property
    def starting(self) -> bool:
        """Return whether the actor, or its node, is not there yet."""
        return self.deadline < math.inf


@dataclass(frozen=True, slots=True)
class _Call:
    """Orders that an actor was given together."""

    orders: list[Order]
    key: Any
    """The key of the place whose actor it was."""
    slot: _Slot
    sent: float
    """The time at which it went out (time.perf_counter)."""


class ActorPool:
    """Client actors, each carrying out many clients' orders; a :class:`~raydfl.cluster.pool.RayPool` waits for their answers.

    Orders go out about in client order, to the actor that will be free first; each is given its next orders while it works, so that
    it never waits for the server. Orders of a lost actor go to others, and a new actor takes its place; that work is done twice
    changes nothing, because a client's work depends on its order alone. Where there is a deadline, each actor has the work of one
    client (or one group) at a time, so that it is known who does not answer.
    """

    def __init__(
        self, start_actor: StartActor, settings: RaySettings, patience: StragglerPolicy, number: Callable[[], int]
    ) -> None:
        """Ask for all actors, and wait for none.

        Args:
            start_actor: starts one more.
            settings: number of actors and their resources.
            patience: with clients whose actor is lost or does not answer.
            number: a new number for a place, at its first answer.
        """
        self._start_actor = start_actor
        self._settings = settings
        self._patience = patience
        self._slots: dict[Any, _Slot] = {}
        self._numbers: defaultdict[Any, int] = defaultdict(number)
        """Places for actors, by key."""
        self._pace: dict[tuple[ActorKind, bool], float] = {}
        """Seconds for a unit of cost, lately, by kind of actor: of training (True), and of evaluation."""
        self._failed_starts = 0
        """Actors that ended while they started, since one last has started."""
        self._references: Mapping[str, Any] = {}
        self._waiting: dict[int, list[Order]] = {}
        """Groups of orders, by the position of the first order."""
        self._backlog, self._alone = Backlog(), Backlog()
        """Their costs: of groups that may share a call, and of others."""
        self._calls: dict[Any, _Call] = {}
        """Calls under way, by the reference to their answer."""
        self._losses: Counter[int] = Counter()
        """Lost calls that count against an order, by its position."""
        self._again: Counter[int] = Counter()
        """All lost calls of an order, by its position."""
        if settings.actors != "per_client":
            for key, kind in enumerate(actor_kinds(settings, 0)):
                self._open(key, kind)

    # -- actors

    def _open(self, key: Any, kind: ActorKind) -> _Slot:
        actor = self._start_actor(kind)
        slot = _Slot(kind, actor, actor.ready.remote(), time.monotonic() + self._settings.ready_timeout)
        self._slots[key] = slot
        return slot

    def _close(self, key: Any) -> None:
        ray.kill(self._slots.pop(key).actor)

    def _replace(self, key: Any) -> None:
        """End the actor, if it has not ended yet, and ask for another one in its place."""
        lost = self._slots[key]
        self._close(key)
        self._open(key, lost.kind).fallback = lost.fallback  # Until the new actor knows better.

    def _replace_gone(self, node: str) -> bool:
        """Ask for others in the places of all actors of a node, if it is gone; actors without work do not tell of their end."""
        if not node or node in alive_nodes():
            return False
        for key, slot in list(self._slots.items()):
            if slot.node == node:
                self._replace(key)
        return True

    @property
    def kinds(self) -> list[ActorKind]:
        """Return the kinds of the actors that are there or asked for."""
        return [slot.kind for slot in self._slots.values()]

    @property
    def fallbacks(self) -> list[str]:
        """Reasons for training on the CPU despite a share of a GPU, of each actor that does."""
        return [slot.fallback for slot in self._slots.values() if slot.fallback]

    def _there(self) -> list[_Slot]:
        return [slot for slot in self._slots.values() if not slot.starting]

    def places(self) -> int:
        """Return the number of actors that are there."""
        return len(self._there())

    def _starting(self) -> list[Any]:
        return [slot.ready for slot in self._slots.values() if slot.starting]

    def note_started(self) -> None:
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
                slot.node, slot.fallback = ray.get(slot.ready)
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

    def late(self) -> list[Any]:
        """Return the keys of places whose actors should have started by now."""
        now = time.monotonic()
        return [key for key, slot in self._slots.items() if now > slot.deadline]

    def give_up_late(self) -> None:
        """Do without actors that do not start; the others take over their orders. One place stays."""
        for key in self.late():
            if len(self._slots) > 1:
                logger.warning("a client actor could not be started again; going on with %d", len(self._slots) - 1)
                self._close(key)

    def close(self) -> None:
        """End the actors."""
        for key in list(self._slots):
            self._close(key)

    # -- orders

    def begin(self, orders: Sequence[Order], references: Mapping[str, Any]) -> None:
        """Hand out the first of some orders; those of a run that did not end are forgotten.

        Args:
            orders: to be carried out.
            references: to the server's tensors in the object store, by key.
        """
        self._references = references
        self._calls, self._losses, self._again = {}, Counter(), Counter()
        self._waiting = {group[0].position: group for group in in_groups(orders)}
        pieces = [(position, _cost(group)) for position, group in self._waiting.items()]
        self._backlog, self._alone = Backlog(pieces), Backlog()
        if self._patience.deadline is not None:
            self._backlog, self._alone = self._alone, self._backlog
        self.hand_out()

    def _wait(self, group: list[Order]) -> None:
        """Let a group wait. One that was in a lost call goes alone: it may be what ended the actor."""
        position = group[0].position
        self._waiting[position] = group
        lost = any(order.position in self._losses for order in group)
        alone = lost or self._patience.deadline is not None
        (self._alone if alone else self._backlog).add(position, _cost(group))

    @property
    def busy(self) -> bool:
        """Return whether orders are waiting or under way."""
        return bool(self._waiting or self._calls)

    def awaited(self) -> list[Any]:
        """Return references to the answers that are to come, to calls and of actors that start."""
        return [*self._calls, *self._starting()]

    @property
    def due(self) -> float:
        """Return when the first answer will be overdue (time.monotonic)."""
        return min((slot.due for slot in self._slots.values()), default=math.inf)

    def hand_out(self) -> None:
        """Give waiting groups to actors."""
        if self._settings.actors == "per_client":
            for position in list(self._waiting):
                group = self._waiting.pop(position)
                key = group[0].task.client_id
                self._call(key, self._slots.get(key) or self._open(key, actor_kinds(self._settings, 1)[0]), group)
        if not self._waiting:
            return
        training = next(iter(self._waiting.values()))[0].measure is None
        lanes = [
            Lane(key, slot.load, slot.free_at, self._pace_of(slot.kind, training))
            for key, slot in self._slots.items()
            if not slot.starting
        ]
        for key, positions in schedule(self._backlog, self._alone, lanes, time.monotonic()):
            groups = [self._waiting.pop(position) for position in positions]
            self._call(key, self._slots[key], [order for group in groups for order in group])

    def _call(self, key: Any, slot: _Slot, orders: list[Order]) -> None:
        receive = sorted({name for order in orders for name in order.task.receive})
        sent = time.perf_counter()
        reference: Any = slot.actor.carry_out.remote(orders, receive, *[self._references[name] for name in receive])
        self._calls[reference] = _Call(orders, key, slot, sent)
        slot.load, slot.work = slot.load + 1, slot.work + _cost(orders)
        training = orders[0].measure is None
        slot.free_at = max(slot.free_at, time.monotonic()) + _cost(orders) * self._pace_of(slot.kind, training)
        if training:
            slot.limit = self._patience.limit(len(orders))
            slot.due = time.monotonic() + slot.limit

    def replies(self, reference: Any) -> list[Reply]:
        """Take the answer to a call, if it is one of this pool's; return the replies that it brings.

        Raises:
            ClientError: a method's code failed.
            ResourcesError: an order's actor was lost more often than ``ray.retries``.
        """
        call = self._calls.pop(reference, None)
        if call is None:
            return []
        slot = call.slot
        slot.load -= 1
        slot.work -= _cost(call.orders)
        slot.limit = slot.due = math.inf
        try:
            replies = ray.get(reference)
        except LOST as error:
            return self._lost(call, error)
        except RayTaskError as error:
            raise task_cause(error) from error
        self._learn(call, replies)
        self._note_results(replies)
        return with_spans(replies, self._numbers[call.key], call.sent, time.perf_counter(), self._again)

    def _note_results(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self._backlog.note_result(reply.position)

    def _lost(self, call: _Call, error: Exception) -> list[Reply]:
        """Let the orders of a lost call wait. One lost too often is tried alone, and then its client is left out.

        Raises:
            ResourcesError: an order was lost too often, and clients are not to be left out.
        """
        self._again.update(order.position for order in call.orders)
        if self._slots.get(call.key) is call.slot:  # else another call of its has already told of its end
            self._replace(call.key)
        if self._replace_gone(call.slot.node):
            for group in in_groups(call.orders):  # it left with its node: no client's doing
                self._wait(group)
            return []
        left_out: list[Reply] = []
        for group in in_groups(call.orders):
            self._losses.update(order.position for order in group)
            first, times = group[0], self._losses[group[0].position]
            if times <= self._patience.tries(self._settings.retries):
                self._wait(group)
            elif not self._patience.drop_lost or first.task.client_id == SERVER:
                raise ResourcesError(
                    f"the actor of client {first.task.client_id!r} was lost {times} times in round {first.round_index + 1}: "
                    f"{type(error).__name__}: {why_ended(error)}; check memory (an out-of-memory kill ends an actor), lower "
                    f"ray.actors or raise ray.retries, then resume the run"
                ) from error
            else:
                reason = f"lost: its actor was lost {times} times: {type(error).__name__}: {why_ended(error)}"
                left_out += leave_out(group, self._wait, reason, self._again[first.position] - 1)
        self._note_results(left_out)
        return left_out

    def end_silent(self, done: Collection[Any]) -> list[Reply]:
        """End the actors whose answers are overdue, and put new ones in their places; return who is left out for it.

        Args:
            done: references whose answers have come.
        """
        left_out: list[Reply] = []
        for reference, call in list(self._calls.items()):
            slot = call.slot
            if slot.due > time.monotonic() or reference in done:
                continue
            if slot.starting:  # it has not begun
                slot.due = time.monotonic() + slot.limit
                continue
            del self._calls[reference]
            self._replace(call.key)
            reason = f"late: no answer after {slot.limit:g} s (train.deadline and ray.grace)"
            left_out += leave_out(call.orders, self._wait, reason)
        self._note_results(left_out)
        return left_out

    def _learn(self, call: _Call, replies: Sequence[Reply]) -> None:
        """Foresee from what a call took when the actor will be free."""
        slot, training, cost = call.slot, call.orders[0].measure is None, _cost(call.orders)
        if cost > 0:
            pace = sum(reply.seconds for reply in replies) / cost
            before = self._pace.get((slot.kind, training), pace)
            self._pace[slot.kind, training] = 0.7 * before + 0.3 * pace
        slot.free_at = time.monotonic() + slot.work * self._pace_of(slot.kind, training)

    def _pace_of(self, kind: ActorKind, training: bool) -> float:
        """Return seconds for a unit of cost; of a kind not known yet, as the slowest known; 0: nothing is known."""
        known = [pace for (_, what), pace in self._pace.items() if what == training]
        return self._pace.get((kind, training), max(known, default=0.0))

    def ask(self, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Do Pool.ask on an actor, with a GPU if there is one."""
        there = self._there()
        if not there:
            return None
        answer: Any = max(there, key=lambda slot: slot.kind.gpus).actor.do.remote(job)
        try:
            return cast(T, ray.get(answer)) if wait else None
        except RayTaskError as error:
            raise task_cause(error) from error
        except LOST:
            return None


def _cost(orders: Sequence[Order]) -> float:
    return sum(order.cost for order in orders)
