"""The interface by which long work on data reports what it has done so far; :class:`raydfl.runs.progress.Progress` has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol


class Progress(Protocol):
    """Whoever shows progress."""

    def steps(self, description: str, total: int | None) -> AbstractContextManager[Callable[..., None]]:
        """Enter something with ``total`` steps; the result is called with how many more are done."""

    def message(self, text: str) -> None:
        """Show one line."""


class Silent:
    """Shows nothing."""

    @contextlib.contextmanager
    def steps(self, description: str, total: int | None) -> Iterator[Callable[..., None]]:
        """Does nothing."""
        yield lambda count=1: None

    def message(self, text: str) -> None:
        """Does nothing."""
