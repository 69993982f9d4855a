"""Files of a run on the nodes of a cluster: in a folder that a node sees, or copied from a URI.

The driver writes a random token to the run's folder. A node sees the folder if it reads the same token there. With a URI as
``run.dir``, the remaining nodes copy the population and the features to their caches, once per node. The driver uploads the files
if a node needs a copy at the start, and the server if a later node does.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydfl.cluster.job import explain_blind_node
from raydfl.cluster.resources import list_alive_nodes, match_labels
from raydfl.core.errors import DataError, ResourcesError
from raydfl.core.files import write_durably
from raydfl.core.remote import below, is_uri
from raydfl.data import Population, fetch_population, upload_population
from raydfl.engine import Config

_MARK = ".seen-by-nodes"
_DATA = ".data"
"""Folder beside the runs of a URI, with the populations and features of all runs."""
_WAIT = 60.0
"""Seconds to wait for the answers of all nodes. A node without an answer is checked again when its actors start."""


class BlindNodeError(ResourcesError):
    """A node sees neither the run's folder nor a copy at a URI."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Location of the population and features of a run, for processes on any node."""

    token: str
    uri: str = ""
    """URI of the population; empty: all nodes see the run's folder."""
    store: str = ""
    """URI for a copy of the population; empty: ``run.dir`` is a path."""
    nodes: frozenset[str] = frozenset()
    """Ids of the nodes of the cluster at the start of the run."""

    def load_population(self, run_dir: Path, config: Config) -> Population:
        """Load the population from the run's folder, or copy it to this node.

        Raises:
            BlindNodeError: The node does not see the folder, and there is no URI.
            ResourcesError: The node's cache is full or cannot be written.
        """
        if _read(run_dir / _MARK) == self.token:
            return Population.load(run_dir / "population")
        if not self.uri:
            raise BlindNodeError(explain_blind_node(platform.node(), run_dir))
        try:
            return fetch_population(self.uri, config.data.cache)
        except (ResourcesError, DataError) as error:
            raise ResourcesError(f"node {platform.node()}: {error}") from error

    def upload(self, run_dir: Path) -> RunFiles:
        """Upload the population and the features from the run's folder, unless there is a copy.

        Raises:
            ResourcesError: The URI cannot be written.
        """
        return self if self.uri else replace(self, uri=upload_population(run_dir / "population", self.store))


def share_files(run_dir: Path, config: Config, tell: Callable[[str], None]) -> RunFiles:
    """Find nodes that do not see the run's folder, and upload the run's data for them if ``run.dir`` is a URI.

    Args:
        run_dir: Folder of the run on this node.
        config: Configuration of the run.
        tell: Shows a message about the copies.

    Raises:
        ResourcesError: ``run.dir`` is a path and a node does not see it, or the URI cannot be written.
    """
    store = below(config.run.dir, _DATA) if is_uri(config.run.dir) else ""
    files = RunFiles(uuid.uuid4().hex, "", store, frozenset(list_alive_nodes()))
    path = run_dir / _MARK
    write_durably(path, files.token.encode())
    if config.data.sites or get_current_placement_group() is not None:  # actors run on some of the nodes only
        return files
    blind = _find_blind_nodes(path, files.token, config.ray.options.label_selector)
    if not store:
        if blind:
            raise ResourcesError(explain_blind_node(", ".join(sorted(blind.values())), run_dir))
        return files
    grows = config.ray.autoscale or config.ray.min_actors is not None  # a later node may not see the folder either
    if not blind and not grows:
        return files
    who = f"{len(blind)} nodes do" if len(blind) != 1 else "1 node does"
    tell(f"{who} not see {run_dir.parent}. Such nodes copy the run's data from {config.run.dir} to their own caches.")
    return files.upload(run_dir)


def _find_blind_nodes(path: Path, token: str, selector: Mapping[str, str] | None) -> dict[str, str]:
    """Return the hostnames of nodes for client actors that do not read the token, by node id."""
    here = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    names = {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
        for node in nodes
        if node["Alive"]
        and node["NodeID"] != here
        and (node["Resources"].get("CPU") or node["Resources"].get("GPU"))
        and match_labels(node.get("Labels") or {}, selector or {})
    }

    # A lambda is sent with its code, so a node need not import raydfl to answer.
    task: Any = ray.remote(num_cpus=0, max_retries=0)(lambda path: path.read_text() if os.access(path, os.R_OK) else "")
    answers = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(path): node
        for node in names
    }
    done = ray.wait([*answers], num_returns=len(answers), timeout=_WAIT)[0] if answers else []
    blind = {}
    for answer in done:
        try:
            if ray.get(answer) != token:
                blind[answers[answer]] = names[answers[answer]]
        except RayError:  # the node has just left
            continue
    return blind


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
