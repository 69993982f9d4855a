"""The protocol of contestants in separate processes: lines on their standard input and output.

``run 5`` does five rounds, ``save PATH`` writes the global model; each is answered with ``done``. At the start a
contestant prints ``done`` when it is ready, and it ends when its input ends. Output of libraries goes to the standard
error.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor


def serve(run: Callable[[int], None], weights: Callable[[], Mapping[str, Tensor]]) -> None:
    """Obey the driver until it closes the pipe.

    Args:
        run: does the given number of rounds.
        weights: returns the global model's state dict.
    """
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print("done", file=answers)
    for line in sys.stdin:
        command, argument = line.split()
        if command == "run":
            run(int(argument))
        else:
            torch.save({name: tensor.detach().clone() for name, tensor in weights().items()}, argument)
        print("done", file=answers)


class Process:
    """A contestant in a separate process, from the driver's view."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path) -> None:
        """Start the process and wait until it is ready.

        Args:
            name: of the row in the table.
            command: the program and its arguments.
            log: file for its output.
        """
        self.name = name
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )
        self._await()

    def _await(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        if self._process.stdout.readline() != "done\n":
            last = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait(10)}:\n{last}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._await()

    def run(self, rounds: int) -> None:
        """Do the given number of rounds."""
        self._tell(f"run {rounds}")

    def weights(self) -> Mapping[str, Tensor]:
        """Return the global model."""
        path = self._log.with_suffix(".pt")
        self._tell(f"save {path}")
        return torch.load(path, weights_only=True)

    def close(self) -> None:
        """End the process. Its results remain valid, but a failed exit is reported."""
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.close()
        if code := self._process.wait(60):
            print(f"{self.name} ended with exit code {code}: {self._log.read_text(errors='replace')[-2000:]}")
