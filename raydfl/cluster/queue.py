"""The queue of a busy cluster: a run waits until its client actors have their resources, and holds none of them before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)

from raydfl.cluster.resources import ActorKind, count_fitting, find_shortage, list_alive_nodes
from raydfl.core.errors import ResourcesError
from raydfl.engine import Config

_ENDING = 5.0
"""Seconds until a shortage counts. Actors of an earlier run may still be ending."""
_LOOK = 0.5
"""Seconds between two checks for free resources."""
_WAIT = 5.0
"""Maximum seconds of a single wait for the placement group, so that Ctrl-C has an effect."""


def queue_actors(config: Config, kinds: Sequence[ActorKind], tell: Callable[[str], None]) -> PlacementGroup | None:
    """Wait for the resources of a run's client actors, if actors of other runs use them.

    The resources are reserved all at once. Two runs that wait for each other could otherwise hold a part of them forever.

    Args:
        config: Configuration of the run.
        kinds: Kinds of the actors that the first round needs.
        tell: Shows the message about the wait.

    Returns:
        The placement group of the actors, with a bundle for each. ``None`` if no wait is necessary or possible: the resources are
        free, the cluster must grow first, or the actors depend on sites, labels or a trial's placement group.

    Raises:
        ResourcesError: Nodes left during the wait, and the cluster was too small for ``ray.ready_timeout`` seconds.
    """
    settings = config.ray
    depends = config.data.sites or settings.options.label_selector or settings.actors == "per_client"
    if not settings.queue or depends or get_current_placement_group() is not None:
        return None
    shortage = find_lasting_shortage(kinds)
    return _reserve(config, kinds, shortage, tell) if shortage else None


def find_lasting_shortage(kinds: Sequence[ActorKind]) -> str:
    """Describe the resources of some actors that other actors use, as :func:`find_shortage` does.

    Returns:
        Empty if the resources are free within some seconds, or if the cluster must grow first.
    """
    if not all(kind.bundle for kind in kinds) or count_fitting(list_alive_nodes().values(), kinds) < len(kinds):
        return ""
    until = time.monotonic() + _ENDING
    while shortage := find_shortage(kinds):
        if time.monotonic() >= until:
            return shortage
        time.sleep(_LOOK)
    return ""


def _reserve(config: Config, kinds: Sequence[ActorKind], shortage: str, tell: Callable[[str], None]) -> PlacementGroup:
    """Wait for a placement group without a time limit, while the cluster's nodes can hold it."""
    tell(f"Waiting for {shortage} used by other actors. Set ray.queue=false to stop instead.")
    group: PlacementGroup = placement_group([kind.bundle for kind in kinds], strategy="PACK")
    patience = config.ray.ready_timeout
    fitted = time.monotonic()
    try:
        while not group.wait(_WAIT):
            fitting = count_fitting(list_alive_nodes().values(), kinds)
            if fitting == len(kinds) or config.ray.autoscale:
                fitted = time.monotonic()
            elif time.monotonic() - fitted > patience:
                raise ResourcesError(
                    f"nodes left while the run waited for {len(kinds)} client actors. For {patience:g} s the other nodes have had "
                    f"room for {fitting}. Add nodes, or lower ray.actors."
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group
