"""The final table, and the stop-watch that enforces the check's time limit."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

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
    """The time limit of a part.

    Args:
        seconds: of the whole check.
        now: returns the present time in seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ends = now() + seconds
        self._part_ends = self._ends

    def begin(self, seconds: float) -> None:
        """Start a part with a time limit, bounded by the limit of the whole check."""
        self._part_ends = min(self._ends, self._now() + seconds)

    @property
    def left(self) -> float:
        """Return the seconds left for the part; 0 or less: none."""
        return self._part_ends - self._now()


def report_failure(part: str, what: str, error: BaseException) -> Line:
    """Return the line of an exception."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Line(part, what, "FAILED", text[:160], {"traceback": "".join(traceback.format_exception(error))})


def run_checked(part: str, what: str, work: Callable[[], Line]) -> Line:
    """Return the result of some work, or the line of its failure. No failure ends the check."""
    started = time.monotonic()
    if not _device_answers():
        text = "a kernel has failed: nothing can run on the GPU until this process ends. Repair the first failed line"
        return Line(part, what, "skipped", text, {"seconds": 0.0})
    try:
        line = work()
    except Exception as error:  # noqa: BLE001 - the check reports every failure
        line = report_failure(part, what, error)
    line.details.setdefault("seconds", round(time.monotonic() - started, 2))
    return line


def _device_answers() -> bool:
    """Return False after a failed kernel. PyTorch then cannot use the GPU again in this process."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def table(lines: list[Line]) -> str:
    """Return the lines as text, aligned."""
    widths = [max(len(getattr(line, column)) for line in lines) for column in ("part", "what", "result")]
    return "\n".join(
        f"{line.part:{widths[0]}}  {line.what:{widths[1]}}  {line.result:{widths[2]}}  {line.figure}".rstrip()
        for line in lines
    )
