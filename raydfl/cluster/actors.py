"""ActorPool: the client actors of one place, with their running and waiting orders."""

from __future__ import annotations

import contextlib
import functools
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
from raydfl.cluster.early_work import EarlyWork
from raydfl.cluster.faults import LOST, StragglerPolicy, explain_end, leave_out, unwrap_error
from raydfl.cluster.held_blocks import HeldBlocks
from raydfl.cluster.idle import IdleActors
from raydfl.cluster.nodes import SuitableNodes
from raydfl.cluster.resources import ActorKind, actor_kinds, list_alive_nodes
from raydfl.cluster.scheduling import AHEAD, Backlog, Lane, schedule
from raydfl.cluster.use import UseMeter
from raydfl.core.errors import RaydflError, ResourcesError
from raydfl.core.tensors import FlatTensors
from raydfl.engine import (
    SERVER,
    EarlyOrders,
    Order,
    RaySettings,
    Reply,
    Worker,
    add_spans,
    keys_of,
    split_groups,
    split_pieces,
)

logger = logging.getLogger(__name__)
_LOOK = 5.0
"""Minimum seconds between two searches for new nodes."""
T = TypeVar("T")

StartActor = Callable[[ActorKind, Any], ActorHandle[ClientActor]]
"""Starts a client actor of a kind for the slot with a key."""


@dataclass(slots=True)
class _Slot:
    """A slot of the pool: its current actor and the load of this actor."""

    kind: ActorKind
    actor: ActorHandle[ClientActor]
    ready: Any
    deadline: float
    """Time limit for ``ready`` (time.monotonic); infinite for a started actor."""
    node: str = ""
    """Id of the actor's node; empty until the actor has started."""
    fallback: str = ""
    """Reason for training on the CPU despite a share of a GPU; empty: the actor uses the configured device."""
    load: int = 0
    """Unanswered calls."""
    work: float = 0.0
    """Cost of the orders in the unanswered calls."""
    free_at: float = 0.0
    """Expected end of all unanswered calls (time.monotonic)."""
    limit: float = math.inf
    """Time limit of the current call in seconds; infinite without ``train.deadline``."""
    due: float = math.inf
    """End of the time limit (time.monotonic)."""

    @property
    def starting(self) -> bool:
        """True while the actor is still starting."""
        return self.deadline < math.inf


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to an actor with its orders."""

    orders: list[Order]
    key: Any
    """Key of the slot."""
    slot: _Slot
    sent: float
    """Time of the call (time.perf_counter)."""
    cost: float
    """Cost of the orders; 0 for a pass over updates that the actor has."""
    references: Mapping[str, Any]
    """Object references to the tensors of the call, by key."""


class ActorPool:
    """Client actors of one place. Each actor serves many clients; :class:`~raydfl.cluster.pool.RayPool` waits for the replies.

    Orders are sent roughly in client order to the actor with the earliest expected end of work. Each actor receives its next
    orders while it works, so that it never waits for the server. If an actor is lost, a new actor replaces it and its orders are
    sent again. Repeated work does not change results, because a client's work depends on its order alone. With a deadline, each
    actor works on one client (or one group) at a time, so that a late answer identifies the client.
    """

    def __init__(
        self,
        start_actor: StartActor,
        settings: RaySettings,
        patience: StragglerPolicy,
        number: Callable[[], int],
        meter: UseMeter,
        nodes: SuitableNodes | None = None,
    ) -> None:
        """Start all actors without waiting for them.

        Args:
            start_actor: Starts a client actor.
            settings: Number of actors and their resources.
            patience: Policy for clients with lost or late actors.
            number: Returns a new number for a slot, at the slot's first reply.
            meter: Meter of the use of nodes.
            nodes: Suitable nodes for actors; ``None``: an actor that cannot open the run ends it.
        """
        self._start_actor = start_actor
        self._settings = settings
        self._patience = patience
        self._meter = meter
        self._nodes = nodes
        self._slots: dict[Any, _Slot] = {}
        self._starting: dict[Any, Any] = {}
        """Keys of the slots of starting actors, by the reference ``ready``."""
        self._numbers: defaultdict[Any, int] = defaultdict(number)
        """Slot numbers by key."""
        self._pace: dict[tuple[ActorKind, bool], float] = {}
        """Recent seconds for a unit of cost, by kind of actor and phase (True: training, False: evaluation)."""
        self._failed_starts = 0
        """Failed starts since the last successful start."""
        self._given_up: dict[Any, ActorKind] = {}
        """Kinds of the closed slots whose actors did not start in time, by key."""
        self._nodes_then: set[str] = set()
        """Ids of the nodes when the last slot was given up."""
        self._looked = 0.0
        """Time of the last search for nodes for given-up slots (time.monotonic)."""
        self._references: Mapping[str, Any] = {}
        self._waiting: dict[int, list[Order]] = {}
        """Waiting groups and blocks of orders, by the position of the first order."""
        self._backlog, self._alone = Backlog(), Backlog()
        """Costs of the waiting groups: groups that may share a call, and groups that need a call of their own."""
        self._held = HeldBlocks()
        self.early = EarlyWork()
        """Orders of later server steps (``train.fleet``)."""
        self._calls: dict[Any, _Call] = {}
        """Running calls by the reference to their reply."""
        self._losses: Counter[int] = Counter()
        """Lost calls by an order's position, without losses of whole nodes."""
        self._again: Counter[int] = Counter()
        """All lost calls by an order's position."""
        if settings.actors != "per_client":
            for key, kind in enumerate(actor_kinds(settings, 0)):
                self._open(key, kind)

    # -- actors

    def _open(self, key: Any, kind: ActorKind) -> _Slot:
        actor = self._start_actor(kind, key)
        slot = _Slot(kind, actor, actor.ready.remote(), time.monotonic() + self._settings.ready_timeout)
        self._slots[key] = slot
        self._starting[slot.ready] = key
        return slot

    def _remove(self, key: Any) -> ActorHandle[ClientActor]:
        slot = self._slots.pop(key)
        self._starting.pop(slot.ready, None)
        if slot.node:
            self._meter.leave(slot.node)
        return slot.actor

    def _close(self, key: Any) -> None:
        ray.kill(self._remove(key))

    def _replace(self, key: Any) -> None:
        """End a slot's actor and start a new actor of the same kind."""
        lost = self._slots[key]
        self._close(key)
        self._open(key, lost.kind).fallback = lost.fallback  # Until the new actor reports its device.

    def _replace_node(self, node: str, error: Exception) -> bool:
        """Replace all actors of a lost or preempted node; return whether the node is lost.

        Args:
            node: Id of the node; empty for an actor that has not started.
            error: Ray's error of a lost actor of the node. A preempted node may be listed as alive for a moment.
        """
        preempted = getattr(error, "preempted", False)
        if not node or (node in list_alive_nodes() and not preempted):
            return preempted
        for key, slot in list(self._slots.items()):
            if slot.node == node:
                self._replace(key)  # An idle actor has no pending call that would report its loss.
        return True

    @property
    def kinds(self) -> list[ActorKind]:
        """Kinds of all actors, running or starting."""
        return [slot.kind for slot in self._slots.values()]

    @property
    def fallbacks(self) -> list[str]:
        """Reasons for training on the CPU despite a share of a GPU, for each affected actor."""
        return [slot.fallback for slot in self._slots.values() if slot.fallback]

    def count_workers(self) -> int:
        """Return the number of running actors."""
        return len(self._slots) - len(self._starting)

    def update_started(self) -> None:
        """Update slots of started actors, and replace actors after a failed start.

        Raises:
            ResourcesError: Actors failed to start more than ``ray.retries`` times in a row.
        """
        if not self._starting:
            return
        done = set(ray.wait([*self._starting], num_returns=len(self._starting), timeout=0)[0])
        for ready, key in list(self._starting.items()):
            if ready not in done:
                continue
            slot = self._slots[key]
            try:
                slot.node, slot.fallback = ray.get(ready)
            except RayTaskError as error:
                self._start_elsewhere(key, unwrap_error(error))
            except LOST as error:
                broken = getattr(error, "actor_init_failed", False)
                if broken and self._nodes is not None:
                    used = {slot.node for slot in self._slots.values()}
                    broken = not self._nodes.exclude_without_raydfl(error, used)
                self._failed_starts += not getattr(error, "preempted", False)
                if broken or self._failed_starts > self._settings.retries:
                    raise ResourcesError(
                        f"a client actor failed to start: {explain_end(error)}. Check that every node has the same raydfl and the "
                        f"modules of the run."
                    ) from error
                self._replace(key)
            else:
                self._meter.join(slot.node)
                del self._starting[ready]
                slot.deadline = math.inf
                self._failed_starts = 0

    def _start_elsewhere(self, key: Any, failed: BaseException) -> None:
        """Replace an actor after it failed to open the run.

        Raises:
            BaseException: ``failed``, if no other node can help.
        """
        if self._nodes is None or not isinstance(failed, RaydflError):
            raise failed
        with contextlib.suppress(*LOST):  # After a loss of the node, a new actor may start on any node.
            node: Any = ray.get(self._slots[key].actor.locate.remote())
            if not self._nodes.allow_retry(node, failed):
                raise failed
        self._replace(key)

    def list_late(self) -> list[Any]:
        """List the keys of slots without an actor after ``ray.ready_timeout``."""
        now = time.monotonic()
        return [key for key in self._starting.values() if now > self._slots[key].deadline]

    def give_up_late(self) -> None:
        """Remove slots without an actor after ``ray.ready_timeout``, but keep at least one slot."""
        for key in self.list_late():
            if len(self._slots) > 1:
                logger.warning("A client actor did not start in time. The run continues with %d.", len(self._slots) - 1)
                self._given_up[key] = self._slots[key].kind
                self._nodes_then, self._looked = set(list_alive_nodes()), time.monotonic()
                self._close(key)

    def reopen(self) -> None:
        """Reopen given-up slots after a node has joined."""
        if not self._given_up or time.monotonic() < self._looked + _LOOK:
            return
        self._looked = time.monotonic()
        if set(list_alive_nodes()) - self._nodes_then:
            for key, kind in self._given_up.items():
                self._open(key, kind)
            self._given_up = {}

    def close(self, idle: IdleActors | None = None) -> None:
        """End all actors.

        Args:
            idle: Keeps the running actors without work for the next run; ``None``: end them too.
        """
        for key, slot in list(self._slots.items()):
            if idle is not None and not slot.starting and not slot.load:
                idle.keep(key, self._remove(key))
            else:
                self._close(key)

    # -- orders

    def start(
        self, orders: Sequence[Order], references: Mapping[str, Any], early: EarlyOrders | None = None
    ) -> list[Reply]:
        """Replace all orders by new orders, and send the first.

        Args:
            orders: New orders. Unfinished earlier orders are dropped.
            references: Object references to the server's tensors, by key.
            early: Orders to start if actors have no other work.

        Returns:
            Replies to orders that were carried out early.
        """
        orders, ready = self.early.start(orders, early)
        self._references = references
        self._calls = {reference: call for reference, call in self._calls.items() if call.orders[0].early}
        self._losses, self._again = Counter(), Counter()
        # Clients of a block with an actor each send their own updates, and the server adds them.
        split = split_groups if self._settings.actors == "per_client" else split_pieces
        self._waiting = {piece[0].position: piece for piece in split(orders)}
        self._held.start(self._waiting.keys(), bool(orders) and orders[0].repeats)
        pieces = [
            (position, _sum_costs(group)) for position, group in self._waiting.items() if position not in self._held
        ]
        self._backlog, self._alone = Backlog(pieces), Backlog()
        if self._patience.deadline is not None:
            self._backlog, self._alone = self._alone, self._backlog
        self.hand_out()
        return ready

    def _queue(self, group: list[Order]) -> None:
        """Queue a group or a block of orders."""
        position = group[0].position
        self._waiting[position] = group
        # A group of a lost call gets a call of its own, because it may have ended the actor.
        lost = any(order.position in self._losses for order in group)
        alone = lost or self._patience.deadline is not None
        (self._alone if alone else self._backlog).add(position, _sum_costs(group))

    @property
    def busy(self) -> bool:
        """True while orders of the step are waiting or running."""
        return bool(self._waiting or self.early.awaited) or len(self._calls) > len(self.early.running)

    def list_pending(self) -> list[Any]:
        """Return the object references of running calls and of starting actors."""
        return [*self._calls, *self._starting]

    def list_keys(self) -> list[str]:
        """Return the keys of the server's tensors in running calls with early orders, which are sent again after a loss."""
        return [key for call in self._calls.values() if call.orders[0].early for key in call.references]

    @property
    def due(self) -> float:
        """Earliest time limit of a running call (time.monotonic)."""
        if self._patience.deadline is None:
            return math.inf
        return min((slot.due for slot in self._slots.values()), default=math.inf)

    def hand_out(self) -> None:
        """Send waiting groups to actors."""
        for key, slot, blocks in self._held.take(self._slots, lambda block: self._queue(self._waiting.pop(block))):
            self._call(key, slot, [order for block in blocks for order in self._waiting.pop(block)], 0.0)
        if self._settings.actors == "per_client":
            for position, group in list(self._waiting.items()):
                key = group[0].task.client_id
                slot = self._slots.get(key) or self._open(key, actor_kinds(self._settings, 1)[0])
                if not slot.starting:
                    self._call(key, slot, self._waiting.pop(position), _sum_costs(group))
            return
        if self._backlog or self._alone:
            self._hand_out_waiting()
        if not (self._backlog or self._alone):
            self._hand_out_early()

    def _hand_out_waiting(self) -> None:
        training = next(iter(self._waiting.values()))[0].measure is None
        get_pace = functools.cache(lambda kind: self._get_pace(kind, training))
        lanes = [
            Lane(key, slot.load, slot.free_at, get_pace(slot.kind))
            for key, slot in self._slots.items()
            if not slot.starting
        ]
        for key, positions in schedule(self._backlog, self._alone, lanes, time.monotonic()):
            groups = [self._waiting.pop(position) for position in positions]
            orders = [order for group in groups for order in group]
            self._call(key, self._slots[key], orders, _sum_costs(orders))

    def _hand_out_early(self) -> None:
        """Send early orders to actors with less than the usual number of calls."""
        for load in range(AHEAD):
            for key, slot in self._slots.items():
                if slot.load == load and not slot.starting and (order := self.early.take()) is not None:
                    self._call(key, slot, [order], order.cost)

    def _call(self, key: Any, slot: _Slot, orders: list[Order], cost: float) -> None:
        references = {name: self._references[name] for name in sorted(keys_of(orders))}
        sent = time.perf_counter()
        reference: Any = slot.actor.carry_out.remote(orders, [*references], *references.values())
        self._calls[reference] = _Call(orders, key, slot, sent, cost, references)
        self._meter.send(slot.node, [*references])
        slot.load, slot.work = slot.load + 1, slot.work + cost
        training = orders[0].measure is None
        slot.free_at = max(slot.free_at, time.monotonic()) + cost * self._get_pace(slot.kind, training)
        if training:
            slot.limit = self._patience.limit(len(orders))
            slot.due = time.monotonic() + slot.limit

    def take_replies(self, reference: Any) -> list[Reply]:
        """Take the replies of a finished call; a reference of another pool returns an empty list.

        Raises:
            ClientError: A method's code failed.
            ResourcesError: An order's actor was lost more often than ``ray.retries``.
        """
        call = self._calls.pop(reference, None)
        if call is None:
            return []
        slot = call.slot
        slot.load -= 1
        slot.work -= call.cost
        slot.limit = slot.due = math.inf
        try:
            replies = ray.get(reference)
        except LOST as error:
            return self._requeue(call, error)
        except RayTaskError as error:
            if call.orders[0].early and not self.early.forget(call.orders[0]):
                return []  # The client's own step repeats the work, and raises the error.
            raise unwrap_error(error) from error
        self._meter.receive(slot.node, sum(reply.seconds for reply in replies), sum(map(_count_bytes, replies)))
        self._update_pace(call, replies)
        number, now = self._numbers[call.key], time.perf_counter()
        if call.orders[0].early:
            return self.early.keep(call.orders[0], *add_spans(replies, number, call.sent, now))
        self._note_results(replies)
        for order in call.orders:
            self._held.keep(order, call.key, slot)
        return add_spans(replies, number, call.sent, now, self._again)

    def _note_results(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self._backlog.note_result(reply.position)
            self._held.note_result(reply.position)

    def _requeue(self, call: _Call, error: Exception) -> list[Reply]:
        """Queue the orders of a lost call again, and drop clients that were lost too often.

        Raises:
            ResourcesError: An order was lost too often, and ``run.on_error`` is not ``drop``.
        """
        orders = call.orders
        if orders[0].early:
            orders, self._references = self.early.forget(orders[0]), {**self._references, **call.references}
        self._again.update(order.position for order in orders)
        if self._slots.get(call.key) is call.slot:  # Otherwise an earlier lost call of this actor has replaced it.
            self._replace(call.key)
        if self._replace_node(call.slot.node, error):
            for group in split_pieces(orders):  # No client caused the loss of the node.
                self._queue(group)
            return []
        left_out: list[Reply] = []
        for group in split_pieces(orders):
            self._losses.update(order.position for order in group)
            first, times = group[0], self._losses[group[0].position]
            if times <= self._patience.max_losses(self._settings.retries):
                self._queue(group)
            elif not self._patience.drop_lost or first.task.client_id == SERVER or first.repeats:
                raise ResourcesError(
                    f"the actor of client {first.task.client_id!r} was lost {times} times in round {first.round_index + 1}: "
                    f"{type(error).__name__}: {explain_end(error)}. It was probably killed for lack of memory. Lower ray.actors or "
                    f"raise ray.retries, then resume the run."
                ) from error
            else:
                reason = f"lost: its actor was lost {times} times: {type(error).__name__}: {explain_end(error)}"
                left_out += leave_out(group, self._queue, reason, self._again[first.position] - 1)
        self._note_results(left_out)
        return left_out

    def replace_late(self, done: Collection[Any]) -> list[Reply]:
        """Replace actors after their time limit, and return replies with the rejection of their clients.

        Args:
            done: References of finished calls.
        """
        left_out: list[Reply] = []
        for reference, call in list(self._calls.items()):
            slot = call.slot
            if slot.due > time.monotonic() or reference in done:
                continue
            del self._calls[reference]
            self._replace(call.key)
            reason = f"late: no answer after {slot.limit:g} s (train.deadline and ray.grace)"
            left_out += leave_out(call.orders, self._queue, reason)
        self._note_results(left_out)
        return left_out

    def _update_pace(self, call: _Call, replies: Sequence[Reply]) -> None:
        """Update the pace of the actor's kind and its expected end of work."""
        slot, training, cost = call.slot, call.orders[0].measure is None, call.cost
        if cost > 0:
            pace = sum(reply.seconds for reply in replies) / cost
            before = self._pace.get((slot.kind, training), pace)
            self._pace[slot.kind, training] = 0.7 * before + 0.3 * pace
        slot.free_at = time.monotonic() + slot.work * self._get_pace(slot.kind, training)

    def _get_pace(self, kind: ActorKind, training: bool) -> float:
        """Return seconds for a unit of cost: of this kind, or else of the slowest known kind; 0: unknown."""
        known = [pace for (_, what), pace in self._pace.items() if what == training]
        return self._pace.get((kind, training), max(known, default=0.0))

    def ask(self, job: Callable[[Worker], T], wait: bool = True) -> T | None:
        """Run a job on a running actor, preferably with a GPU; ``None`` without an actor or after its loss."""
        running = [slot for slot in self._slots.values() if not slot.starting]
        if not running:
            return None
        answer: Any = max(running, key=lambda slot: slot.kind.gpus).actor.do.remote(job)
        try:
            return cast(T, ray.get(answer)) if wait else None
        except RayTaskError as error:
            raise unwrap_error(error) from error
        except LOST:
            return None


def _sum_costs(orders: Sequence[Order]) -> float:
    return sum(order.cost for order in orders)


def _count_bytes(reply: Reply) -> int:
    """Return the bytes of a reply's tensors. The sums of a block replace the updates of its clients."""
    if reply.sums or (reply.update is None and not reply.rejected):
        return sum(cast(FlatTensors, update.tensors).vector.nbytes for update in reply.sums)
    return int(reply.bytes_up)
