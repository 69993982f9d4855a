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
    """
    settings = config.ray
    depends = config.data.sites or settings.options.label_selector or settings.actors == "per_client"
    if not settings.queue or depends or get_current_placement_group() is not None:
        return None
    if not all(kind.bundle for kind in kinds) or count_fitting(list_alive_nodes().values(), kinds) < len(kinds):
        return None
    until = time.monotonic() + _ENDING
    while shortage := find_shortage(kinds):
        if time.monotonic() >= until:
            return _reserve(kinds, shortage, tell)
        time.sleep(_LOOK)
    return None


def _reserve(kinds: Sequence[ActorKind], shortage: str, tell: Callable[[str], None]) -> PlacementGroup:
    """Wait for a placement group without a time limit."""
    tell(f"Waiting for {shortage} used by other actors. Set ray.queue=false to stop instead.")
    group: PlacementGroup = placement_group([kind.bundle for kind in kinds], strategy="PACK")
    try:
        while not group.wait(_WAIT):
            pass
    except BaseException:
        remove_placement_group(group)
        raise
    return group
