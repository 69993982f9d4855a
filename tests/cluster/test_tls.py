"""A cluster of two nodes with TLS: a run gives the bits of one process, and clients without certificates cannot connect."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import ray
import yaml
from helpers import known
from jobs.head import BIN, free_port
from marked import WAIT, Marked

from raydfl.cluster.certificates import make_certificates
from raydfl.engine.config import Config
from raydfl.testing import assert_same_bits, read_tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Encrypted:
    """Two nodes on this machine, each with a certificate of its own.

    Attributes:
        targets: Addresses of the head's control store, and of both nodes' managers of tasks and of objects.
        driver: Folder of the driver's certificate.
    """

    def __init__(self, folder: Path) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))  # short, because paths of sockets are limited
        self._ip = ray.util.get_node_ip_address()  # Ray replaces 127.0.0.1 by it, so that certificates must have it.
        names = [f"{name},{self._ip}" for name in ("head", "node", "driver")]
        head, node, self.driver = make_certificates(folder / "certificates", names)
        control, *managers = [free_port() for _ in range(5)]
        self.targets = [f"{self._ip}:{port}" for port in (control, *managers)]
        self.address = f"{self._ip}:{control}"
        self._nodes: list[Marked] = []
        try:
            own = (f"--port={control}", "--include-dashboard=false", f"--temp-dir={self.temporary}")
            self._start(head, managers[:2], "--head", *own)
            self._start(node, managers[2:], f"--address={self.address}")
        except BaseException:
            self.end()
            raise

    def _start(self, certificate: Path, ports: list[int], *options: str) -> None:
        managers = (f"--node-manager-port={ports[0]}", f"--object-manager-port={ports[1]}")
        own = ("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0", "--num-cpus=1")
        node = start_with_tls(
            certificate,
            *(str(BIN / "ray"), "start", "--block", f"--node-ip-address={self._ip}", "--object-store-memory=100000000"),
            *own,
            *managers,
            *options,
        )
        self._nodes.append(node)
        assert node.process.stdout is not None
        assert any("Ray runtime started" in line for line in node.process.stdout), node.process.communicate()

    def end(self) -> None:
        for node in reversed(self._nodes):
            node.end()
        shutil.rmtree(self.temporary, ignore_errors=True)


def start_with_tls(certificate: Path, *command: str) -> Marked:
    """Start a command with the variables of a certificate's folder, as the documentation describes."""
    # Ray lowers the priority of its workers by 15, so that they starve on a busy machine.
    shell = ("bash", "-c", 'source "$0" && exec "$@"', str(certificate / "tls.env"))
    return Marked(*shell, *command, PYTHONUNBUFFERED="1", RAY_worker_niceness="0")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Encrypted]:
    cluster = Encrypted(tmp_path)
    try:
        yield cluster
    finally:
        cluster.end()


def opens(target: str, credentials: grpc.ChannelCredentials | None) -> bool:
    """Return whether a gRPC client can connect to an address."""
    channel = grpc.insecure_channel(target) if credentials is None else grpc.secure_channel(target, credentials)
    with channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=WAIT if credentials else 3)
        except grpc.FutureTimeoutError:
            return False
    return True


def test_a_run_on_two_nodes_with_tls_gives_the_bits_of_one_process(
    tiny: Callable[..., Config], cluster: Encrypted, tmp_path: Path
) -> None:
    config = tiny("ray.actors=2", f"ray.address='{cluster.address}'", "ray.ready_timeout=300", method="fedmlac")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = (str(BIN / "raydfl"), "run", str(file))
    (stranger,) = make_certificates(tmp_path / "theirs", ["driver"])
    for refused in (Marked(*command), start_with_tls(stranger, *command)):
        try:
            _, problems = refused.process.communicate(timeout=WAIT)
        finally:
            refused.end()
        assert refused.process.returncode == 2, problems
        assert f"the Ray cluster at {cluster.address} accepts connections, but not the messages" in problems

    driver = start_with_tls(cluster.driver, *command)
    try:
        _, problems = driver.process.communicate(timeout=600)
    finally:
        driver.end()
    assert driver.process.returncode == 0, problems
    run_dir = Path(config.run.dir) / "tiny"
    assert_same_bits(known(tiny(method="fedmlac")), read_tensors(run_dir))
    used = json.loads((run_dir / "run.json").read_text())["nodes"].values()
    assert sum(use["bytes_up"] for use in used) > 0, "no update crossed from one node to the other"

    authority, key, certificate = [(cluster.driver / name).read_bytes() for name in ("ca.crt", "node.key", "node.crt")]
    for target in cluster.targets:
        assert opens(target, grpc.ssl_channel_credentials(authority, key, certificate))
        assert not opens(target, None)
