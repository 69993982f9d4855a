"""Resources of a run and of the cluster: placement groups, checks and messages."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from raydfl.core.errors import ConfigError, ResourcesError
from raydfl.engine import Config, RaySettings

Bundle = dict[str, float]
"""Amounts of Ray resources (``CPU``, ``GPU``, ``memory`` in bytes) by name."""


@dataclass(frozen=True, slots=True)
class ActorKind:
    """The reserved resources of a client actor."""

    cpus: float
    gpus: float
    """Share of a GPU; 0: train on the CPU."""
    memory: int = 0
    """Bytes of memory; 0: no reservation."""
    custom: tuple[tuple[str, float], ...] = ()
    """Names and amounts of custom resources."""

    @property
    def bundle(self) -> Bundle:
        """The nonzero amounts of Ray resources."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory), **dict(self.custom)}
        return {name: amount for name, amount in amounts.items() if amount}

    def __str__(self) -> str:
        return _text(self.bundle)


def actor_kinds(settings: RaySettings, clients: int) -> list[ActorKind]:
    """Return the kind of each client actor of a place. Actors with a share of a GPU are first.

    Args:
        settings: Number of actors and their resources.
        clients: Number of clients, for ``actors: per_client``.
    """
    number = clients if settings.actors == "per_client" else int(settings.actors)
    custom, model = tuple(settings.options.resources.items()), settings.options.accelerator_type
    without = ActorKind(settings.cpus, 0.0, settings.memory_bytes, custom)
    if model is not None:  # Ray's form of its option accelerator_type, which bundles of placement groups need.
        custom += ((f"accelerator_type:{model}", 0.001),)
    with_gpu = replace(without, gpus=settings.gpu_share, custom=custom)
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

    Raises:
        ConfigError: The memory of a client actor is not known yet.
    """
    if config.data.sites:  # The actors run on the sites' nodes, outside the placement group.
        return [{"CPU": cpus}]
    if config.ray.memory == "auto":
        raise ConfigError(
            "ray.memory: auto is measured by a single run, but the resources of a trial are reserved before it starts. Set a size "
            "such as 2 GiB."
        )
    if config.ray.options.label_selector:
        raise ConfigError(
            "ray.options.label_selector is not supported in trials, because a trial's resources are reserved without labels. Set "
            "ray.options.resources, a custom resource of the nodes."
        )
    kinds = [ActorKind(cpus, 0.0), *actor_kinds(config.ray, clients)]
    # Ray rejects empty bundles. An actor without resources fits into any bundle.
    return [kind.bundle for kind in kinds if kind.bundle]


def list_alive_nodes(selector: Mapping[str, str] | None = None) -> dict[str, Mapping[str, float]]:
    """Return the total resources of each live node by node id.

    Args:
        selector: Labels of the nodes, in the form of Ray's option ``label_selector``. ``None``: all nodes.
    """
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {
        node["NodeID"]: node["Resources"]
        for node in nodes
        if node["Alive"] and match_labels(node.get("Labels") or {}, selector or {})
    }


def list_addresses() -> dict[str, str]:
    """Return the IP address of each live node by node id."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def match_labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether a node's labels satisfy a label selector of Ray.

    >>> match_labels({"zone": "a"}, {"zone": "in(a, b)"})
    True
    >>> match_labels({"zone": "a"}, {"zone": "!a"})
    False
    """
    for key, condition in selector.items():
        value = condition.strip().removeprefix("!").strip()
        group = re.fullmatch(r"in\s*\((.*)\)", value)
        values = [value] if group is None else [text.strip() for text in group[1].split(",")]
        if (labels.get(key) in values) == condition.strip().startswith("!"):
            return False
    return True


_EXACT = 1e-6
"""Tolerance for rounding errors. Ray rounds resources to four decimals."""


def count_fitting(nodes: Iterable[Mapping[str, float]], kinds: Sequence[ActorKind]) -> int:
    """Count the actors that fit on otherwise unused nodes, placing the largest actors first.

    Args:
        nodes: Total resources of each node.
        kinds: Kinds of the actors. All nonzero shares of a GPU are equal.
    """
    free = [dict(node) for node in nodes]
    placed = 0
    by_size = sorted(Counter(kinds).items(), key=lambda item: (item[0].gpus, item[0].cpus), reverse=True)
    for kind, number in by_size:
        left, shares = number, kind.bundle
        devices = shares.pop("GPU", 0.0)
        for node in free:
            times = [_count_times(node.get(name, 0.0), share) for name, share in shares.items()]
            fitting = int(min(left, _fit_devices(node.get("GPU", 0.0), devices), *times))
            for name, share in shares.items():
                node[name] = node.get(name, 0.0) - fitting * share
            left -= fitting
        placed += number - left
    return placed


def _count_times(available: float, share: float) -> float:
    return math.inf if share == 0 else (available + _EXACT) // share


def _fit_devices(available: float, share: float) -> float:
    """Return how often a share of GPUs fits. A share below 1 must be on a single device."""
    return _count_times(available, share) if share >= 1 or share == 0 else int(available) * ((1 + _EXACT) // share)


def format_gib(number_of_bytes: float) -> str:
    """Format a number of bytes in GiB.

    >>> format_gib(3 << 29)
    '1.50 GiB'
    """
    return f"{number_of_bytes / 2**30:.2f} GiB"


def _format_amount(name: str, amount: float) -> str:
    """Format an amount of a resource without the resource's name."""
    return format_gib(amount) if name == "memory" else f"{amount:g}"


def _list_resources(kinds: Iterable[ActorKind]) -> list[str]:
    """List the resources of client actors, with CPUs and GPUs first."""
    return list(dict.fromkeys(["CPU", "GPU", *(name for kind in kinds for name in kind.bundle)]))


def format_kinds(kinds: Sequence[ActorKind]) -> str:
    """Format the resources of client actors for messages.

    >>> format_kinds([ActorKind(1, 0.5), ActorKind(1, 0.5), ActorKind(1, 0)])
    '2 with 1 CPU and 0.5 GPU each, 1 with 1 CPU each'
    """
    counts = Counter(str(kind) for kind in kinds)
    return ", ".join(f"{number} with {kind} each" for kind, number in counts.items())


def format_nodes(nodes: Sequence[Mapping[str, float]], kinds: Iterable[ActorKind] = ()) -> str:
    """Format the number of nodes and their total resources for messages.

    Args:
        nodes: Total resources of each node.
        kinds: Actors whose resources are included in addition to CPUs and GPUs.

    >>> format_nodes([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}])
    '2 nodes with 6 CPU and 1 GPU'
    >>> format_nodes([{"CPU": 4.0, "memory": 2.0**30}], [ActorKind(1, 0, 1 << 29)])
    '1 node with 4 CPU, 0 GPU and 1.00 GiB memory'
    """
    totals = _join(_format_totals(_add_up(nodes, _list_resources(kinds))))
    return f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with {totals}"


def format_free_resources(kinds: Iterable[ActorKind] = ()) -> str:
    """Format the free CPUs and GPUs of the cluster, and further resources of some actors, for messages."""
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return ", ".join(_format_totals(_add_up([free], _list_resources(kinds))))


def _format_totals(totals: Mapping[str, float]) -> list[str]:
    return [f"{_format_amount(name, amount)} {name}" for name, amount in totals.items()]


_SETTINGS = {"CPU": "ray.cpus", "GPU": "ray.gpus", "memory": "ray.memory"}
"""Setting of each resource."""


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
    selector = settings.options.label_selector
    nodes = list(list_alive_nodes(selector).values())
    if not nodes:
        raise ResourcesError(f"no node of the cluster has the labels of ray.options.label_selector: {selector}.")
    if needed == len(kinds):
        for name in _list_resources(kinds):
            shares = [kind.bundle[name] for kind in kinds if name in kind.bundle]
            has = sum(node.get(name, 0.0) for node in nodes)
            if sum(shares) > has + _EXACT:
                each, all_, limit = (_format_amount(name, amount) for amount in (shares[0], sum(shares), has))
                raise ResourcesError(
                    f"{len(shares)} client actors with {each} {name} each need {all_} {name}, but the cluster has {limit}. Lower "
                    f"ray.actors or {_SETTINGS.get(name, 'ray.options')}, or set ray.autoscale=true if the cluster can grow."
                )
    fitting = count_fitting(nodes, kinds)
    if fitting < needed:
        raise ResourcesError(
            f"the run needs {needed} client actors, but the nodes have room for {fitting}. Requested: {format_kinds(kinds)}. "
            f"Available: {format_nodes(nodes, kinds)}. An actor's share must fit on a single node and GPU. Lower ray.cpus, "
            f"ray.gpus, {'ray.memory, ' if settings.memory else ''}ray.actors or ray.min_actors, or set ray.autoscale=true if the "
            f"cluster can grow."
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
    needed, free, total = _compare(bundles)
    actors = len(bundles) - 1
    raise ResourcesError(
        f"a trial needs {needed} (its own process{f' and {actors} client actors' if actors else ''}), but the "
        f"cluster has {total} on {len(nodes)} node{'s' if len(nodes) != 1 else ''}, {free} of it free. Lower "
        f"ray.actors (in a sweep: cells.actors; 0 trains clients in the trial's own process), ray.cpus, ray.gpus or cpus, or set "
        f"ray.autoscale=true if the cluster can grow."
    )


def count_parallel(bundles: Sequence[Bundle], most: int) -> int:
    """Count the parallel trials with the given bundles on the cluster, from 1 to ``most``."""
    nodes, kinds = list_alive_nodes().values(), _to_kinds(bundles)
    return next((count for count in range(most, 1, -1) if count_fitting(nodes, kinds * count) == len(kinds) * count), 1)


def _to_kinds(bundles: Sequence[Bundle]) -> list[ActorKind]:
    kinds = []
    for bundle in bundles:
        custom = tuple((name, amount) for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory"))
        kinds.append(ActorKind(bundle.get("CPU", 0.0), bundle.get("GPU", 0.0), int(bundle.get("memory", 0)), custom))
    return kinds


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
    needed, free, total = _compare(bundles)
    return f"a trial needs {needed}, and {free} of the cluster's {total} are free"


def find_shortage(kinds: Sequence[ActorKind]) -> str:
    """Describe the resources of some actors that are in use, for messages; empty if the free resources suffice.

    The result has the form "2 CPU: 4 of 4 CPU are".
    """
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    needed = _add_up([kind.bundle for kind in kinds], _list_resources(kinds))
    short = {name: amount for name, amount in needed.items() if amount > free.get(name, 0.0) + _EXACT}
    used = [
        f"{_format_amount(name, total.get(name, 0.0) - free.get(name, 0.0))} of {_format_amount(name, total.get(name, 0.0))} {name}"
        for name in short
    ]
    return f"{_join(_format_totals(short))}: {_join(used)} are" if short else ""


def _compare(bundles: Sequence[Bundle]) -> list[str]:
    """Format the sum of some bundles, and the free and the total amounts of the same resources in the cluster."""
    names = _list_resources(_to_kinds(bundles))
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return [_text(_add_up(amounts, names)) for amounts in (bundles, [free], [total])]


def _add_up(bundles: Sequence[Mapping[str, float]], names: Iterable[str]) -> Bundle:
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _text(resources: Mapping[str, float]) -> str:
    """Format the CPUs and the nonzero amounts of further resources."""
    return _join(_format_totals({name: x for name, x in ({"CPU": 0.0} | {**resources}).items() if x or name == "CPU"}))


def _join(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
