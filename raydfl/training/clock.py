"""Stragglers: how long a client may train, and what becomes of one that takes longer or never answers.

A deadline depends on the clock, so a run in which it touches a client is not the same on every machine; the record says which
clients it touched. A deadline that touches nobody changes nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import torch


class DeadlineExceededError(Exception):
    """A client is left out of the round because its time was over; no mistake of its code."""


class Clock:
    """The time that one client's training takes: its own code, and the computations that it takes part in.

    Time in which it only waits for other clients of its group does not count; of a computation of several clients all of it
    counts for each of them.
    """

    __slots__ = ("_device", "_limit", "_partial", "_since", "_spent", "cut", "steps")

    def __init__(self, limit: float | None = None, partial: bool = True, device: torch.device | None = None) -> None:
        """Create a clock that stands still.

        Args:
            limit: seconds; ``None``: no deadline.
            partial: whether what was done until the deadline counts.
            device: that computes, the CPU by default; a GPU is waited for before the clock is read.
        """
        self._device = device
        self._limit = math.inf if limit is None else limit
        self._partial = partial
        self._spent = 0.0
        self._since: float | None = None
        self.steps = 0
        """Optimiser steps done; a method takes back those that train nothing of what is sent."""
        self.cut = False
        """True where training ended at the deadline with batches left to do."""

    def start(self) -> None:
        """Let it go on."""
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        """Let it stand."""
        if self._since is not None:
            self._spent += time.monotonic() - self._since
            self._since = None

    @property
    def expired(self) -> bool:
        """Return whether the deadline is over."""
        if self._limit == math.inf:
            return False
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._spent + (0.0 if self._since is None else time.monotonic() - self._since) >= self._limit

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the clock while a client waits for a computation that it has asked for.

        Raises:
            DeadlineExceededError: at the end, if the deadline was over before the work was done and what was done does not count.
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
    def computing(self) -> Iterator[None]:
        """Inside, what this client asked for is computed."""
        self.start()
        try:
            yield
        finally:
            self.stop()
