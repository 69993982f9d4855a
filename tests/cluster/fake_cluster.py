"""A simulated cluster in one process with a virtual clock. It implements the Ray calls of the pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from raydfl.cluster import actors, nodes
from raydfl.cluster import pool as ray_pool
from raydfl.cluster.nodes import SuitableNodes
from raydfl.cluster.pool import RayPool
from raydfl.cluster.resources import ActorKind
from raydfl.core.types import Task
from raydfl.engine.orders import Order, Reply
from raydfl.engine.settings import RaySettings

START = 2.0
"""Seconds from an actor's place on a node to its first answer."""


@dataclass(eq=False)
class Reference:
    at: float = math.inf
    value: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class Node:
    name: str
    cpus: float
    gpus: float
    alive: bool = True
    fallback: str = ""
    """The reason why actors on it train on the CPU."""
    broken: Exception | None = None
    """The error of actors that open the run on it."""
    actors: list[Actor] = field(default_factory=list)

    def free(self) -> tuple[float, float]:
        kinds = [actor.kind for actor in self.actors]
        return self.cpus - sum(kind.cpus for kind in kinds), self.gpus - sum(kind.gpus for kind in kinds)


class Remote:
    def __init__(self, call: Callable[..., Reference]) -> None:
        self.remote = call


class Actor:
    """Simulated actor that executes its calls in order, at a fixed pace."""

    def __init__(self, cluster: FakeCluster, site: str, kind: ActorKind) -> None:
        self.site, self.kind, self.node = site, kind, None  # type: tuple[str, ActorKind, Node | None]
        self.first = Reference()
        self.done: list[int] = []
        self.excluded: dict[str, str] = {}
        self.idle_at = 0.0
        self._cluster, self._open = cluster, [self.first]
        self.ready, self.carry_out = Remote(lambda: self.first), Remote(self._carry_out)
        self.locate = Remote(lambda: Reference(cluster.now, self.node and self.node.name))

    def place(self, node: Node, now: float) -> None:
        self.node = node
        node.actors.append(self)
        self.first.at, self.first.value = now + START, (node.name, node.fallback)
        self.idle_at = now + START
        if isinstance(node.broken, ImportError):
            cause = RayTaskError(
                "__init__",
                f"Traceback (most recent call last):\nImportError: {node.broken}",
                node.broken,
                pid=1,
                ip=node.name,
            )
            self.first.error = ActorDiedError(cause)
        elif node.broken is not None:
            self.first.error = RayTaskError("ready", "", node.broken)

    def _carry_out(self, orders: list[Order], keys: list[str], *tensors: Any) -> Reference:
        if self.node is not None and not self.node.alive:
            return Reference(self._cluster.now, error=ActorDiedError())
        assert self.first.at <= self._cluster.now, "an order for an actor that has not opened the run"
        pace = self._cluster.pace[self.kind.gpus > 0]
        begin = max(self.idle_at, self._cluster.now)
        self.idle_at = begin + pace * sum(order.cost for order in orders)
        self.done += [order.position for order in orders]
        replies = [Reply(o.position, o.task.client_id, seconds=pace * o.cost) for o in orders]
        self._open.append(Reference(self.idle_at, replies))
        return self._open[-1]

    def end(self, now: float, preempted: bool = False) -> None:
        for reference in self._open:
            if reference.at > now:
                reference.at, reference.error = now, ActorDiedError()
                reference.error._preempted = preempted


class FakeCluster:
    """Simulated nodes and actors with scheduled events."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds_per_cost: float = 1.0, gpu_seconds: float = 0.1
    ) -> None:
        self.now = 0.0
        self.pace = {False: seconds_per_cost, True: gpu_seconds}
        self.nodes: list[Node] = []
        self.actors: list[Actor] = []
        self.waiting: list[Actor] = []
        self.demand: list[tuple[float, int]] = []
        """(time, number of unplaced actors) at each change."""
        self.events: list[tuple[float, Callable[[], Any]]] = []
        self.waits = 0
        self.nodes_for: SuitableNodes | None = None
        for name in ("wait", "get", "put", "kill", "available_resources", "get_runtime_context"):
            monkeypatch.setattr(f"raydfl.cluster.pool.ray.{name}", getattr(self, name))
        monkeypatch.setattr(nodes, "list_addresses", lambda: {n.name: n.name for n in self.nodes if n.alive})
        monkeypatch.setattr(actors, "list_alive_nodes", lambda: {n.name: {} for n in self.nodes if n.alive})
        monkeypatch.setattr(actors, "time", self)
        monkeypatch.setattr(ray_pool, "time", self)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    # -- events

    def join(
        self, name: str, cpus: float, gpus: float = 0.0, fallback: str = "", broken: Exception | None = None
    ) -> None:
        self.nodes.append(Node(name, cpus, gpus, fallback=fallback, broken=broken))
        self._place()

    def leave(self, name: str) -> None:
        for node in self.nodes:
            if node.name == name and node.alive:
                node.alive = False
                for actor in node.actors:
                    actor.end(self.now)

    def preempt(self, name: str) -> None:
        """End all actors of a node with Ray's notice. The node is still listed as alive, but takes no new actors."""
        (node,) = (node for node in self.nodes if node.name == name)
        node.cpus = node.gpus = 0.0
        for actor in node.actors:
            actor.end(self.now, preempted=True)

    def at(self, time: float, event: Callable[[], Any]) -> None:
        self.events.append((time, event))
        self.events.sort(key=lambda pair: pair[0])

    def start_actor(self, site: str, kind: ActorKind, key: object) -> Any:
        actor = Actor(self, site, kind)
        actor.excluded = {} if self.nodes_for is None else dict(self.nodes_for.excluded)
        self.actors.append(actor)
        self.waiting.append(actor)
        self._place()
        return actor

    def _place(self) -> None:
        for actor in list(self.waiting):
            for node in self.nodes:
                cpus, gpus = node.free()
                if (
                    node.alive
                    and node.name not in actor.excluded
                    and cpus >= actor.kind.cpus
                    and gpus >= actor.kind.gpus
                ):
                    self.waiting.remove(actor)
                    actor.place(node, self.now)
                    break
        self.demand.append((self.now, len(self.waiting)))

    # -- Ray's calls

    def wait(self, references: Sequence[Reference], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.waits += 1
        until = self.now + timeout
        while True:
            ready = [reference for reference in references if reference.at <= self.now]
            if len(ready) >= num_returns or self.now >= until:
                ready = ready[:num_returns]
                return ready, [reference for reference in references if reference not in ready]
            times = [reference.at for reference in references if reference.at > self.now]
            self.now = min([until, *times, *(time for time, _ in self.events[:1])])
            while self.events and self.events[0][0] <= self.now:
                self.events.pop(0)[1]()

    def get(self, reference: Reference) -> Any:
        assert reference.at <= self.now
        if reference.error is not None:
            raise reference.error
        return reference.value

    def put(self, value: Any) -> Any:
        return value

    def kill(self, actor: Actor) -> None:
        if actor in self.waiting:
            self.waiting.remove(actor)
        if actor.node is not None:
            actor.node.actors.remove(actor)
        actor.end(self.now)
        self._place()

    def get_runtime_context(self) -> FakeCluster:
        return self

    def get_node_id(self) -> str:
        return "head"

    def available_resources(self) -> dict[str, float]:
        free = [node.free() for node in self.nodes if node.alive]
        return {"CPU": sum(cpus for cpus, _ in free), "GPU": sum(gpus for _, gpus in free)}


def open_pool(cluster: FakeCluster, **settings: Any) -> RayPool:
    return RayPool(cluster.start_actor, RaySettings(**settings), nodes=cluster.nodes_for)


def make_orders(costs: Sequence[float]) -> list[Order]:
    return [Order(position, Task(f"c{position}"), 0, cost) for position, cost in enumerate(costs)]
