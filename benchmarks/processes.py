"""Find processes by a mark in their environment, inherited by all their children under any name."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path

import psutil


class Mark:
    """A unique variable of the environment.

    Attributes:
        environment: the variable and its value, for the processes to find.
    """

    def __init__(self) -> None:
        self._name = f"RAYDFL_MARK_{uuid.uuid4().hex}"
        self.environment = {self._name: "1"}

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Return live processes with a word in their command line, by rising id."""
        found = []
        for process in psutil.process_iter():
            # Skip processes that have ended meanwhile, or belong to a different user.
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if self._name.encode() in environment and word in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def pids(self, word: str = "") -> list[int]:
        """Return their ids."""
        return [process.pid for process in self.processes(word)]

    def end(self) -> None:
        """Kill them all, including children started meanwhile.

        Raises:
            RuntimeError: Some processes still exist.
        """
        for _ in range(5):
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.3)
        if left := self.processes():
            raise RuntimeError(f"these processes could not be ended: {left}")
