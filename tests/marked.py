"""Processes of a test, with all their descendants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from processes import Mark

WAIT = 240.0
"""Seconds that a busy machine may take for anything."""


class Marked:
    """A process and all its descendants, found by a mark in their environment."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.mark = Mark()
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, **self.mark.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @classmethod
    def python(cls, *arguments: str, **environment: str) -> Marked:
        return cls(sys.executable, *arguments, **environment)

    @classmethod
    def raydfl(cls, *arguments: str, **environment: str) -> Marked:
        return cls.python("-m", "raydfl", *arguments, **environment)

    def ask(self, line: str = "") -> str:
        """Write an optional line, and read the reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer, self.process.stderr.read() if self.process.stderr else ""
        return answer

    def events(self) -> Iterator[dict[str, object]]:
        """Parse the output of ``--json``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def end(self) -> None:
        """Kill all its processes."""
        self.mark.end()
        self.process.communicate()


def until(condition, what: str, alive: Sequence[Marked] = ()):  # type: ignore[no-untyped-def]
    """Wait until a function returns a value, and return it."""
    deadline = time.monotonic() + WAIT
    while not (found := condition()):
        for one in alive:
            assert one.process.poll() is None, one.process.communicate()
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return found
