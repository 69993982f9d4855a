"""Signals that stop long work: Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from raydfl.runs.progress import Progress


class StopSignals:
    """Context manager that handles Ctrl-C and SIGTERM: the first signal requests a stop, the second stops at once.

    Attributes:
        asked: Whether a stop is requested. Other code may set it too.
    """

    def __init__(
        self,
        progress: Progress,
        message: str,
        target: str = "",
        on_first: Callable[[], None] = lambda: None,
        enabled: bool = True,
    ) -> None:
        """Prepare to handle signals inside the block, if it runs in the main thread.

        Args:
            progress: Shows the message.
            message: Announces the stop after the first signal.
            target: Object of the hint "stop ... at once", such as "them". Empty: this process.
            on_first: Called at the first signal.
            enabled: Whether signals are handled. Otherwise only ``asked`` counts.
        """
        self.asked = False
        self._progress = progress
        self._message = message
        self._hint = f" (press Ctrl-C again to stop {target + ' ' if target else ''}at once)"
        self._on_first = on_first
        self._numbers = (signal.SIGINT, signal.SIGTERM) if enabled else ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in self._numbers:
            with contextlib.suppress(ValueError):  # Outside the main thread, the caller handles signals.
                self._before[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._on_first()
        # SIGTERM comes from a job's scheduler, so a hint about the keyboard would be useless.
        self._progress.message(self._message + (self._hint if number == signal.SIGINT else ""))
