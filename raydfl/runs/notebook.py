"""Progress bars in a notebook: one display below a cell, overwritten after each round."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SECONDS = 0.2  # minimum time between two updates: each sends a message from the kernel to the page


def is_notebook() -> bool:
    """Return whether this process is a notebook's kernel, so its output is an HTML page."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


@dataclass(slots=True)
class _Task:
    description: str
    total: int | None
    completed: int
    status: str


class NotebookBars:
    """Progress bars with a line of text below, as plain HTML. They need only IPython.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.below = ""
        self._clock = clock
        self._shown_at = clock()
        self._tasks: dict[int, _Task] = {}
        self._handle: Any = None

    def add_task(self, description: str, *, total: int | None, completed: int = 0, status: str = "") -> int:
        """Add a bar and return its number."""
        number = max(self._tasks, default=-1) + 1
        self._tasks[number] = _Task(description, total, completed, status)
        self._show()
        return number

    def update(self, task: int, *, completed: int, status: str) -> None:
        """Change a bar. The page shows the change now, or with the next change after 0.2 s."""
        self._tasks[task].completed, self._tasks[task].status = completed, status
        if self._clock() - self._shown_at >= _SECONDS:
            self._show()

    def remove_task(self, task: int) -> None:
        """Remove a progress bar."""
        del self._tasks[task]
        self._show()

    def print_line(self, text: str) -> None:
        """Print a line below the bars."""
        print(text, flush=True)  # noqa: T201

    def stop(self) -> None:
        """Show the final state. It remains in the notebook."""
        self._show()

    def _show(self) -> None:
        from IPython.display import display

        self._shown_at = self._clock()
        lines = [(task.description, task.status) for task in self._tasks.values()]
        content = {
            "text/plain": "\n".join(["  ".join(line) for line in lines] + [self.below] * bool(self.below)),
            "text/html": self._format_html(),
        }
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def _format_html(self) -> str:
        rows = []
        for task in self._tasks.values():
            value = "" if task.total is None else f' value="{task.completed}" max="{max(1, task.total)}"'
            bar = f'<progress{value} style="width: 12em; vertical-align: middle"></progress>'
            rows.append(f"<div>{html.escape(task.description)} {bar} {html.escape(task.status)}</div>")
        rows += [f"<div>{html.escape(self.below)}</div>"] * bool(self.below)
        return f'<div style="font-family: monospace">{"".join(rows)}</div>'
