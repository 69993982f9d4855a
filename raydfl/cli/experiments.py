"""The commands ``raydfl sweep`` and ``raydfl search``: what they do and show."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydfl.core.files import displayed_path
from raydfl.experiments import label_of
from raydfl.experiments.search import Search, best_command, run_search, trial_name
from raydfl.experiments.search import columns as columns_of_trials
from raydfl.experiments.search import lines as lines_of_trials
from raydfl.experiments.sweep import Sweep, SweepOutcome, collect, columns, lines, run_sweep, write_page, write_tables
from raydfl.runs import Progress

_NAMED = 10
"""Runs or trials that are shown one by one at the end."""


def describe_sweep(sweep: Sweep) -> str:
    """Describe a sweep that was checked in a few lines."""
    axes = [f"  {name}: {', '.join(labels)}" for name, labels in sweep.settings.axes.items()]
    distinct, cells = sweep.distinct, len(sweep.cells)
    shared = len(sweep.runs) - len(distinct)
    count = f"{cells} cell{'s' if cells > 1 else ''}, {len(distinct)} runs"
    count += f" ({shared} shared by cells)" if shared else ""
    count += f", {sum(run.finished for run in distinct)} finished, in {sweep.folder}"
    return "\n".join([sweep.settings.title, *axes, count, "all configurations are valid"])


def describe_search(search: Search) -> str:
    """Describe a search that was checked in a few lines."""
    settings = search.settings
    space = [f"  {key}: {domain.kind} {label_of(list(domain.values))}" for key, domain in settings.space.items()]
    turns = f" ({search.samples} members, {len(search.turns)} turns)" if len(search.turns) > 1 else ""
    count = (
        f"{search.trials} trials{turns} of at most {search.rounds} rounds, searcher {settings.searcher}, scheduler "
        f"{settings.scheduler.name}, best: {settings.metric.best} of {settings.metric.title}, in {search.folder}"
    )
    return "\n".join([settings.title, *space, count, "the corners of the space are valid configurations"])


def do_sweep(sweep: Sweep, progress: Progress, parallel: int | None = None, table_only: bool = False) -> int:
    """Do the runs, unless only the table of what is there is wanted, and write and show the results.

    Returns:
        The command's exit code: 0 when every run is finished (or only the table was wanted), else 1.
    """
    outcome = SweepOutcome() if table_only else run_sweep(sweep, parallel, progress)
    results = collect(sweep)
    written, page = write_tables(results), write_page(results)
    console = _console(progress)
    if console is not None:
        _show(console, sweep.settings.title, columns(results), lines(results), left=len(sweep.axes), sections=True)
        for note in results.notes:
            console.print(note, markup=False)
    failed = [f"failed: {name}: {reason}" for name, reason in outcome.failed.items()]
    _tell(progress, failed, "failed")
    _say_where(progress, bool(failed), sweep.folder / "logs")
    worthless = [f"worthless: {row['run']}: {row['problems']}" for row in results.runs if row.get("worthless")]
    _tell(progress, worthless, "are worthless")
    if outcome.stopped:
        progress.message(f"{len(outcome.stopped)} runs are not finished; the same command goes on with them")
    progress.message(f"tables: {', '.join(displayed_path(path) for path in written)}")
    progress.message(f"next: open {displayed_path(page)}")
    return 0 if outcome.complete else 1


def do_search(search: Search, progress: Progress, table_only: bool = False) -> int:
    """Do the trials, unless only the page of what is there is wanted, and write and show the results.

    Returns:
        The command's exit code: 0 when all trials are over (or only the page was wanted), else 1.
    """
    results = run_search(search, progress, table_only=table_only)
    console, body = _console(progress), lines_of_trials(results)
    if console is not None:
        _show(console, search.settings.title, columns_of_trials(results), body[:_NAMED], left=2)
        if len(body) > _NAMED:
            console.print(f"and {len(body) - _NAMED} more trials: trials.csv", markup=False)
    _tell(progress, [f"failed: {name}: {reason}" for name, reason in results.failed.items()], "failed")
    _say_where(progress, bool(results.failed), search.output("logs"))
    if results.open:
        progress.message(f"{results.open} trials are not over; the same command goes on with them")
    if results.best is not None:
        progress.message(f"best: {trial_name(results.best.number)}: {results.best.text}")
        progress.message(f"to train with it: {best_command(results)}")
    progress.message(f"next: open {displayed_path(search.output('search.html'))}")
    return 0 if table_only or results.complete else 1


def _console(progress: Progress) -> Console | None:
    """Close the progress; return where tables are shown, if anywhere."""
    progress.close()
    if progress.mode not in ("bar", "lines"):
        return None
    return Console(highlight=False, width=None if progress.mode == "bar" else 200)


def _show(
    console: Console,
    title: str,
    headings: Sequence[str],
    body: Sequence[Sequence[str]],
    left: int,
    sections: bool = False,
) -> None:
    """Print a table; ``left``: columns of labels, by all of which but the last it has sections."""
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(headings):
        table.add_column(Text(name), justify="left" if place < left else "right", overflow="fold")
    before: Sequence[str] = []
    for line in body:
        if sections and before and line[: left - 1] != before[: left - 1]:
            table.add_section()
        table.add_row(*(Text(text) for text in line))
        before = line
    console.print(table)


def _tell(progress: Progress, messages: Sequence[str], what: str) -> None:
    for message in messages[:_NAMED]:
        progress.message(message)
    if len(messages) > _NAMED:
        progress.message(f"and {len(messages) - _NAMED} more {what}")


def _say_where(progress: Progress, failed: bool, logs: os.PathLike[str]) -> None:
    if failed:
        progress.message(f"what failed is told in full in {displayed_path(logs)}; the same command tries it again")
