"""What a trial takes of the cluster, and whether it is there: a search never waits for what cannot come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from raydfl.core.errors import ResourcesError
from raydfl.engine.config import Config

Bundle = dict[str, float]
_TINY = 1e-6


def bundles_of(config: Config, cpus: float, clients: int) -> list[Bundle]:
    """A trial's placement group: its own process with the server, then a bundle for each client actor.

    Args:
        cpus: of the trial's own process.
        clients: of the population, for ``ray.actors: per_client``.
    """
    settings = config.ray
    if config.data.sites:  # the actors are on the sites' nodes, which no placement group keeps
        return [{"CPU": cpus}]
    actors = clients if settings.actors == "per_client" else int(settings.actors)
    shares = [(settings.cpus, settings.gpu_share)] * actors + [(settings.cpus, 0.0)] * settings.cpu_actors
    wanted: list[Bundle] = [{"CPU": cpus}, *({"CPU": each, "GPU": gpus} for each, gpus in shares)]
    # Ray refuses bundles of nothing; an actor that asks for nothing finds room in any.
    return [bundle for bundle in ({k: v for k, v in item.items() if v > 0} for item in wanted) if bundle]


def check_trial_fits(bundles: Sequence[Bundle], autoscale: bool) -> None:
    """Refuse what the cluster can never hold, even with nothing else in it; all of it is there with ``ray.autoscale``, in time.

    Raises:
        ResourcesError: with what is needed, what is there and what is free.
    """
    if autoscale:
        return
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if fits(bundles, nodes):
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


def fits(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether the nodes have room for all bundles at once, the largest first, each where there is room."""
    left = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda item: (item.get("GPU", 0.0), item.get("CPU", 0.0)), reverse=True):
        place = next((node for node in left if all(node.get(k, 0.0) + _TINY >= v for k, v in bundle.items())), None)
        if place is None:
            return False
        for kind, amount in bundle.items():
            place[kind] -= amount
    return True


def room_for(bundles: Sequence[Bundle], most: int) -> int:
    """Return how many trials with such bundles the cluster holds at a time, ``most`` at most, at least one."""
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return next((count for count in range(most, 1, -1) if fits([*bundles] * count, nodes)), 1)


def placement_groups() -> set[str]:
    """The ids of all placement groups of the cluster, past ones among them."""
    return set(ray.util.placement_group_table())


def granted(bundles: Sequence[Bundle], before: set[str]) -> bool:
    """Whether a placement group of these bundles, which was not there ``before``, has its resources."""
    table = ray.util.placement_group_table()
    return any(
        key not in before and group["state"] == "CREATED" and list(group["bundles"].values()) == list(bundles)
        for key, group in table.items()
    )


def waiting_text(bundles: Sequence[Bundle]) -> str:
    """What a trial needs and what is free now."""
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return f"a trial needs {_text(_total(bundles))}; the cluster has {_text(there)}, free are {_text(free)}"


def _total(bundles: Sequence[Bundle]) -> Bundle:
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}


def _text(resources: Mapping[str, float]) -> str:
    gpus = resources.get("GPU", 0.0)
    return f"{resources.get('CPU', 0.0):g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
