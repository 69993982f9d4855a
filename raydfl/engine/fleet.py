"""Queue of clients in flight, in virtual time.

The duration of a client's work is known before its training, so the order of arrivals is a pure function of the starts. One call
of :func:`advance` computes the arrivals of one server step without any training. The clients that arrive in a step are then
trained like the cohort of a round.

J. Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022 (buffer and concurrency).
K. Bonawitz et al., Towards Federated Learning at Scale: System Design, MLSys 2019 (over-selection).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from raydfl.core.tensors import FlatTensors, flatten
from raydfl.core.types import State, Task, Tensors

LOST, STALE, UNUSED, LATE = "lost", "stale", "unused", "late"
"""Reasons of dropped clients: their work is lost, too many steps old, surplus of ``Capacity.over``, or over ``train.deadline``."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start of a client's work."""

    client: int
    """Index of the client in the population."""
    task: Task
    seconds: float
    """Virtual duration of the work in seconds, above 0."""
    lost: str = ""
    """:data:`LOST` or :data:`LATE` if the server never receives the result. It notices this at the time of arrival."""
    most_batches: int | None = None
    """Largest number of batches of each training, if ``train.deadline`` ends it early."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A client in flight: it has started and has not arrived yet."""

    arrival: float
    """Virtual time of the arrival, in seconds."""
    number: int
    """Number of the start, from 0. It breaks ties of equal arrival times."""
    version: int
    """Number of server steps before the start."""
    start: Start


@dataclass(frozen=True, slots=True)
class Fleet:
    """Queue between two server steps."""

    seconds: float = 0.0
    """Virtual time."""
    started: int = 0
    """Number of starts so far."""
    flights: tuple[Flight, ...] = ()
    """Clients in flight, by arrival and number."""

    def land(self) -> Fleet:
        """Return the queue without clients in flight, at the same time. Their work is discarded."""
        return dataclasses.replace(self, flights=())


Versions = Mapping[int, Mapping[str, Tensors]]
"""Tensors of earlier states by number of completed rounds and key of the server's state."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Clients in flight after a server step, with the earlier states that they train."""

    fleet: Fleet = Fleet()
    versions: Versions = field(default_factory=dict)

    def advance(self, fleet: Fleet, state: State) -> InFlight:
        """Return the clients in flight after a step.

        Args:
            fleet: Queue after the step.
            state: State before the step, which the clients that started in the step train.
        """
        needed = {flight.version for flight in fleet.flights}
        versions = {version: tensors for version, tensors in self.versions.items() if version in needed}
        if state.round_index in needed:
            keys = {k for f in fleet.flights if f.version == state.round_index for k in f.start.task.receive}
            # Copies, because a method may change the tensors of the state in place.
            versions[state.round_index] = {key: FlatTensors(*flatten(dict(state.tensors[key]))) for key in sorted(keys)}
        return InFlight(fleet, versions)

    def land(self) -> InFlight:
        """Return the queue without clients in flight, at the same time. Their work is discarded."""
        return InFlight(self.fleet.land())

    def dump(self) -> dict[str, Any]:
        """Return the queue as JSON values. The tensors of the versions are missing."""
        flights = [
            (
                *(
                    f.arrival,
                    f.number,
                    f.version,
                    f.start.client,
                    f.start.seconds,
                    f.start.lost,
                    _dump_task(f.start.task),
                ),
                f.start.most_batches,
            )
            for f in self.fleet.flights
        ]
        return {"seconds": self.fleet.seconds, "started": self.fleet.started, "flights": flights}

    @classmethod
    def load(cls, values: Mapping[str, Any], versions: Versions) -> InFlight:
        """Create the clients in flight from the values of :meth:`dump` and the tensors of the versions."""
        flights = tuple(
            Flight(arrival, number, version, Start(client, _load_task(task), seconds, _load_lost(lost), *most_batches))
            for arrival, number, version, client, seconds, lost, task, *most_batches in values["flights"]
        )
        return cls(Fleet(values["seconds"], values["started"], flights), versions)


NOBODY = InFlight()
"""No client in flight, at the start of a run."""


def _dump_task(task: Task) -> list[Any]:
    return [task.client_id, task.phase, task.receive, dict(task.options), task.has]


def _load_lost(value: str | bool) -> str:
    """Load the reason of a loss. Earlier versions stored whether a client was lost."""
    return LOST if value is True else value or ""


def _load_task(values: Sequence[Any]) -> Task:
    client_id, phase, receive, options, has = values
    return Task(client_id, phase, tuple(receive), options, has=tuple(has))


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of the queue.

    If ``concurrency`` equals ``buffer``, the training is synchronous: free places wait for the next step. Otherwise each arrival
    frees a place immediately.
    """

    buffer: int
    """Arrivals in a server step, at least 1."""
    concurrency: int
    """Clients in flight, at least ``buffer``."""
    most: float = math.inf
    """Largest staleness of an arrival in server steps. Older results are dropped."""
    over: float = 1.0
    """Factor on the places of synchronous training, at least 1. Clients in flight after the last arrival are dropped."""
    longest: float = math.inf
    """Largest duration of a server step in seconds. A longer step ends then, with the arrivals so far."""

    @property
    def synchronous(self) -> bool:
        """True if free places wait for the next step."""
        return self.concurrency == self.buffer

    @property
    def places(self) -> int:
        """Largest number of clients in flight."""
        if not self.synchronous:
            return self.concurrency
        return math.ceil(round(self.over * self.buffer, 9))  # 1.1 * 10 is slightly above 11


@dataclass(frozen=True, slots=True)
class Step:
    """Arrivals of a server step."""

    arrivals: tuple[Flight, ...]
    """Used arrivals, by time and number. Fewer than the buffer if no further client is in flight and none can start."""
    dropped: tuple[tuple[Flight, str], ...]
    """Dropped clients, each with :data:`LOST`, :data:`STALE`, :data:`UNUSED` or :data:`LATE`."""
    fleet: Fleet
    """The queue after the step."""


Starter = Callable[[float, int, Set[int]], Sequence[Start]]
"""Function from the time, a number of free places and the indices of unavailable clients to the next starts."""
Opening = Callable[[float, Set[int]], float]
"""Function from a time and the indices of unavailable clients to the next start of a further client's hours."""


def _never(now: float, unavailable: Set[int]) -> float:
    return math.inf


def advance(fleet: Fleet, version: int, capacity: Capacity, start: Starter, opening: Opening = _never) -> Step:
    """Advance the virtual time until the buffer of a server step is full.

    A client is unavailable while it is in flight, and after its arrival in this step: two starts from one version would train on
    the same batches. The server receives all clients of an instant, as far as the buffer has room, before it starts others.
    So draws do not depend on the order of equal arrival times. If fewer clients than free places can start, the free places wait
    for the hours of further clients.

    Args:
        fleet: The queue before the step.
        version: Number of completed server steps.
        capacity: Sizes of the queue.
        start: Chooses the starting clients. It may return fewer clients than free places.
        opening: Returns the next start of a client's hours; default: all clients are always available.

    Returns:
        The arrivals, and the queue after the step. Equal arguments give equal results.
    """
    queue = [(flight.arrival, flight.number, flight) for flight in fleet.flights]  # sorted, therefore a heap
    now, number = fleet.seconds, fleet.started
    end = now + capacity.longest
    arrivals: list[Flight] = []
    dropped: list[tuple[Flight, str]] = []
    unavailable = {flight.start.client for flight in fleet.flights}
    free, refill = capacity.places - len(queue), True
    while True:
        if refill and free > 0:
            for begun in start(now, free, unavailable):
                flight = Flight(now + begun.seconds, number, version, begun)
                heapq.heappush(queue, (flight.arrival, number, flight))
                unavailable.add(begun.client)
                number, free = number + 1, free - 1
        opens = opening(now, unavailable) if free > 0 else math.inf
        arrival = queue[0][0] if queue else math.inf
        if arrival == opens == math.inf:
            break
        now = min(arrival, opens, end)
        if now == end < min(arrival, opens):
            break
        while queue and queue[0][0] == now and len(arrivals) < capacity.buffer:
            flight = heapq.heappop(queue)[2]
            stale = version - flight.version > capacity.most
            if flight.start.lost or stale:
                dropped.append((flight, flight.start.lost or STALE))
                if flight.start.lost != LATE:  # It would be late again.
                    unavailable.remove(flight.start.client)
            else:
                arrivals.append(flight)
        if len(arrivals) == capacity.buffer:
            break
        if not capacity.synchronous:
            free, refill = capacity.places - len(queue), True
        elif not (queue or arrivals) and arrival == now:  # A synchronous step without any result is repeated.
            free, refill = capacity.places, True
        else:
            refill = opens == now
    flights = tuple(entry[2] for entry in sorted(queue, key=lambda entry: entry[:2]))
    if capacity.synchronous:
        dropped += [(flight, UNUSED) for flight in flights]
        flights = ()
    return Step(tuple(arrivals), tuple(dropped), Fleet(now, number, flights))
