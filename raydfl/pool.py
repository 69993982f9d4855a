"""Pools carry out orders: SerialPool one after another in this process, RayPool on client actors. Both behind one interface."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from raydfl.client import ClientActor
from raydfl.config import Config, RaySettings
from raydfl.dispatch import Place, hand_out
from raydfl.errors import RaydflError, ResourcesError
from raydfl.private import PrivateRef
from raydfl.tensors import FlatTensors
from raydfl.worker import Order, Result, Worker, in_groups

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """Where clients' work is done."""

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Result]:
        """Results of all orders, in order of completion. Work may begin before the first is asked for."""
        ...

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Worker.width, where clients are trained."""
        ...

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """PrivateStore.compact, where private state may be read."""
        ...

    def close(self) -> None:
        """Free what the pool holds."""
        ...


class SerialPool:
    """Everything in this process, in the order given: for tests, debuggers and small work."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def run(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> Iterator[Result]:
        """Carry out one group of orders after another, each when its results are asked for."""
        for group in in_groups(orders):
            yield from self._worker.carry_out(group, broadcast)

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Of this process."""
        return self._worker.width(orders, broadcast)

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Compact in this process."""
        return self._worker.private.compact(round_index, refs)

    def close(self) -> None:
        """Close the file that private state is written to."""
        self._worker.private.close()


LOST = (RayActorError, OutOfMemoryError, ObjectLostError)
"""What a lost actor, process, node or result looks like. OutOfMemoryError is no RayActorError."""


@dataclass(slots=True)
class _Slot:
    """A place for an actor: the actor that has it now, and what it was given."""

    actor: ActorHandle[ClientActor]
    ready: Any
    deadline: float
    """When to give up waiting for ``ready``; infinite once it has answered."""
    load: int = 0
    """Calls that it has not answered."""
    work: float = 0.0
    """Cost of the orders in those calls."""
    free_at: float = 0.0
    """When it will have answered them all, as far as can be foreseen (time.monotonic)."""


class RayPool:
    """Client actors, each carrying out many clients' orders.

    The longest orders go out first, to the actor that will be free first; each is given its next orders while it works, so that it
    never waits for the server. Orders of a lost actor go to others, and a new actor takes its place; that work is done twice
    changes nothing, because a client's work depends on its order alone.
    """

    def __init__(self, start_actor: Callable[[], ActorHandle[ClientActor]], settings: RaySettings) -> None:
        """Open it.

        Args:
            start_actor: makes one more client actor.
            settings: number of actors and their resources.
        """
        self._start_actor = start_actor
        self._settings = settings
        self._slots: dict[Any, _Slot] = {}
        self._pace = {True: 0.0, False: 0.0}
        """Seconds for a unit of cost, lately: of training, and of evaluation."""
        if settings.actors != "per_client":
            for number in range(int(settings.actors)):
                self._open(number)
            self._await_all()

    def _open(self, key: Any) -> _Slot:
        actor = self._start_actor()
        slot = _Slot(actor, actor.ready.remote(), time.monotonic() + self._settings.ready_timeout)
        self._slots[key] = slot
        return slot

    def _await_all(self) -> None:
        waiting = [slot.ready for slot in self._slots.values()]
        try:
            ray.get(waiting, timeout=self._settings.ready_timeout)
        except GetTimeoutError:
            done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            raise self._not_started(len(done), len(waiting)) from None
        except RayTaskError as error:
            raise task_cause(error) from error
        except RayActorError as error:
            raise ResourcesError(f"a client actor ended while it started: {_first_line(error)}") from error
        for slot in self._slots.values():
            slot.deadline = math.inf

    def _not_started(self, started: int, wanted: int) -> ResourcesError:
        settings = self._settings
        return ResourcesError(
            f"{started} of {wanted} client actors started within {settings.ready_timeout:g} s; each needs {settings.cpus:g} CPU "
            f"and {settings.gpus:g} GPU, free in the cluster: {free_resources()}; lower ray.actors, ray.cpus or ray.gpus, or raise "
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
        self._hand_out(waiting, in_flight, references, {})
        return self._results(waiting, in_flight, references)

    def _results(
        self,
        waiting: list[list[Order]],
        in_flight: dict[Any, tuple[list[Order], Any, _Slot]],
        references: Mapping[str, Any],
    ) -> Iterator[Result]:
        losses: dict[int, int] = {}
        while waiting or in_flight:
            self._hand_out(waiting, in_flight, references, losses)
            done, _ = ray.wait(list(in_flight), num_returns=1, timeout=5.0)
            if not done:
                self._check_starting()
                continue
            given, key, slot = in_flight.pop(done[0])
            slot.load -= 1
            slot.work -= _cost(given)
            try:
                results = ray.get(done[0])
            except LOST as error:
                for order in given:
                    losses[order.position] = losses.get(order.position, 0) + 1
                    if losses[order.position] > self._settings.retries:
                        raise self._lost_too_often(order, losses[order.position], error) from error
                waiting += in_groups(given)
                if self._slots.get(key) is slot:  # else another call of its has already told of its end
                    self._close(key)
                    self._open(key)
                continue
            except RayTaskError as error:
                raise task_cause(error) from error
            slot.deadline = math.inf
            self._learn(given, results, slot)
            yield from results

    def _learn(self, orders: Sequence[Order], results: Sequence[Result], slot: _Slot) -> None:
        """Foresee from what a call took when the actor will be free."""
        training = orders[0].measure is None
        cost = _cost(orders)
        if cost > 0:
            pace = sum(result.seconds for result in results) / cost
            self._pace[training] = 0.7 * self._pace[training] + 0.3 * pace if self._pace[training] else pace
        slot.free_at = time.monotonic() + slot.work * self._pace[training]

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
                client = waiting[-1][0].task.client_id
                self._call(client, self._slots.get(client) or self._open(client), waiting.pop(), in_flight, references)
            return
        if not waiting:
            return
        now = time.monotonic()
        groups = waiting[::-1]
        calls = hand_out(
            [_cost(group) for group in groups],
            [any(order.position in losses for order in group) for group in groups],
            [Place(key, slot.load, slot.free_at) for key, slot in self._slots.items()],
            now,
            self._pace[groups[0][0].measure is None],
        )
        for key, chosen in calls:
            given = [order for position in chosen for order in groups[position]]
            self._call(key, self._slots[key], given, in_flight, references)
        gone = {position for _, chosen in calls for position in chosen}
        waiting[:] = [group for position, group in enumerate(groups) if position not in gone][::-1]

    def _call(
        self,
        key: Any,
        slot: _Slot,
        given: list[Order],
        in_flight: dict[Any, tuple[list[Order], Any, _Slot]],
        references: Mapping[str, Any],
    ) -> None:
        receive = sorted({name for order in given for name in order.task.receive})
        reference: Any = slot.actor.carry_out.remote(given, receive, *[references[name] for name in receive])
        in_flight[reference] = (given, key, slot)
        slot.load, slot.work = slot.load + 1, slot.work + _cost(given)
        slot.free_at = max(slot.free_at, time.monotonic()) + _cost(given) * self._pace[given[0].measure is None]

    def _check_starting(self) -> None:
        """Give up actors that do not start (their node left, say); the others take over their orders."""
        for key, slot in list(self._slots.items()):
            if slot.deadline < math.inf:
                if ray.wait([slot.ready], timeout=0)[0]:
                    slot.deadline = math.inf
                elif time.monotonic() > slot.deadline:
                    if len(self._slots) == 1 or self._settings.actors == "per_client":
                        raise self._not_started(len(self._slots) - 1, len(self._slots))
                    logger.warning("a client actor could not be started again; going on with %d", len(self._slots) - 1)
                    self._close(key)

    def _lost_too_often(self, order: Order, times: int, error: Exception) -> ResourcesError:
        return ResourcesError(
            f"the actor of client {order.task.client_id!r} was lost {times} times in round {order.round_index + 1}: "
            f"{type(error).__name__}: {_first_line(error)}; check memory (an out-of-memory kill ends an actor), lower ray.actors "
            f"or raise ray.retries, then resume the run"
        )

    def _close(self, key: Any) -> None:
        ray.kill(self._slots.pop(key).actor)

    def width(self, orders: Sequence[Order], broadcast: Mapping[str, FlatTensors]) -> int:
        """Of one of the actors; 1 where every client has an actor of its own."""
        if not self._slots:
            return 1
        slot = next(iter(self._slots.values()))
        keys = sorted(broadcast)
        try:
            width: int = ray.get(cast(Any, slot.actor.width.remote(list(orders), keys, *[broadcast[k] for k in keys])))
        except RayTaskError as error:
            raise task_cause(error) from error
        except LOST as error:
            raise ResourcesError(
                f"a client actor was lost while it was measured how many clients to train together: {_first_line(error)}; "
                f"check memory, or set train.together to a number"
            ) from error
        return width

    def compact(self, round_index: int, refs: Mapping[int, PrivateRef]) -> dict[int, PrivateRef]:
        """Compact on one of the actors: private state never passes through the server."""
        if not self._slots:
            return {}
        slot = next(iter(self._slots.values()))
        try:
            moved: dict[int, PrivateRef] = ray.get(cast(Any, slot.actor.compact.remote(round_index, refs)))
        except RayTaskError as error:
            raise task_cause(error) from error
        except LOST:
            return {}  # nothing is lost: it is tried again after a later commit
        return moved

    def close(self) -> None:
        """End the actors."""
        for key in list(self._slots):
            self._close(key)


def task_cause(error: RayTaskError) -> BaseException:
    """The exception that an actor raised, without Ray's wrapping when it is one of ours."""
    cause = error.cause
    return cause if isinstance(cause, RaydflError) else error


def _cost(orders: Sequence[Order]) -> float:
    return sum(order.cost for order in orders)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def free_resources() -> str:
    """Free CPUs and GPUs of the cluster, for messages."""
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU"


def check_resources(config: Config, clients: int) -> None:
    """Refuse a configuration that the cluster can never hold.

    Raises:
        ResourcesError: with what is needed and what is there.
    """
    settings = config.ray
    number = clients if settings.actors == "per_client" else int(settings.actors)
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for kind, each in (("CPU", settings.cpus), ("GPU", settings.gpus)):
        has = there.get(kind, 0.0)
        if number * each > has + 1e-6:
            raise ResourcesError(
                f"{number} client actors with {each:g} {kind} each need {number * each:g} {kind}, the cluster has {has:g}; lower "
                f"ray.actors or ray.{kind.lower()}s"
            )
