"""The output of a command while it works: a bar (terminal, notebook), a line a round in a log, JSON for machines, or nothing."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from raydfl.core.errors import printable
from raydfl.core.metrics import HARMONIC_MEAN, OF_CLIENTS, SHOWN, base_name
from raydfl.engine import Leader, RoundReport
from raydfl.runs.notebook import NotebookBars, in_notebook
from raydfl.runs.result import Result
from raydfl.runs.words import duration, size

Mode = Literal["auto", "bar", "notebook", "lines", "quiet", "json"]
Advance = Callable[..., None]
"""``advance()`` or ``advance(count)``: so many more steps are done."""

_REASONS = 5  # failed clients of a round whose reasons are told; the record has all
_REASON = 80  # characters of why a client failed in the line of its round
_STEP_SECONDS = 10.0  # between two lines of one long preparation


def scores_text(scores: Mapping[str, float], headline: str = "accuracy") -> str:
    """Return a run's headline scores (and a backdoor's success) in one line, or its first scores when there is none.

    >>> scores_text({"test plugin/loss": 1.2, "test plugin/accuracy": 0.8125})
    'test plugin/accuracy 0.812'
    """
    shown = _headlines(scores, headline) or {
        k: v for k, v in scores.items() if not k.endswith((*OF_CLIENTS, HARMONIC_MEAN))
    }
    return "  ".join(f"{name} {value:.3f}" for name, value in itertools.islice(shown.items(), 4))


def _headlines(scores: Mapping[str, float], headline: str) -> dict[str, float]:
    """Return the scores that are looked at first: the objective's headline, and those of :data:`SHOWN`."""
    return {name: value for name, value in scores.items() if base_name(name) in (headline, *SHOWN)}


class _Bars(RichProgress):
    """Bars with a line of text below them, which may be longer than a terminal is wide."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.below:
            yield Text(f"  {self.below}")

    def say(self, text: str) -> None:
        """Print a line above."""
        self.console.print(text, markup=False, highlight=False)


class Progress:
    """Shows how a command gets on. A context manager: leaving it gives the terminal back, whatever happened.

    Args:
        mode: ``"auto"`` is ``"notebook"`` in a notebook, ``"bar"`` on a terminal and ``"lines"`` elsewhere; ``"json"`` prints one
            object a line with an ``event`` (start, round, steps, message, finish); ``"quiet"`` prints nothing.
        stream: where to; by default the standard output.
        clock: seconds, for the time left.
    """

    def __init__(
        self, mode: Mode = "auto", stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stdout
        if mode == "auto":
            at_a_page = stream is None and in_notebook()
            mode = "notebook" if at_a_page else "bar" if self._stream.isatty() else "lines"
        self.mode: Mode = mode
        self._clock = clock
        self._total = 0  # rounds that the run will have
        self._times: deque[tuple[float, int]] = deque(maxlen=21)  # (when, rounds completed) of the last rounds
        self._bar: _Bars | NotebookBars | None = None
        self._task: int | None = None
        self._scores: Mapping[str, float] = {}
        self._headline = "accuracy"
        self._lock = threading.RLock()
        self._waiting: deque[str] = deque()
        self._writing = False

    @property
    def live(self) -> bool:
        """True where what is shown is written over: by a bar on a terminal or in a notebook."""
        return self.mode in ("bar", "notebook")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._task = None

    def start(self, total_rounds: int, done_rounds: int, description: str, headline: str = "accuracy") -> None:
        """Show that the rounds begin, or go on after ``done_rounds`` of them; ``headline`` is the objective's score."""
        self._total, self._headline = total_rounds, headline
        self._times.clear()
        self._times.append((self._clock(), done_rounds))
        if self.mode == "json":
            self._event("start", description=description, total_rounds=total_rounds, done_rounds=done_rounds)
        elif self.live:
            self._task = self._show_bar().add_task(description, total=total_rounds, completed=done_rounds, status="")
        else:
            after = f", {done_rounds} of them done" if done_rounds else ""
            self._line(f"{description}: {total_rounds} rounds{after}")

    def round(self, report: RoundReport) -> None:
        """Show that one more round is completed."""
        self._times.append((self._clock(), report.round))
        left = self._seconds_left(report.round)
        scores = _headlines(report.scores, self._headline)
        self._scores = scores or self._scores
        if self.mode == "json":
            self._event(
                "round",
                round=report.round,
                total=self._total,
                **({"phase": report.phase} if report.phase else {}),
                loss=report.loss,
                scores=scores,
                clients=report.used,
                seconds=report.training_seconds,
                failed=len(report.rejected),
                reasons=dict(itertools.islice(report.rejected.items(), _REASONS)),
                late=len(report.cut),
                bytes_down=report.bytes_down,
                bytes_up=report.bytes_up,
                retried=report.retried,
                times=report.times,
                clients_per_second=report.clients_per_second,
                seconds_left=left,
            )
        elif self.live and self._task is not None:
            parts = [report.phase, _loss_text(report.loss), scores_text(self._scores, self._headline), *_work(report)]
            bar = self._show_bar()
            bar.below = printable("  ".join(part for part in parts if part))
            status = f"round {report.round}/{self._total}  {duration(left)} left"
            bar.update(TaskID(self._task), completed=report.round, status=status)
        else:
            number = f"round {report.round:{len(str(self._total))}d}/{self._total}"
            parts = [number, report.phase, _loss_text(report.loss)]
            parts += [
                scores_text(scores, self._headline),
                f"{report.used} clients",
                *_work(report),
                f"{size(report.bytes_down)} down",
            ]
            parts += [f"{size(report.bytes_up)} up", f"{duration(left)} left"]
            self._line("  ".join(part for part in parts if part))

    def message(self, text: str) -> None:
        """Show one sentence about what happens; nothing in quiet mode."""
        if self.mode == "json":
            self._event("message", text=text)
        else:
            self._line(text)

    def finish(self, result: Result, seconds: float, next_step: str = "") -> None:
        """Show that the command ends.

        Args:
            result: of the run.
            seconds: wall-clock time of this command.
            next_step: what to do now: ``"raydfl resume runs/x"``.
        """
        self.close()
        if self.mode == "json":
            self._event(
                "finish",
                status=result.status,
                round=result.round,
                total=self._total,
                seconds=seconds,
                run_dir=str(result.run_dir),
                scores=result.scores,
                next_step=next_step,
                problems=[asdict(problem) for problem in result.problems],
                **({"ended": result.ended} if result.ended else {}),
                **({"best": _described(result.best)} if result.best is not None else {}),
            )
            return
        scores = f": {scores_text(result.scores, self._headline)}" if result.scores else ""
        self._line(f"{result.status} after {result.round} of {self._total} rounds, {duration(seconds)}{scores}")
        if result.ended:
            self._line(f"stopped in round {result.round}: {result.ended}")
        if result.best is not None:
            self._line(f"best: {result.best.text}")
        for problem in result.problems:
            self._line(f"{'worthless' if problem.worthless else 'warning'}: {problem.text}")
        self._line(f"run directory: {result.run_dir}")
        if next_step:
            self._line(f"next: {next_step}")

    @contextmanager
    def steps(self, description: str, total: int | None) -> Iterator[Advance]:
        """Show the progress of something with countable steps, such as preparing features.

        Args:
            description: what is done, ``"features"``.
            total: number of steps; ``None``: not known.

        Yields:
            ``advance(count=1)``, to be called from this thread whenever steps are done.
        """
        if self.live:
            with self._bar_steps(description, total) as advance:
                yield advance
            return
        done, shown, shown_at = 0, -1, self._clock()

        def show() -> None:
            nonlocal shown, shown_at
            shown, shown_at = done, self._clock()
            if self.mode == "json":
                self._event("steps", description=description, done=done, total=total)
            else:
                self._line(f"{description}: {done}" + ("" if total is None else f" of {total}"))

        def advance_lines(count: int = 1) -> None:
            nonlocal done
            done += count
            if self._clock() - shown_at >= _STEP_SECONDS:
                show()

        yield advance_lines
        if done != shown:
            show()

    @contextmanager
    def _bar_steps(self, description: str, total: int | None) -> Iterator[Advance]:
        alone = self._bar is None
        bar = self._show_bar()
        task = TaskID(bar.add_task(description, total=total, status=""))
        done = 0

        def advance(count: int = 1) -> None:
            nonlocal done
            done += count
            bar.update(task, completed=done, status=str(done) if total is None else f"{done}/{total}")

        try:
            yield advance
        finally:
            if alone:
                self.close()
            else:
                bar.remove_task(task)

    def _show_bar(self) -> _Bars | NotebookBars:
        """Return the live display; only one may exist on a terminal, so rounds and steps share it."""
        if self._bar is not None:
            return self._bar
        if self.mode == "notebook":
            self._bar = NotebookBars(self._clock)
            return self._bar
        self._bar = _Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}", markup=False),
            console=Console(file=self._stream, force_terminal=True),
        )
        self._bar.start()
        return self._bar

    def _seconds_left(self, done: int) -> float:
        """Foresee it from the pace of the last rounds, evaluation and commits included."""
        (first_time, first_round), (last_time, last_round) = self._times[0], self._times[-1]
        if last_round <= first_round:
            return float("nan")
        return (last_time - first_time) / (last_round - first_round) * (self._total - done)

    def _line(self, text: str) -> None:
        self._show(printable(text))

    def _show(self, text: str) -> None:
        """Write a line; one from a signal's handler that comes in the middle of another, which streams refuse, follows after it."""
        with self._lock:
            self._waiting.append(text)
            while self._waiting and not self._writing:
                self._writing = True
                try:
                    self._write(self._waiting.popleft())
                finally:
                    self._writing = False

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.say(text)
        elif self.mode != "quiet":
            print(text, file=self._stream, flush=True)

    def _event(self, event: str, **values: Any) -> None:
        self._show(json.dumps({"event": event, **_plain(values)}, allow_nan=False))


def default_progress() -> Progress:
    """Return what shows a run that Python starts, where nothing else is said: a notebook sees it, a program prints nothing."""
    return Progress("notebook" if in_notebook() else "quiet")


def _loss_text(loss: float) -> str:
    return f"loss {loss:.4f}" if not abs(loss) >= 1e6 else f"loss {loss:.4g}"


def _work(report: RoundReport) -> list[str]:
    """Speed, where it is known, and failures, where there are any."""
    parts = [f"{report.clients_per_second:.1f} clients/s"] if report.training_seconds > 0 else []
    if report.cut:
        parts.append(f"{len(report.cut)} late")
    if report.rejected:
        client, reason = next(iter(report.rejected.items()))
        parts.append(f"{len(report.rejected)} failed ({client}: {reason[:_REASON]})")
    return parts


def _described(best: Leader) -> dict[str, Any]:
    """Return the best round for machines."""
    return {
        "round": best.round,
        "metric": best.criterion.metric,
        "value": best.value,
        "chosen_by": best.criterion.chooser,
    }


def _plain(value: Any) -> Any:
    """``value`` with NaN and infinities, which JSON does not have, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value
