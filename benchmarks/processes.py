"""Processes found again by a mark in their environment, which all that they start inherit, whatever they call themselves."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path

import psutil


class Mark:
    """A variable of the environment that no other process has.

    Attributes:
        environment: the variable and its value, for those that are to be found.
    """

    def __init__(self) -> None:
        self._name = f"RAYDFL_MARK_{uuid.uuid4().hex}"
        self.environment = {self._name: "1"}

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Those that live, with a word in their command line, by rising id."""
        found = []
        for process in psutil.process_iter():
            # What has ended meanwhile, or belongs to others, is none of ours.
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if self._name.encode() in environment and word in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def pids(self, word: str = "") -> list[int]:
        """Their ids."""
        return [process.pid for process in self.processes(word)]

    def end(self) -> None:
        """Kill them all, with what they start meanwhile.

        Raises:
            RuntimeError: some are there still.
        """
        for _ in range(5):
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.3)
        if left := self.processes():
            raise RuntimeError(f"these processes could not be ended: {left}")
