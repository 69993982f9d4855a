"""The nodes of a cluster: nodes for client actors, and messages about joining and leaving nodes."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from raydfl.cluster.faults import explain_end
from raydfl.cluster.resources import (
    ActorKind,
    count_fitting,
    format_kinds,
    format_nodes,
    list_addresses,
    list_alive_nodes,
)
from raydfl.cluster.run_files import BlindNodeError, RunFiles
from raydfl.core.errors import RaydflError

logger = logging.getLogger(__name__)


class SuitableNodes:
    """The suitable nodes for the client actors of a run, and the location of the run's files.

    Args:
        files: Location of the run's files.
        run_dir: Folder of the run on the server's node.
    """

    def __init__(self, files: RunFiles, run_dir: Path) -> None:
        self.files = files
        self.excluded: dict[str, str] = {}
        """Reasons for unsuitable nodes, by node id."""
        self._run_dir = run_dir

    def allow_retry(self, node: str, error: RaydflError) -> bool:
        """Return whether another actor may start after an actor failed to open the run on its node.

        Upload the run's files for the first node without a copy. Exclude a node with a further problem, such as an old version of
        raydfl, if it joined after the start of the run. The error of a node of the start ends the run.

        Args:
            node: Id of the actor's node.
            error: Reason of the failure.

        Raises:
            ResourcesError: The run's files cannot be uploaded.
        """
        if isinstance(error, BlindNodeError) and self.files.store:
            self.files = self.files.upload(self._run_dir)
            return True
        if node in self.files.nodes or node in self.excluded:
            return False
        self._exclude([node], str(error))
        return True

    def exclude_without_raydfl(self, error: Exception, used: Collection[str]) -> bool:
        """Exclude the node of an actor that failed in its first imports; return whether the node joined after the start of the run.

        Ray's error has the address of the node and no id. Nodes with the same address are excluded too.

        Args:
            error: Ray's error of the actor.
            used: Ids of the nodes with running actors.
        """
        kept = {*self.files.nodes, *self.excluded, *used}
        addresses = set(re.findall(r"ip=([^,)]+)", str(error)))
        failed = [node for node, address in list_addresses().items() if address in addresses and node not in kept]
        self._exclude(failed, f"a client actor failed to start: {explain_end(error)}")
        return bool(failed)

    def _exclude(self, nodes: Sequence[str], reason: str) -> None:
        self.excluded.update(dict.fromkeys(nodes, reason))
        if nodes:
            logger.warning("A new node is not used: %s", reason)


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
