"""Clusters and an object store on this machine, for programs that kill their processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from processes import Mark

_HEAD_PORTS = ("ray-client-server-port", "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port")
"""Ports of a head that have a fixed default, which other clusters of the machine may use."""


class Machines:
    """A cluster of a head and two worker nodes with two CPUs each, as processes of ``ray start``.

    Args:
        hidden: a folder that the worker nodes do not see: each has a file system in memory instead.
    """

    def __init__(self, hidden: Path | None = None) -> None:
        self._hidden = hidden
        self._marks: list[Mark] = []
        self._start()

    def _start(self) -> None:
        port = _find_port()
        self.address = f"127.0.0.1:{port}"
        checks = '{"health_check_initial_delay_ms":0,"health_check_period_ms":500,"health_check_failure_threshold":4}'
        own = [f"--{name}={_find_port()}" for name in _HEAD_PORTS]
        head = ("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--system-config={checks}")
        self._marks = []
        try:
            self._marks.append(self._node(*head, *own))
            self._marks.extend([self._add(), self._add()])
        except BaseException:
            self.close()
            raise

    def _add(self) -> Mark:
        return self._node(f"--address={self.address}", "--num-cpus=2", hidden=self._hidden)

    def _node(self, *options: str, hidden: Path | None = None) -> Mark:
        """Start a node, wait until it is ready, and return the mark of its processes."""
        apart = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)) if hidden else ()
        ray = str(Path(sys.executable).with_name("ray"))
        ports = ("--min-worker-port=0", "--max-worker-port=0")
        command = [*apart, ray, "start", "--block", "--object-store-memory=100000000", *ports, *options]
        mark = Mark()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **mark.environment}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said = []
        for line in process.stdout or ():
            said.append(line)
            if "Ray runtime started" in line:
                return mark
        mark.end()
        raise RuntimeError(f"a node did not start: {''.join(said)}")

    def actors(self, title: str) -> list[int]:
        """Return the pids of this cluster's actors of a class."""
        return [pid for mark in self._marks for pid in mark.pids(title)]

    def kill_node(self, number: int) -> None:
        """Kill a worker node with everything on it, and let a new node join."""
        self._marks[1 + number].end()
        self._marks[1 + number] = self._add()

    def kill(self) -> None:
        """Kill every process of the cluster, and start a new cluster at another address."""
        self.close()
        self._start()

    def close(self) -> None:
        """End every process of the cluster."""
        for mark in self._marks:
            mark.end()


class OneMachine:
    """The Ray of each driver, started by the run itself on this machine."""

    address = ""

    def __init__(self) -> None:
        self._mark = Mark()
        os.environ.update(self._mark.environment)

    def actors(self, title: str) -> list[int]:
        """Return the pids of the drivers' actors of a class."""
        return self._mark.pids(title)

    def close(self) -> None:
        """Drivers end their Ray themselves."""
        for name in self._mark.environment:
            del os.environ[name]


class Bucket:
    """An object store in a thread of this process. The credentials are in the environment."""

    def __init__(self) -> None:
        import boto3
        from moto.server import ThreadedMotoServer

        os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any")
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        _, port = self._server.get_host_and_port()
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1").create_bucket(
            Bucket="runs"
        )
        self.uri = f"s3://runs/kills?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"

    def close(self) -> None:
        """End the server."""
        self._server.stop()


def _find_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
