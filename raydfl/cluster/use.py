"""Use of a cluster's nodes by a run: seconds held and busy, and bytes between nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray

_GROUP, _MARKET, _ACCELERATOR = "ray.io/node-group", "ray.io/market-type", "ray.io/accelerator-type"
NodeUse = dict[str, float]
"""``held`` and ``busy`` (seconds), ``bytes_down`` and ``bytes_up`` of all nodes of a type."""


class UseMeter:
    """Sums of the nodes with client actors.

    A node is held from the start of its first actor to the end of its last. It is busy for the fraction of its actors at work.
    A broadcast crosses to a node once a round, and a reply each time. Nothing crosses on the server's own node.

    Args:
        server_node: Id of the server's node.
        clock: Returns the time in seconds.
    """

    def __init__(self, server_node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server_node, self._clock = server_node, clock
        self._actors: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._use: dict[str, Counter[str]] = {}
        self._sizes: Mapping[str, int] = {}
        self._sent: set[tuple[str, str]] = set()

    def begin_round(self, sizes: Mapping[str, int], keep: Iterable[str] = ()) -> None:
        """Start a round with new tensors.

        Args:
            sizes: Bytes of the server's tensors by key.
            keep: Keys of earlier rounds that may be sent again.
        """
        self._sizes = {key: self._sizes[key] for key in keep} | dict(sizes)
        self._sent = set()

    def join(self, node: str) -> None:
        """Note that an actor has started on a node."""
        if not self._actors[node]:
            self._since[node] = self._clock()
        self._actors[node] += 1
        self._use.setdefault(node, Counter())

    def leave(self, node: str) -> None:
        """Note that an actor on a node has ended."""
        if self._actors[node]:
            self._actors[node] -= 1
            if not self._actors[node]:
                self._use[node]["held"] += self._clock() - self._since.pop(node)  # type: ignore[assignment]

    def send(self, node: str, keys: list[str]) -> None:
        """Note that an actor on a node reads the server's tensors of these keys."""
        for key in keys:
            if node in self._use and node != self._server_node and (node, key) not in self._sent:
                self._sent.add((node, key))
                self._use[node]["bytes_down"] += self._sizes[key]

    def receive(self, node: str, seconds: float, size: int) -> None:
        """Note a reply from a node.

        Args:
            node: Id of the node.
            seconds: Seconds of the actor's work.
            size: Bytes of the reply's tensors.
        """
        if node in self._use:
            self._use[node]["busy"] += seconds / max(1, self._actors[node])  # type: ignore[assignment]
            self._use[node]["bytes_up"] += size if node != self._server_node else 0

    def summarise(self, types: Mapping[str, str]) -> dict[str, NodeUse]:
        """Return the use by type of node.

        Args:
            types: Type of each node by id.
        """
        total: dict[str, NodeUse] = {}
        for node, use in self._use.items():
            held = use["held"] + (self._clock() - self._since[node] if node in self._since else 0.0)
            amounts = {"held": held, "busy": min(use["busy"], held)}
            amounts |= {name: use[name] for name in ("bytes_down", "bytes_up")}
            add_use(total, {types.get(node, "node"): amounts})
        return total


def add_use(total: dict[str, NodeUse], use: Mapping[str, NodeUse]) -> None:
    """Add the use of a later part of a run."""
    for name, amounts in use.items():
        sums = total.setdefault(name, dict.fromkeys(amounts, 0.0))
        for key, value in amounts.items():
            sums[key] += value


def name_node_types() -> dict[str, str]:
    """Return the type of each node, also of nodes that have left, by id."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: _name_type(node.get("Labels") or {}, node.get("Resources") or {}) for node in nodes}


def _name_type(labels: Mapping[str, str], resources: Mapping[str, float]) -> str:
    """Name a node's type: its group in the autoscaler, else its accelerator.

    >>> _name_type({"ray.io/node-group": "gpu-workers", "ray.io/market-type": "spot"}, {})
    'gpu-workers (spot)'
    >>> _name_type({}, {"CPU": 4})
    'CPU node'
    """
    default = "GPU node" if resources.get("GPU") else "CPU node"
    name = labels.get(_GROUP) or labels.get(_ACCELERATOR) or default
    return f"{name} (spot)" if labels.get(_MARKET) == "spot" else name
