"""Processes that a test starts, found again by a mark in their environment, whatever they call themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

WAIT = 240.0
"""Seconds that a busy machine may take for anything."""


class Marked:
    """A process with all that it and its children start."""

    def __init__(self, *command: str, **environment: str) -> None:
        mark = uuid.uuid4().hex
        self.mark = f"RAYDFL_TEST_MARK={mark}"
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "RAYDFL_TEST_MARK": mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @classmethod
    def python(cls, *arguments: str, **environment: str) -> Marked:
        return cls(sys.executable, *arguments, **environment)

    def ask(self, line: str = "") -> str:
        """Write a line, if there is one, and read the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer, self.process.stderr.read() if self.process.stderr else ""
        return answer

    def pids(self, word: str = "") -> list[int]:
        """Of its processes with a word in their title."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
                if self.mark in environment and word in " ".join(process.cmdline()):
                    found.append(process.pid)
            except (OSError, psutil.Error):
                continue
        return sorted(found)

    def end(self) -> None:
        """Kill every process of it, by its mark."""
        for _ in range(3):
            for pid in self.pids():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.5)
        self.process.communicate()
        assert not self.pids()


def until(condition, what: str, alive: Sequence[Marked] = ()):  # type: ignore[no-untyped-def]
    """Wait for something, and return it."""
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        for one in alive:
            assert one.process.poll() is None, one.process.communicate()
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return found
