"""What a run needs, and whether it fits the cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from raydfl.core.errors import ResourcesError
from raydfl.engine import Config, RaySettings


@dataclass(frozen=True, slots=True)
class ActorKind:
    """What Ray reserves for a client actor."""

    cpus: float
    gpus: float
    """Share of a GPU; 0: it computes on the CPU."""
    site: str = ""
    """The site whose clients alone it serves, on whose node it is; empty: wherever there is room."""

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU and {self.gpus:g} GPU" if self.gpus else f"{self.cpus:g} CPU"


def actor_kinds(settings: RaySettings, clients: int, sites: Sequence[str] = ("",)) -> list[ActorKind]:
    """The kind of every client actor that the settings ask for, at each site those with a GPU first.

    Args:
        settings: as configured.
        clients: of the population; with ``actors: per_client`` each has one.
        sites: names of the sites, each of which has all the actors; the one without a name: there are none.
    """
    number = clients if settings.actors == "per_client" else int(settings.actors)
    return [
        kind
        for site in sites
        for kind in (
            *[ActorKind(settings.cpus, settings.gpu_share, site)] * number,
            *[ActorKind(settings.cpus, 0.0, site)] * settings.cpu_actors,
        )
    ]


def wanted_kinds(config: Config, clients: int) -> list[ActorKind]:
    """The kinds of all client actors of a run, at all its sites.

    Args:
        config: of the run.
        clients: of the population.
    """
    sites = [] if config.ray.actors == "per_client" else list(config.data.sites)
    return actor_kinds(config.ray, clients, sites or [""])


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
