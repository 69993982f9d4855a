"""A Ray head for tests, with a token and free ports. Its processes are marked, and ended by their ids."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from processes import Mark

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
BUCKET = "raydfl-tests"
"""Bucket of the object stores."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Head:
    """A running head, and the ``ray job`` commands against it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rj-", dir="/tmp"))  # short, because paths of sockets are limited
        self.token = self.folder / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self._mark = Mark()
        self.dashboard = f"http://127.0.0.1:{free_port()}"
        self.port = free_port()
        options = {
            "port": self.port,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": self.dashboard.rpartition(":")[2],
            "dashboard-agent-listen-port": free_port(),
            "dashboard-agent-grpc-port": free_port(),
            "runtime-env-agent-port": free_port(),
            "metrics-export-port": free_port(),
            "ray-client-server-port": free_port(),
            "num-cpus": 3,
            "object-store-memory": 100 * 2**20,
            "temp-dir": self.folder / "r",
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        started = subprocess.run(
            [BIN / "ray", "start", "--head", "--disable-usage-stats", *arguments],
            env={**self.environment(), **self._mark.environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert started.returncode == 0, started.stdout + started.stderr

    def environment(self, **more: str) -> dict[str, str]:
        """Return environment variables for commands that use this head."""

        environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RAYDFL_"))}
        return environment | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            **more,
        }

    def job(
        self, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``ray job ...``."""
        return subprocess.run(
            [BIN / "ray", "job", *arguments],
            env=dict(environment or self.environment()),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def status(self, submission: str) -> str:
        """Return the status from ``ray job status``: RUNNING, SUCCEEDED, FAILED, STOPPED ..."""
        output = self.job("status", submission).stdout
        return next(word for word in ("SUCCEEDED", "FAILED", "STOPPED", "PENDING", "RUNNING") if word in output.upper())

    def close(self) -> None:
        """End the processes of this head only."""
        self._mark.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def working_dir(folder: Path) -> Path:
    """Make a folder to submit, with the repository's entry points and configurations."""
    shutil.copytree(ROOT / "jobs", folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    return folder
