"""Interface for progress reports of long work on data. :class:`raydfl.runs.progress.Progress` implements it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol


class ProgressReporter(Protocol):
    """Reports progress to the user."""

    def steps(self, description: str, total: int | None) -> AbstractContextManager[Callable[..., None]]:
        """Open a task of ``total`` steps (``None``: unknown). Call the result with the number of further completed steps."""

    def message(self, text: str) -> None:
        """Show one line."""


class Silent:
    """Progress without output."""

    @contextlib.contextmanager
    def steps(self, description: str, total: int | None) -> Iterator[Callable[..., None]]:
        """Do nothing."""
        yield lambda count=1: None

    def message(self, text: str) -> None:
        """Do nothing."""
