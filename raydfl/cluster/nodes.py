"""The nodes of a cluster: which there are, how many client actors they have room for, and a line when one joins or leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from raydfl.cluster.resources import ActorKind, alive_nodes, nodes_text, room, wanted_text


class NodeWatch:
    """A watch over the cluster's nodes: it says when a run waits for some, and when they join or leave."""

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
