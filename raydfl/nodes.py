"""The nodes of a cluster: which there are, how many client actors they have room for, and a line when one joins or leaves."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import ray

from raydfl.client import ActorKind, wanted_kinds
from raydfl.config import Config
from raydfl.errors import ResourcesError

_EXACT = 1e-6
"""Ray's resources are floats with four decimals."""


def alive_nodes() -> dict[str, Mapping[str, float]]:
    """What each node that is alive has in all, by the node's id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def room(nodes: Sequence[Mapping[str, float]], kinds: Sequence[ActorKind]) -> int:
    """How many of these client actors the nodes can hold at once, when nobody else uses them.

    Args:
        nodes: what each node has in all: ``CPU``, ``GPU``.
        kinds: of the actors wanted; all with the same CPUs, some without a share of a GPU.
    """
    if not kinds:
        return 0
    by_cpu = [_times(node.get("CPU", 0.0), kinds[0].cpus) for node in nodes]
    with_gpu = [kind for kind in kinds if kind.gpus]
    on_gpus = sum(
        min(places, _on_devices(node.get("GPU", 0.0), with_gpu[0].gpus)) if with_gpu else 0
        for node, places in zip(nodes, by_cpu, strict=True)
    )
    there = min(len(with_gpu), on_gpus)
    return int(there + min(len(kinds) - len(with_gpu), sum(by_cpu) - there))


def _times(has: float, each: float) -> float:
    return math.inf if each == 0 else (has + _EXACT) // each


def _on_devices(has: float, each: float) -> float:
    """A share of less than one is of one device."""
    return _times(has, each) if each >= 1 else int(has) * ((1 + _EXACT) // each)


def wanted_text(kinds: Sequence[ActorKind]) -> str:
    """What client actors need, for messages.

    >>> wanted_text([ActorKind(1, 0.5), ActorKind(1, 0.5), ActorKind(1, 0)])
    '2 with 1 CPU and 0.5 GPU each, 1 with 1 CPU each'
    """
    counts = Counter(str(kind) for kind in kinds)
    return ", ".join(f"{number} with {kind} each" for kind, number in counts.items())


def nodes_text(nodes: Sequence[Mapping[str, float]]) -> str:
    """How many nodes there are and what they have together, for messages.

    >>> nodes_text([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}])
    '2 nodes with 6 CPU and 1 GPU'
    """
    cpus, gpus = (sum(node.get(what, 0.0) for node in nodes) for what in ("CPU", "GPU"))
    return f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with {cpus:g} CPU and {gpus:g} GPU"


class NodeWatch:
    """Says when a run waits for nodes, and when nodes join or leave."""

    def __init__(
        self,
        kinds: Sequence[ActorKind],
        needed: int,
        tell: Callable[[str], None],
        look: Callable[[], Mapping[str, Mapping[str, float]]] = alive_nodes,
        every: float = 1.0,
    ) -> None:
        """Begin with the nodes that are there.

        Args:
            kinds: of the client actors wanted.
            needed: of them for rounds to begin.
            tell: shows a message.
            look: the nodes that are alive, by id.
            every: seconds between two looks.
        """
        self._kinds, self._needed, self._tell, self._look, self._every = kinds, needed, tell, look, every
        self._looked = time.monotonic()
        self._nodes: Mapping[str, Mapping[str, float]] = look()

    def waits(self, seconds: float) -> None:
        """Say once what is waited for, if it is not there.

        Args:
            seconds: for how long at most.
        """
        there = list(self._nodes.values())
        fitting = room(there, self._kinds)
        if fitting < self._needed:
            self._tell(
                f"waiting for the autoscaler: room for {fitting} of {self._needed} client actors, needs "
                f"{wanted_text(self._kinds)}; there: {nodes_text(there)}; waiting up to {seconds:g} s"
            )

    def look(self) -> None:
        """Say which nodes have joined or left since the last look, unless that was just now."""
        if time.monotonic() < self._looked + self._every:
            return
        self._looked = time.monotonic()
        now = self._look()
        joined, left = len(now.keys() - self._nodes.keys()), len(self._nodes.keys() - now.keys())
        self._nodes = now
        if joined or left:
            parts = [f"{number} {word}" for number, word in ((joined, "joined"), (left, "left")) if number]
            there = list(now.values())
            self._tell(
                f"nodes: {', '.join(parts)}; there: {nodes_text(there)}, room for {room(there, self._kinds)} of {len(self._kinds)} "
                f"client actors"
            )


def free_resources() -> str:
    """Free CPUs and GPUs of the cluster, for messages."""
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU"


def check_resources(config: Config, clients: int, grows: bool) -> None:
    """Refuse a configuration that the cluster can never hold.

    Args:
        config: with the actors wanted, and how many of them have to be there.
        clients: of the population.
        grows: whether the cluster may have nodes later that it does not have now; then nothing is refused.

    Raises:
        ResourcesError: with what is needed and what is there.
    """
    if grows:
        return
    settings = config.ray
    kinds = wanted_kinds(config, clients)
    needed = min(settings.min_actors or len(kinds), len(kinds))
    nodes = list(alive_nodes().values())
    if needed == len(kinds):
        for what, shares in (
            ("CPU", [kind.cpus for kind in kinds]),
            ("GPU", [kind.gpus for kind in kinds if kind.gpus]),
        ):
            has = sum(node.get(what, 0.0) for node in nodes)
            if sum(shares) > has + 1e-6:
                raise ResourcesError(
                    f"{len(shares)} client actors with {shares[0]:g} {what} each need {sum(shares):g} {what}, the cluster has "
                    f"{has:g}; lower ray.actors or ray.{what.lower()}s, or set ray.autoscale=true if the cluster grows by itself"
                )
    fitting = room(nodes, kinds)
    if fitting < needed:
        raise ResourcesError(
            f"{needed} client actors have to be there, the nodes have room for {fitting}: wanted are {wanted_text(kinds)}, there "
            f"are {nodes_text(nodes)}, and an actor's share must be of one node and one GPU; lower ray.cpus, ray.gpus, ray.actors "
            f"or ray.min_actors, or set ray.autoscale=true if the cluster grows by itself"
        )
