"""Signals that ask long work to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from raydfl.runs.progress import Progress


def interrupt() -> None:
    """End what is being done, as Ctrl-C does without a handler.

    Raises:
        KeyboardInterrupt: always.
    """
    raise KeyboardInterrupt


class StopSignals:
    """Inside a ``with`` block Ctrl-C or SIGTERM asks to stop in order, and once more to stop at once.

    Attributes:
        asked: whether to stop; may be set by others too.
    """

    def __init__(
        self,
        progress: Progress,
        message: str,
        them: str = "",
        in_order: Callable[[], None] = lambda: None,
        at_once: Callable[[], None] = interrupt,
        heeded: bool = True,
    ) -> None:
        """Signals are handled only inside the block, and only in the main thread.

        Args:
            progress: is told.
            message: what happens now.
            them: what a second Ctrl-C would stop, if not this.
            in_order: called when asked for the first time.
            at_once: called when asked again.
            heeded: whether signals are handled; else only ``asked`` counts.
        """
        self.asked = False
        self._progress = progress
        self._message = message
        self._hint = f" (press Ctrl-C again to stop {them + ' ' if them else ''}at once)"
        self._in_order = in_order
        self._at_once = at_once
        self._numbers = (signal.SIGINT, signal.SIGTERM) if heeded else ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in self._numbers:
            with contextlib.suppress(ValueError):  # not in the main thread: whoever called us handles signals
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._at_once()
            return
        self.asked = True
        self._in_order()
        # Nobody sits at the keyboard of a job: it is stopped by SIGTERM.
        self._progress.message(self._message + (self._hint if number == signal.SIGINT else ""))
