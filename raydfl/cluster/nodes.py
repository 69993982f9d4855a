"""The nodes of a cluster: messages about joining and leaving nodes, and about a wait for the autoscaler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from raydfl.cluster.resources import ActorKind, count_fitting, format_kinds, format_nodes, list_alive_nodes


class NodeWatch:
    """A watch over the cluster's nodes with messages about changes."""

    def __init__(
        self,
        kinds: Sequence[ActorKind],
        needed: int,
        tell: Callable[[str], None],
        look: Callable[[], Mapping[str, Mapping[str, float]]] = list_alive_nodes,
        every: float = 1.0,
    ) -> None:
        """Read the current nodes.

        Args:
            kinds: Kinds of all client actors of the run.
            needed: Number of client actors that rounds need.
            tell: Shows a message.
            look: Returns the resources of all live nodes by node id.
            every: Seconds between two updates.
        """
        self._kinds, self._needed, self._tell, self._look, self._every = kinds, needed, tell, look, every
        self._looked = time.monotonic()
        self._nodes: Mapping[str, Mapping[str, float]] = look()

    def announce_wait(self, seconds: float) -> None:
        """Report a wait for the autoscaler, if the nodes have no room for the needed actors.

        Args:
            seconds: Time limit of the wait.
        """
        nodes = list(self._nodes.values())
        fitting = count_fitting(nodes, self._kinds)
        if fitting < self._needed:
            self._tell(
                f"Waiting for the autoscaler: room for {fitting} of {self._needed} client actors. The run needs "
                f"{format_kinds(self._kinds)}, the cluster has {format_nodes(nodes, self._kinds)}. The wait ends after "
                f"{seconds:g} s."
            )

    def report_changes(self) -> None:
        """Report joined and lost nodes, at most once per interval."""
        if time.monotonic() < self._looked + self._every:
            return
        self._looked = time.monotonic()
        now = self._look()
        joined, left = len(now.keys() - self._nodes.keys()), len(self._nodes.keys() - now.keys())
        self._nodes = now
        if joined or left:
            parts = [f"{number} {word}" for number, word in ((joined, "joined"), (left, "left")) if number]
            nodes = list(now.values())
            self._tell(
                f"Nodes: {', '.join(parts)}. The cluster has {format_nodes(nodes, self._kinds)}, room for "
                f"{count_fitting(nodes, self._kinds)} of {len(self._kinds)} client actors."
            )
