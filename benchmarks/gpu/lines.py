"""The table at the end, and the stop-watch that keeps the check within its time."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Result = Literal["ok", "FAILED", "cut short", "skipped"]


@dataclass
class Line:
    """One line of the table."""

    part: str
    what: str
    result: Result
    figure: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    """What the JSON file has besides."""


class Watch:
    """Time that a part may take.

    Args:
        seconds: of the whole check.
        now: gives seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ends = now() + seconds
        self._part_ends = self._ends

    def begin(self, seconds: float) -> None:
        """Begin a part, which may take so long, and no longer than the whole check."""
        self._part_ends = min(self._ends, self._now() + seconds)

    @property
    def left(self) -> float:
        """Return the seconds that the part still has; 0 or less: none."""
        return self._part_ends - self._now()


def failed(part: str, what: str, error: BaseException) -> Line:
    """Return the line of something that raised."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Line(part, what, "FAILED", text[:160], {"traceback": "".join(traceback.format_exception(error))})


def tried(part: str, what: str, work: Callable[[], Line]) -> Line:
    """Return what some work returns, or the line of its failure; nothing that fails ends the check."""
    started = time.monotonic()
    try:
        line = work()
    except Exception as error:  # noqa: BLE001 - it is what the check is for
        line = failed(part, what, error)
    line.details.setdefault("seconds", round(time.monotonic() - started, 2))
    return line


def table(lines: list[Line]) -> str:
    """Return the lines as text, aligned."""
    widths = [max(len(getattr(line, column)) for line in lines) for column in ("part", "what", "result")]
    return "\n".join(
        f"{line.part:{widths[0]}}  {line.what:{widths[1]}}  {line.result:{widths[2]}}  {line.figure}".rstrip()
        for line in lines
    )
