"""Resources of a run and of the cluster: placement groups, checks and messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray

from raydfl.core.errors import ResourcesError
from raydfl.engine import Config, RaySettings

Bundle = dict[str, float]
"""Amounts of Ray resources (``CPU``, ``GPU``) by name."""


@dataclass(frozen=True, slots=True)
class ActorKind:
    """The reserved resources of a client actor."""

    cpus: float
    gpus: float
    """Share of a GPU; 0: train on the CPU."""

    def __str__(self) -> str:
        return _text({"CPU": self.cpus, "GPU": self.gpus})


def actor_kinds(settings: RaySettings, clients: int) -> list[ActorKind]:
    """Return the kind of each client actor of a place. Actors with a share of a GPU are first.

    Args:
        settings: Number of actors and their resources.
        clients: Number of clients, for ``actors: per_client``.
    """
    number = clients if settings.actors == "per_client" else int(settings.actors)
    with_gpu, without = ActorKind(settings.cpus, settings.gpu_share), ActorKind(settings.cpus, 0.0)
    return [with_gpu] * number + [without] * settings.cpu_actors


def run_actor_kinds(config: Config, clients: int) -> list[ActorKind]:
    """Return the kinds of all client actors of a run at all its sites.

    Args:
        config: Configuration of the run.
        clients: Number of clients, for ``actors: per_client``.
    """
    per_site = config.ray.actors != "per_client"
    return actor_kinds(config.ray, clients) * (max(1, len(config.data.sites)) if per_site else 1)


def make_bundles(config: Config, cpus: float, clients: int) -> list[Bundle]:
    """Make the bundles of a trial's placement group: its own process with the server, then one per client actor.

    Args:
        config: Configuration of the trial.
        cpus: CPUs of the trial's own process.
        clients: Number of clients, for ``ray.actors: per_client``.
    """
    if config.data.sites:  # The actors run on the sites' nodes, outside the placement group.
        return [{"CPU": cpus}]
    kinds = [ActorKind(cpus, 0.0), *actor_kinds(config.ray, clients)]
    # Ray rejects empty bundles. An actor without resources fits into any bundle.
    bundles = [{"CPU": kind.cpus, "GPU": kind.gpus} for kind in kinds if kind.cpus or kind.gpus]
    return [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]


def list_alive_nodes() -> dict[str, Mapping[str, float]]:
    """Return the total resources of each live node by node id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


_EXACT = 1e-6
"""Tolerance for rounding errors. Ray rounds resources to four decimals."""


def count_fitting(nodes: Iterable[Mapping[str, float]], kinds: Sequence[ActorKind]) -> int:
    """Count the actors that fit on otherwise unused nodes, placing the largest actors first.

    Args:
        nodes: Total ``CPU`` and ``GPU`` of each node.
        kinds: Kinds of the actors. All nonzero shares of a GPU are equal.
    """
    free = [[node.get("CPU", 0.0), node.get("GPU", 0.0)] for node in nodes]
    placed = 0
    for kind, number in sorted(Counter(kinds).items(), key=lambda item: (item[0].gpus, item[0].cpus), reverse=True):
        left = number
        for node in free:
            fitting = int(min(left, _count_times(node[0], kind.cpus), _fit_devices(node[1], kind.gpus)))
            node[0] -= fitting * kind.cpus
            left -= fitting
        placed += number - left
    return placed


def _count_times(available: float, share: float) -> float:
    return math.inf if share == 0 else (available + _EXACT) // share


def _fit_devices(available: float, share: float) -> float:
    """Return how often a share of GPUs fits. A share below 1 must be on a single device."""
    return _count_times(available, share) if share >= 1 or share == 0 else int(available) * ((1 + _EXACT) // share)


def format_kinds(kinds: Sequence[ActorKind]) -> str:
    """Format the resources of client actors for messages.

    >>> format_kinds([ActorKind(1, 0.5), ActorKind(1, 0.5), ActorKind(1, 0)])
    '2 with 1 CPU and 0.5 GPU each, 1 with 1 CPU each'
    """
    counts = Counter(str(kind) for kind in kinds)
    return ", ".join(f"{number} with {kind} each" for kind, number in counts.items())


def format_nodes(nodes: Sequence[Mapping[str, float]]) -> str:
    """Format the number of nodes and their total resources for messages.

    >>> format_nodes([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}])
    '2 nodes with 6 CPU and 1 GPU'
    """
    cpus, gpus = (sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
    return f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with {cpus:g} CPU and {gpus:g} GPU"


def format_free_resources() -> str:
    """Format the free CPUs and GPUs of the cluster for messages."""
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU"


def check_resources(config: Config, clients: int, grows: bool) -> None:
    """Reject a configuration with more actors than the cluster can hold.

    Args:
        config: Number of actors, the minimum number, and their resources.
        clients: Number of clients, for ``actors: per_client``.
        grows: Whether the cluster may grow. If so, nothing is rejected.

    Raises:
        ResourcesError: The nodes have no room for the minimum number of actors.
    """
    if grows:
        return
    settings = config.ray
    kinds = run_actor_kinds(config, clients)
    needed = min(settings.min_actors or len(kinds), len(kinds))
    nodes = list(list_alive_nodes().values())
    if needed == len(kinds):
        for resource, shares in (
            ("CPU", [kind.cpus for kind in kinds]),
            ("GPU", [kind.gpus for kind in kinds if kind.gpus]),
        ):
            has = sum(node.get(resource, 0.0) for node in nodes)
            if sum(shares) > has + _EXACT:
                raise ResourcesError(
                    f"{len(shares)} client actors with {shares[0]:g} {resource} each need {sum(shares):g} {resource}, but the "
                    f"cluster has {has:g}. Lower ray.actors or ray.{resource.lower()}s, or set ray.autoscale=true if the cluster "
                    f"can grow."
                )
    fitting = count_fitting(nodes, kinds)
    if fitting < needed:
        raise ResourcesError(
            f"the run needs {needed} client actors, but the nodes have room for {fitting}. Requested: {format_kinds(kinds)}. "
            f"Available: {format_nodes(nodes)}. An actor's share must fit on a single node and GPU. Lower ray.cpus, ray.gpus, "
            f"ray.actors or ray.min_actors, or set ray.autoscale=true if the cluster can grow."
        )


def check_trial_fits(bundles: Sequence[Bundle], autoscale: bool) -> None:
    """Reject a trial without room on the empty cluster, unless ``ray.autoscale`` lets the cluster grow.

    Raises:
        ResourcesError: The nodes have no room for the trial's placement group.
    """
    if autoscale:
        return
    nodes = list_alive_nodes().values()
    if count_fitting(nodes, _to_kinds(bundles)) == len(bundles):
        return
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    actors = len(bundles) - 1
    raise ResourcesError(
        f"a trial needs {_text(_total(bundles))} (its own process{f' and {actors} client actors' if actors else ''}), but the "
        f"cluster has {_text(total)} on {len(nodes)} node{'s' if len(nodes) != 1 else ''}, {_text(free)} of it free. Lower "
        f"ray.actors (in a sweep: cells.actors; 0 trains clients in the trial's own process), ray.cpus, ray.gpus or cpus, or set "
        f"ray.autoscale=true if the cluster can grow."
    )


def count_parallel(bundles: Sequence[Bundle], most: int) -> int:
    """Count the parallel trials with the given bundles on the cluster, from 1 to ``most``."""
    nodes, kinds = list_alive_nodes().values(), _to_kinds(bundles)
    return next((count for count in range(most, 1, -1) if count_fitting(nodes, kinds * count) == len(kinds) * count), 1)


def _to_kinds(bundles: Sequence[Bundle]) -> list[ActorKind]:
    return [ActorKind(bundle.get("CPU", 0.0), bundle.get("GPU", 0.0)) for bundle in bundles]


def list_placement_groups() -> set[str]:
    """List the ids of all placement groups of the cluster, including removed groups."""
    return set(ray.util.placement_group_table())


def is_granted(bundles: Sequence[Bundle], before: set[str]) -> bool:
    """Return whether a new placement group with the given bundles has its resources.

    Args:
        bundles: Bundles of the placement group.
        before: Ids of older placement groups.
    """
    table = ray.util.placement_group_table()
    return any(
        key not in before and group["state"] == "CREATED" and list(group["bundles"].values()) == list(bundles)
        for key, group in table.items()
    )


def format_shortage(bundles: Sequence[Bundle]) -> str:
    """Format a trial's resources and the free resources of the cluster for messages."""
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return f"a trial needs {_text(_total(bundles))}, and {_text(free)} of the cluster's {_text(total)} are free"


def _total(bundles: Sequence[Bundle]) -> Bundle:
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}


def _text(resources: Mapping[str, float]) -> str:
    gpus = resources.get("GPU", 0.0)
    return f"{resources.get('CPU', 0.0):g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
