"""Both autoscalers of Ray start nodes for a run and remove them afterwards (Ray's fake nodes)."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import yaml
from helpers import known
from marked import WAIT, Marked, until
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from raydfl.engine.config import Config
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def find_free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


SECOND = {
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
}
"""Environment of Ray's second autoscaler with fake nodes, as in ray.cluster_utils."""


def describe_cluster(address: str) -> dict[str, object]:
    steps = ["initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"]
    return {
        "cluster_name": "fake",
        "max_workers": 3,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 5.0,
        "provider": {
            "type": "external",  # The type fake_multinode reads a file that Ray's wheel lacks.
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
        },
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "client": {
                "resources": {"CPU": 1, "object_store_memory": 100 << 20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 3,
            },
        },
        "cluster_synced_files": [],
        **{f"{step}_commands": [] for step in steps},
    }


@pytest.fixture(params=[{}, SECOND], ids=["first", "second"])
def head(request: pytest.FixtureRequest) -> Iterator[str]:
    """Start a head without CPUs that grows to three nodes, and return its address."""
    folder = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))  # short, because paths of sockets are limited
    address = f"{ray.util.get_node_ip_address()}:{find_free_port()}"
    (folder / "cluster.yaml").write_text(json.dumps(describe_cluster(address)))
    started = Marked(
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--head",
        f"--port={address.rpartition(':')[2]}",
        f"--autoscaling-config={folder / 'cluster.yaml'}",
        "--num-cpus=0",
        f"--object-store-memory={100 << 20}",
        "--include-dashboard=false",
        f"--temp-dir={folder}",
        f"--ray-client-server-port={find_free_port()}",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
        RAY_FAKE_CLUSTER="1",
        **request.param,
    )
    try:
        assert started.process.wait(WAIT) == 0, started.process.stderr and started.process.stderr.read()
        yield address
    finally:
        started.end()
        shutil.rmtree(folder, ignore_errors=True)


def test_nodes_start_with_a_run_and_stop_after_it(tiny: Tiny, head: str, tmp_path: Path) -> None:
    common = ["train.rounds=3", "train.cohort=1.0"]
    config = tiny(
        *common,
        "run.name=grown",
        "ray.actors=3",
        "ray.autoscale=true",
        "ray.ready_timeout=240",
        f"ray.address='{head}'",
    )
    file = tmp_path / "grown.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    counter = Marked.python(str(HERE / "count_nodes.py"), head)
    run: Marked | None = None
    try:
        assert counter.ask() == "ready"
        counts: list[tuple[float, int]] = []
        assert counter.process.stdout is not None
        lines = counter.process.stdout

        def read() -> None:
            for line in lines:
                when, number = line.split()
                counts.append((float(when), int(number)))

        threading.Thread(target=read, daemon=True).start()
        until(lambda: counts, "the first count", [counter])
        began = time.time()
        run = Marked.raydfl("run", str(file), "--json")
        out, problems = run.process.communicate(timeout=600)
        ended = time.time()
        assert run.process.returncode == 0, problems
        until(lambda: counts[-1][1] == 0, "the end of all nodes", [counter])
    finally:
        if run is not None:
            run.end()
        counter.end()
    print("run of", f"{ended - began:.1f} s;", [(f"{when - began:+.1f} s", number) for when, number in counts])
    numbers = [number for _, number in counts]
    reached = numbers.index(3)
    left = next(place for place, number in enumerate(numbers) if place > reached and number < 3)
    assert numbers[0] == 0
    assert max(numbers) <= 4  # while a node joins, the first autoscaler may start one too many, and removes it
    assert numbers[:reached] == sorted(numbers[:reached])  # up ...
    assert numbers[left:] == sorted(numbers[left:], reverse=True)  # ... and down
    committed = (Path(config.run.dir) / "grown" / "LATEST").stat().st_mtime
    assert counts[left][0] >= committed - 0.5  # no used node is removed
    output = [event["text"] for event in map(json.loads, out.splitlines()) if event["event"] == "message"]
    assert any(text.startswith("Waiting for the autoscaler: room for 0 of 3 client actors") for text in output), output
    assert any(text.startswith("Nodes:") and "joined" in text and "room for 3 of 3" in text for text in output), output
    assert_same_bits(
        known(tiny(*common, "ray.actors=0")),
        read_tensors(Path(config.run.dir) / "grown"),
    )


def test_missing_nodes_end_the_run_with_numbers(tiny: Tiny, head: str, tmp_path: Path) -> None:
    config = tiny("ray.actors=2", "ray.cpus=4", "ray.autoscale=true", "ray.ready_timeout=5", f"ray.address='{head}'")
    file = tmp_path / "too_large.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run = Marked.raydfl("run", str(file), "--json")
    try:
        out, problems = run.process.communicate(timeout=600)
    finally:
        run.end()
    assert run.process.returncode == 2, problems
    assert (
        "0 of 2 client actors started within 5 s. Requested: 2 with 4 CPU each. Free in the cluster: 0 CPU" in problems
    )
    assert "Waiting for the autoscaler: room for 0 of 2" in out
