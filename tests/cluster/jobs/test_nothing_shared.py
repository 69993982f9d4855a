"""Runs on nodes that share no folder: each node has a mount namespace of its own, and S3 is the only common store.

A file system in memory hides the cache folder of the driver's machine from each node. It vanishes with the node.
"""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from head import BIN
from helpers import known, stop_after
from marked import Marked, until

from raydfl.core.remote import RemoteFolder, below
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.engine.storage.mirror import local_run, local_runs
from raydfl.engine.storage.store import RunStore
from raydfl.runs._run import resume, run
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
METHODS = ["fedper", "scaffold", "fedmlac", "ditto", "fedapta"]
SETTINGS = ("evaluate.every=3", "train.cohort=1.0", "data.speakers=4")

may_unshare = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not may_unshare, reason="this user may not create mount namespaces"),
]


class Nodes:
    """A head without clients, and nodes that see nothing of its folder ``hidden``."""

    def __init__(self, hidden: Path) -> None:
        self.hidden = hidden
        self._head = Marked.python(str(Path(__file__).parents[1] / "fleet.py"))
        self.address = self._head.ask()
        self.nodes: list[Marked] = []

    def add(self, mount: str = "mount -t tmpfs none $0") -> None:
        options = ["--num-cpus=1", "--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"]
        start = [str(BIN / "ray"), "start", f"--address={self.address}", "--block", *options]
        shell = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', str(self.hidden))
        node = Marked(*shell, *start, PYTHONUNBUFFERED="1")
        self.nodes.append(node)
        assert node.process.stdout is not None
        assert any("Ray runtime started" in line for line in node.process.stdout), node.process.communicate()

    def crash(self, number: int) -> None:
        """Kill all processes of a node. Its files in memory are lost."""
        self.nodes[number].end()

    def end(self) -> None:
        for node in self.nodes:
            node.mark.end()
        self._head.ask("end")
        self._head.end()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    (tmp_path / "own").mkdir()
    cluster = Nodes(tmp_path / "own")
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture
def far(tiny: Tiny, s3: str, nodes: Nodes, request: pytest.FixtureRequest) -> Tiny:
    """Configure a run with two actors on the nodes and its folder in the bucket."""
    uri = below(s3, request.node.name.replace("[", "-").rstrip("]"))
    RemoteFolder(uri, "").remove(RemoteFolder(uri, "").files())

    def configure(*overrides: str, method: str = "fedmlac") -> Config:
        own = ("ray.actors=2", f"ray.address='{nodes.address}'", "ray.ready_timeout=200", "run.name=far")
        return tiny(*SETTINGS, f"run.dir={uri}", f"data.cache={nodes.hidden / 'cache'}", *own, *overrides, method=method)

    return configure


def fetch(config: Config, folder: Path) -> Path:
    """Download a run, as another machine would."""
    return local_run(below(str(config.run.dir), str(config.run.name)), [f"data.cache={folder}"])


def listen() -> tuple[Progress, list[str]]:
    messages: list[str] = []
    progress = Progress("quiet")
    progress.message = messages.append  # type: ignore[method-assign]
    return progress, messages


def test_private_methods_give_the_same_bits(tiny: Tiny, far: Tiny, nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    nodes.add()
    for method in METHODS:
        reference = known(tiny(*SETTINGS, method=method))
        config = far(f"run.name={method}", method=method)
        progress, messages = listen()
        assert run(config, progress).finished
        assert any("2 nodes do not see" in text for text in messages), messages
        local = local_runs(str(config.run.dir), config.data.cache) / method
        assert not list(local.glob("private/*.seg")), "the server has no copy of private state"
        assert_same_bits(reference, read_tensors(fetch(config, tmp_path / "other")))
    stores = [name for name in RemoteFolder(below(str(config.run.dir), ".data"), "").files() if "store.json" in name]
    assert len(stores) == 1, "all runs share a copy of the features"
