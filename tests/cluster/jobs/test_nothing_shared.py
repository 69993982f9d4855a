"""Runs on nodes that share no folder: each node has a mount namespace of its own, and S3 is the only common store.

A file system in memory hides the cache folder of the driver's machine from each node. It vanishes with the node.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from head import BIN
from helpers import known, stop_after
from marked import Marked

import raydfl
from raydfl.core.errors import ResourcesError
from raydfl.core.remote import RemoteFolder, below
from raydfl.engine.config import Config
from raydfl.engine.storage.mirror import local_run, local_runs
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
def nodes(tmp_path: Path, no_ray_session: None) -> Iterator[Nodes]:
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
        return tiny(
            *SETTINGS, f"run.dir={uri}", f"data.cache={nodes.hidden / 'cache'}", *own, *overrides, method=method
        )

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


def test_a_node_lost_with_its_disk_changes_no_bits(tiny: Tiny, far: Tiny, nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    nodes.add()
    config = far("train.rounds=4")

    def replace_node(report: object) -> None:
        if getattr(report, "round", 0) == 2:
            nodes.crash(0)
            nodes.add()

    assert run(config, listen()[0], replace_node).finished
    reference = known(tiny(*SETTINGS, "train.rounds=4", method="fedmlac"))
    assert_same_bits(reference, read_tensors(fetch(config, tmp_path / "other")))


def test_a_node_that_joins_later_gets_a_copy_or_is_not_used(
    tiny: Tiny, far: Tiny, nodes: Nodes, tmp_path: Path
) -> None:
    """The first node sees the run's folder. The next has a full cache, and the last sees nothing."""
    nodes.add("true")
    config = far("train.rounds=4", "ray.actors=1", method="ditto")

    def replace_node(report: object) -> None:
        if getattr(report, "round", 0) == 2:
            assert not list(RemoteFolder(below(str(config.run.dir), ".data"), "").files())
            nodes.crash(0)
            nodes.add("mount -t tmpfs -o size=16k none $0")
            threading.Timer(30.0, nodes.add).start()

    assert run(config, listen()[0], replace_node).finished
    reference = known(tiny(*SETTINGS, "train.rounds=4", method="ditto"))
    assert_same_bits(reference, read_tensors(fetch(config, tmp_path / "other")))


def test_a_node_that_joins_later_without_raydfl_is_not_used(
    tiny: Tiny, far: Tiny, nodes: Nodes, tmp_path: Path
) -> None:
    nodes.add()
    config = far("train.rounds=4", "ray.actors=1", method="ditto")

    def replace_node(report: object) -> None:
        if getattr(report, "round", 0) == 2:
            nodes.crash(0)
            nodes.add(f"mount -t tmpfs none {Path(raydfl.__file__).parent}")
            threading.Timer(30.0, nodes.add).start()

    assert run(config, listen()[0], replace_node).finished
    reference = known(tiny(*SETTINGS, "train.rounds=4", method="ditto"))
    assert_same_bits(reference, read_tensors(fetch(config, tmp_path / "other")))


def test_a_killed_driver_resumes_on_another_machine(tiny: Tiny, far: Tiny, nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    nodes.add()
    config = far("train.rounds=6", "run.commit_every=1")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    driver = Marked.raydfl("run", str(file), "--json")
    try:
        next(event for event in driver.events() if event.get("round") == 2)
        driver.process.send_signal(signal.SIGKILL)
    finally:
        driver.end()
    shutil.rmtree(nodes.hidden / "cache")
    uri = below(str(config.run.dir), "far")
    latest = RemoteFolder(uri, "").read("LATEST")
    assert latest is not None
    assert int(latest[:6]) in (1, 2, 3)
    assert resume(uri, [f"data.cache={nodes.hidden / 'other'}"], listen()[0]).finished
    reference = known(tiny(*SETTINGS, "train.rounds=6", method="fedmlac"))
    assert_same_bits(reference, read_tensors(fetch(config, tmp_path / "third")))


def test_a_run_changes_between_actors_and_none(tiny: Tiny, far: Tiny, nodes: Nodes, tmp_path: Path) -> None:
    """Segments of the run's folder and of the URI are read by both kinds of workers."""
    nodes.add()
    nodes.add()
    stop_after(far("ray.actors=0", "ray.address=null"), 1)
    config = far("train.rounds=2")
    assert run(config, listen()[0]).finished
    shutil.rmtree(nodes.hidden / "cache")
    config = far("train.rounds=3", "ray.actors=0", "ray.address=null")
    assert run(config, listen()[0]).finished
    assert_same_bits(known(tiny(*SETTINGS, method="fedmlac")), read_tensors(fetch(config, tmp_path / "other")))


def test_unsuitable_nodes_are_reported(far: Tiny, nodes: Nodes, tmp_path: Path) -> None:
    """The command ends with code 2: for a path that a node does not see, a full cache and a cache that cannot be written."""
    nodes.add("mount -t tmpfs -o size=16k none $0")
    nodes.add()
    file = tmp_path / "run.yaml"
    cases = {
        "path": ([f"run.dir={nodes.hidden / 'runs'}"], r"does not see the run's folder"),
        "full": (["ray.actors=2"], r"node .*: the disk of .*cache.* is full: .*choose another folder with data.cache"),
    }
    for name, (overrides, message) in cases.items():
        file.write_text(yaml.safe_dump(far(f"run.name={name}", *overrides).model_dump(mode="json")))
        command = Marked.raydfl("run", str(file))
        try:
            _, problems = command.process.communicate(timeout=300)
        finally:
            command.end()
        assert command.process.returncode == 2, problems
        assert re.search(message, problems), problems
    nodes.crash(0)  # otherwise the full cache may be the first error
    nodes.add("mount -t tmpfs -o ro none $0")
    with pytest.raises(ResourcesError, match=r"node .*cannot be written to .*choose another folder with data.cache"):
        run(far("run.name=readonly", "ray.actors=2"), listen()[0])
