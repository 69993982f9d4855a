"""Time limit of a client's training (``train.deadline``).

A deadline depends on the speed of the machine. Runs with late clients are therefore not reproducible; the metrics table lists
the late clients. A deadline without late clients changes no result. In virtual time (``train.fleet``) the deadline is a number of
batches, known before the training.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator

import torch


class DeadlineExceededError(Exception):
    """A client exceeded its deadline and is left out of the round. Its code is not at fault."""


class Clock:
    """Stopwatch of a client's training: its own code and its batched computations.

    Waiting for the rest of the group does not count. The full time of a batched computation counts for each of its clients.
    """

    __slots__ = ("_device", "_limit", "_partial", "_since", "_spent", "cut", "examples", "most_batches", "steps")

    def __init__(
        self,
        limit: float | None = None,
        partial: bool = True,
        device: torch.device | None = None,
        most_batches: int | None = None,
    ) -> None:
        """Create a stopped clock.

        Args:
            limit: deadline in seconds. ``None``: no deadline.
            partial: whether the steps before the deadline count (``train.late: partial``).
            device: device of the training, by default the CPU. Reading the clock synchronises a GPU.
            most_batches: largest number of batches in each call of ``fit``. ``None``: no limit.
        """
        self._device = device
        self._limit = math.inf if limit is None else limit
        self._partial = partial
        self._spent = 0.0
        self._since: float | None = None
        self.most_batches = most_batches
        self.steps = 0
        """Completed optimiser steps. Methods subtract steps without an effect on the update."""
        self.examples: Counter[str] = Counter()
        """Training examples of completed calls of ``fit``, by trained model."""
        self.cut = False
        """Whether the deadline ended the training before its last batch."""

    def start(self) -> None:
        """Start or resume the clock."""
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        """Stop the clock."""
        if self._since is not None:
            self._spent += time.monotonic() - self._since
            self._since = None

    @property
    def expired(self) -> bool:
        """True if the deadline has passed."""
        if self._limit == math.inf:
            return False
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._spent + (0.0 if self._since is None else time.monotonic() - self._since) >= self._limit

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock inside a ``with`` block, while a client waits for a computation.

        Raises:
            DeadlineExceededError: the deadline cut the training, and its steps do not count. Raised at the end of the block.
        """
        self.stop()
        try:
            yield
        finally:
            self.start()
        if self.cut and not (self._partial and self.steps):
            raise DeadlineExceededError(
                f"late: {self.steps} steps were done at train.deadline={self._limit:g} s"
                + ("" if self._partial else ", and train.late=drop")
            )

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run the clock inside a ``with`` block, during a computation of this client."""
        self.start()
        try:
            yield
        finally:
            self.stop()
