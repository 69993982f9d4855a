"""Progress output of a command: bars (terminal, notebook), one line per round (log), JSON lines, or nothing."""

from __future__ import annotations

import itertools
import json
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
from raydfl.core.files import display_path, replace_non_finite
from raydfl.core.metrics import HARMONIC_MEAN, OF_CLIENTS, SHOWN, base_name
from raydfl.core.words import format_duration, format_size
from raydfl.engine import Leader, RoundReport
from raydfl.runs.notebook import NotebookBars, is_notebook
from raydfl.runs.result import Result
from raydfl.runs.verdict import Verdict

Mode = Literal["auto", "bar", "notebook", "lines", "quiet", "json"]
Advance = Callable[..., None]
"""``advance()`` or ``advance(count)`` adds 1 or ``count`` completed steps."""

_REASONS = 5  # maximum number of failed clients with reasons in a round's event; the metrics table has all
_REASON = 80  # maximum number of characters of a failure's reason in a round's line
_STEP_SECONDS = 10.0  # minimum time between two lines of one preparation


def format_scores(scores: Mapping[str, float], headline: str = "accuracy") -> str:
    """Format a run's headline scores and backdoor success in one line, or its first scores if it has no headline.

    >>> format_scores({"test plugin/loss": 1.2, "test plugin/accuracy": 0.8125})
    'test plugin/accuracy 0.812'
    """
    shown = _select_headlines(scores, headline) or {
        k: v for k, v in scores.items() if not k.endswith((*OF_CLIENTS, HARMONIC_MEAN))
    }
    return "  ".join(f"{name} {value:.3f}" for name, value in itertools.islice(shown.items(), 4))


def _select_headlines(scores: Mapping[str, float], headline: str) -> dict[str, float]:
    """Select the objective's headline and the scores in :data:`SHOWN`."""
    return {name: value for name, value in scores.items() if base_name(name) in (headline, *SHOWN)}


class _Bars(RichProgress):
    """Progress bars with a line of text below. Long lines wrap."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.below:
            yield Text(f"  {self.below}")

    def print_line(self, text: str) -> None:
        """Print a line above."""
        self.console.print(text, markup=False, highlight=False)


class Progress:
    """Progress display of a command. As a context manager, it always restores the terminal on exit.

    Args:
        mode: ``"auto"`` means ``"notebook"`` in a notebook, ``"bar"`` on a terminal and ``"lines"`` elsewhere. ``"json"`` prints
            one JSON object per line with an ``event`` (start, round, steps, message, finish). ``"quiet"`` prints nothing.
        stream: Output stream. Defaults to the standard output.
        clock: Returns the time in seconds, for the remaining time.
    """

    def __init__(
        self, mode: Mode = "auto", stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stdout
        if mode == "auto":
            notebook = stream is None and is_notebook()
            mode = "notebook" if notebook else "bar" if self._stream.isatty() else "lines"
        self.mode: Mode = mode
        self._clock = clock
        self._total = 0  # rounds of the finished run
        self._times: deque[tuple[float, int]] = deque(maxlen=21)  # (time, completed rounds) of the last 20 rounds
        self._bar: _Bars | NotebookBars | None = None
        self._task: int | None = None
        self._scores: Mapping[str, float] = {}
        self._headline = "accuracy"
        self._lock = threading.RLock()
        self._waiting: deque[str] = deque()
        self._writing = False

    @property
    def live(self) -> bool:
        """True if the display overwrites itself: bars on a terminal or in a notebook."""
        return self.mode in ("bar", "notebook")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._task = None

    def start(self, total_rounds: int, done_rounds: int, description: str, headline: str = "accuracy") -> None:
        """Show the start of the training.

        Args:
            total_rounds: Rounds of the finished run.
            done_rounds: Rounds completed before. 0 for a new run.
            description: Name of the run.
            headline: The objective's main score.
        """
        self._total, self._headline = total_rounds, headline
        self._times.clear()
        self._times.append((self._clock(), done_rounds))
        if self.mode == "json":
            self._print_event("start", description=description, total_rounds=total_rounds, done_rounds=done_rounds)
        elif self.live:
            self._task = self._show_bar().add_task(description, total=total_rounds, completed=done_rounds, status="")
        else:
            completed = f", {done_rounds} of them done" if done_rounds else ""
            self._print_line(f"{description}: {total_rounds} rounds{completed}")

    def round(self, report: RoundReport) -> None:
        """Show the report of a completed round."""
        self._times.append((self._clock(), report.round))
        left = self._estimate_seconds_left(report.round)
        scores = _select_headlines(report.scores, self._headline)
        self._scores = scores or self._scores
        if self.mode == "json":
            self._print_event(
                "round",
                round=report.round,
                total=self._total,
                **({"phase": report.phase} if report.phase else {}),
                loss=report.loss,
                scores=scores,
                **({"privacy": report.privacy} if report.privacy else {}),
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
            parts = [
                report.phase,
                _format_loss(report),
                format_scores(self._scores, self._headline),
                report.privacy,
                *_format_work(report),
            ]
            bar = self._show_bar()
            bar.below = printable("  ".join(part for part in parts if part))
            status = f"round {report.round}/{self._total}  {format_duration(left)} left"
            bar.update(TaskID(self._task), completed=report.round, status=status)
        else:
            number = f"round {report.round:{len(str(self._total))}d}/{self._total}"
            parts = [number, report.phase, _format_loss(report)]
            parts += [
                format_scores(scores, self._headline),
                report.privacy,
                f"{report.used} clients",
                *_format_work(report),
                f"{format_size(report.bytes_down)} down",
            ]
            parts += [f"{format_size(report.bytes_up)} up", f"{format_duration(left)} left"]
            self._print_line("  ".join(part for part in parts if part))

    def message(self, text: str) -> None:
        """Show a message to the user. Quiet mode drops it."""
        if self.mode == "json":
            self._print_event("message", text=text)
        else:
            self._print_line(text)

    def finish(self, result: Result, seconds: float, next_step: str = "", verdict: Verdict | None = None) -> None:
        """Show the result at the end of a command.

        Args:
            result: Result of the run.
            seconds: Wall-clock time of this command in seconds.
            next_step: Suggested next command, such as ``"raydfl resume runs/x"``.
            verdict: Verdict on the run.
        """
        self.close()
        if self.mode == "json":
            self._print_event(
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
                **({"best": _best_to_dict(result.best)} if result.best is not None else {}),
                **({"controls": [asdict(control) for control in result.controls]} if result.controls else {}),
                **({"verdict": verdict.to_dict()} if verdict is not None else {}),
            )
            return
        scores = f": {format_scores(result.scores, self._headline)}" if result.scores else ""
        self._print_line(
            f"{result.status} after {result.round} of {self._total} rounds, {format_duration(seconds)}{scores}"
        )
        if result.ended:
            self._print_line(f"stopped in round {result.round}: {result.ended}")
        if result.best is not None:
            self._print_line(f"best: {result.best.text}")
        for problem in result.problems:
            self._print_line(f"{'worthless' if problem.worthless else 'warning'}: {problem.text}")
        self._print_line(f"run directory: {result.run_dir}")
        if verdict is not None:
            for line in (f"report: {display_path(result.run_dir)}/report.html", *verdict.lines):
                self._print_line(line)
        if next_step:
            self._print_line(f"next: {next_step}")

    @contextmanager
    def steps(self, description: str, total: int | None) -> Iterator[Advance]:
        """Show the progress of work in countable steps, such as preparing features.

        Args:
            description: Name of the work, such as ``"features"``.
            total: Number of steps. ``None`` if unknown.

        Yields:
            ``advance(count=1)``. Call it from this thread after each completed step.
        """
        if self.live:
            with self._show_bar_steps(description, total) as advance:
                yield advance
            return
        done, shown, shown_at = 0, -1, self._clock()

        def show() -> None:
            nonlocal shown, shown_at
            shown, shown_at = done, self._clock()
            if self.mode == "json":
                self._print_event("steps", description=description, done=done, total=total)
            else:
                self._print_line(f"{description}: {done}" + ("" if total is None else f" of {total}"))

        def advance_lines(count: int = 1) -> None:
            nonlocal done
            done += count
            if self._clock() - shown_at >= _STEP_SECONDS:
                show()

        yield advance_lines
        if done != shown:
            show()

    @contextmanager
    def _show_bar_steps(self, description: str, total: int | None) -> Iterator[Advance]:
        opened_here = self._bar is None
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
            if opened_here:
                self.close()
            else:
                bar.remove_task(task)

    def _show_bar(self) -> _Bars | NotebookBars:
        """Return the live display of rounds and steps, opening it if necessary. A terminal can have only one."""
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

    def _estimate_seconds_left(self, done: int) -> float:
        """Estimate the remaining time from the last rounds, including evaluation and commits."""
        (first_time, first_round), (last_time, last_round) = self._times[0], self._times[-1]
        if last_round <= first_round:
            return float("nan")
        return (last_time - first_time) / (last_round - first_round) * (self._total - done)

    def _print_line(self, text: str) -> None:
        self._print_text(printable(text))

    def _print_text(self, text: str) -> None:
        """Write a line of text."""
        # A signal handler may print while this thread is writing. Streams reject nested writes, so its line waits.
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
            self._bar.print_line(text)
        elif self.mode != "quiet":
            print(text, file=self._stream, flush=True)

    def _print_event(self, event: str, **values: Any) -> None:
        self._print_text(json.dumps(replace_non_finite({"event": event, **values}), allow_nan=False))


def default_progress() -> Progress:
    """Return the default display of a run started from Python: bars in a notebook, no output elsewhere."""
    return Progress("notebook" if is_notebook() else "quiet")


def _format_loss(report: RoundReport) -> str:
    """Format the training loss. Empty if it is withheld."""
    loss = report.loss
    if report.withheld:
        return ""
    return f"loss {loss:.4f}" if not abs(loss) >= 1e6 else f"loss {loss:.4g}"


def _format_work(report: RoundReport) -> list[str]:
    """List the speed, the late clients and the failures of a round, if any."""
    parts = [f"{report.clients_per_second:.1f} clients/s"] if report.training_seconds > 0 else []
    if report.cut:
        parts.append(f"{len(report.cut)} late")
    if report.rejected:
        client, reason = next(iter(report.rejected.items()))
        parts.append(f"{len(report.rejected)} failed ({client}: {reason[:_REASON]})")
    return parts


def _best_to_dict(best: Leader) -> dict[str, Any]:
    """Convert the best round to a mapping for JSON."""
    return {
        "round": best.round,
        "metric": best.criterion.metric,
        "value": best.value,
        "chosen_by": best.criterion.chooser,
    }
