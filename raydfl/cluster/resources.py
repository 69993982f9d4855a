"""Resources of a run: what its processes need, and whether the cluster has it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray

from raydfl.core.errors import ResourcesError
from raydfl.engine import Config, RaySettings

Bundle = dict[str, float]
"""Resources by Ray's names, of a node or wanted of one: ``CPU``, ``GPU``."""


@dataclass(frozen=True, slots=True)
class ActorKind:
    """The resources that Ray reserves for a client actor."""

    cpus: float
    gpus: float
    """Share of a GPU; 0: it computes on the CPU."""

    def __str__(self) -> str:
        return _text({"CPU": self.cpus, "GPU": self.gpus})


def actor_kinds(settings: RaySettings, clients: int) -> list[ActorKind]:
    """Return the kind of every client actor that the settings ask for, at one site; those with a GPU first.

    Args:
        settings: as configured.
        clients: of the population; with ``actors: per_client`` each has one.
    """
    number = clients if settings.actors == "per_client" else int(settings.actors)
    with_gpu, without = ActorKind(settings.cpus, settings.gpu_share), ActorKind(settings.cpus, 0.0)
    return [with_gpu] * number + [without] * settings.cpu_actors


def wanted_kinds(config: Config, clients: int) -> list[ActorKind]:
    """Return the kinds of all client actors of a run, at all its sites.

    Args:
        config: of the run.
        clients: of the population.
    """
    each_site = config.ray.actors != "per_client"
    return actor_kinds(config.ray, clients) * (max(1, len(config.data.sites)) if each_site else 1)


def bundles_of(config: Config, cpus: float, clients: int) -> list[Bundle]:
    """Return a trial's placement group: its own process with the server, then a bundle for each client actor.

    Args:
        config: of the trial.
        cpus: of the trial's own process.
        clients: of the population, for ``ray.actors: per_client``.
    """
    if config.data.sites:  # the actors are on the sites' nodes, which no placement group keeps
        return [{"CPU": cpus}]
    kinds = [ActorKind(cpus, 0.0), *actor_kinds(config.ray, clients)]
    # Ray refuses bundles of nothing; an actor that asks for nothing finds room in any.
    wanted = [{"CPU": kind.cpus, "GPU": kind.gpus} for kind in kinds if kind.cpus or kind.gpus]
    return [{name: amount for name, amount in bundle.items() if amount} for bundle in wanted]


def alive_nodes() -> dict[str, Mapping[str, float]]:
    """Return what each node that is alive has in all, by the node's id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


_EXACT = 1e-6
"""Ray's resources are floats with four decimals."""


def room(nodes: Iterable[Mapping[str, float]], kinds: Sequence[ActorKind]) -> int:
    """Return how many of these actors the nodes can hold at once, the largest first, when nobody else uses them.

    Args:
        nodes: what each node has in all: ``CPU``, ``GPU``.
        kinds: of the actors wanted; some may be without a share of a GPU, all others have the same.
    """
    free = [[node.get("CPU", 0.0), node.get("GPU", 0.0)] for node in nodes]
    placed = 0
    for kind, number in sorted(Counter(kinds).items(), key=lambda item: (item[0].gpus, item[0].cpus), reverse=True):
        left = number
        for node in free:
            fitting = int(min(left, _times(node[0], kind.cpus), _on_devices(node[1], kind.gpus)))
            node[0] -= fitting * kind.cpus
            left -= fitting
        placed += number - left
    return placed


def _times(has: float, each: float) -> float:
    return math.inf if each == 0 else (has + _EXACT) // each


def _on_devices(has: float, each: float) -> float:
    """Return how often a share fits; one of less than 1 is of one device."""
    return _times(has, each) if each >= 1 or each == 0 else int(has) * ((1 + _EXACT) // each)


def wanted_text(kinds: Sequence[ActorKind]) -> str:
    """Return what client actors need, for messages.

    >>> wanted_text([ActorKind(1, 0.5), ActorKind(1, 0.5), ActorKind(1, 0)])
    '2 with 1 CPU and 0.5 GPU each, 1 with 1 CPU each'
    """
    counts = Counter(str(kind) for kind in kinds)
    return ", ".join(f"{number} with {kind} each" for kind, number in counts.items())


def nodes_text(nodes: Sequence[Mapping[str, float]]) -> str:
    """Return how many nodes there are and what they have together, for messages.

    >>> nodes_text([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}])
    '2 nodes with 6 CPU and 1 GPU'
    """
    cpus, gpus = (sum(node.get(what, 0.0) for node in nodes) for what in ("CPU", "GPU"))
    return f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with {cpus:g} CPU and {gpus:g} GPU"


def free_resources() -> str:
    """Return the free CPUs and GPUs of the cluster, for messages."""
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
            if sum(shares) > has + _EXACT:
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


def check_trial_fits(bundles: Sequence[Bundle], autoscale: bool) -> None:
    """Refuse what the cluster can never hold, even with nothing else in it; all of it is there with ``ray.autoscale``, in time.

    Raises:
        ResourcesError: with what is needed, what is there and what is free.
    """
    if autoscale:
        return
    nodes = alive_nodes().values()
    if room(nodes, _kinds_of(bundles)) == len(bundles):
        return
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    actors = len(bundles) - 1
    raise ResourcesError(
        f"a trial needs {_text(_total(bundles))} (its own process{f' and {actors} client actors' if actors else ''}), the cluster "
        f"has {_text(there)} on {len(nodes)} node{'s' if len(nodes) != 1 else ''}, of which {_text(free)} are free; lower "
        f"ray.actors, in a sweep cells.actors (0: a trial's clients train in its own process), ray.cpus, ray.gpus or cpus, or "
        f"set ray.autoscale=true if the cluster grows by itself"
    )


def room_for(bundles: Sequence[Bundle], most: int) -> int:
    """Return how many trials with such bundles the cluster holds at a time, ``most`` at most, at least one."""
    nodes, kinds = alive_nodes().values(), _kinds_of(bundles)
    return next((count for count in range(most, 1, -1) if room(nodes, kinds * count) == len(kinds) * count), 1)


def _kinds_of(bundles: Sequence[Bundle]) -> list[ActorKind]:
    return [ActorKind(each.get("CPU", 0.0), each.get("GPU", 0.0)) for each in bundles]


def placement_groups() -> set[str]:
    """Return the ids of all placement groups of the cluster, past ones among them."""
    return set(ray.util.placement_group_table())


def granted(bundles: Sequence[Bundle], before: set[str]) -> bool:
    """Return whether a placement group of these bundles, which was not there ``before``, has its resources."""
    table = ray.util.placement_group_table()
    return any(
        key not in before and group["state"] == "CREATED" and list(group["bundles"].values()) == list(bundles)
        for key, group in table.items()
    )


def waiting_text(bundles: Sequence[Bundle]) -> str:
    """Return what a trial needs and what is free now, for messages."""
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return f"a trial needs {_text(_total(bundles))}; the cluster has {_text(there)}, free are {_text(free)}"


def _total(bundles: Sequence[Bundle]) -> Bundle:
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}


def _text(resources: Mapping[str, float]) -> str:
    gpus = resources.get("GPU", 0.0)
    return f"{resources.get('CPU', 0.0):g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
