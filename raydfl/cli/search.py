"""The command ``raydfl search``."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydfl.core.errors import RunDirectoryError
from raydfl.experiments.plan import label_of
from raydfl.experiments.search.page import write_page
from raydfl.experiments.search.plan import Search, trial_name
from raydfl.experiments.search.results import SearchResults, best_command, collect, columns, lines, write_tables
from raydfl.experiments.search.run import SearchOutcome, opened, outcome_of, run_search, write_reports
from raydfl.experiments.search.tracking import SearchTracker
from raydfl.runs import Progress

_NAMED = 10
"""Trials that are shown at the end."""


def describe(search: Search) -> str:
    """Return a search that was checked, in a few lines."""
    settings = search.settings
    space = [f"  {key}: {domain.kind} {label_of(list(domain.values))}" for key, domain in settings.space.items()]
    turns = f" ({search.samples} members, {len(search.turns)} turns)" if len(search.turns) > 1 else ""
    return "\n".join(
        [
            settings.title,
            *space,
            f"{search.trials} trials{turns} of at most {search.rounds} rounds, searcher {settings.searcher}, scheduler "
            f"{settings.scheduler.name}, best: {settings.metric.best} of {settings.metric.title}, in {search.folder}",
            "the corners of the space are valid configurations",
        ]
    )


def do_search(search: Search, progress: Progress, table_only: bool = False) -> int:
    """Do the trials, unless only the page of what is there is wanted, and write and show the results.

    Returns:
        The command's exit code: 0 when all trials are over (or only the page was wanted), else 1.
    """
    if table_only and not search.output("search.json").exists():
        raise RunDirectoryError(f"there is no search in {search.folder}; without --table the command begins it there")
    with opened(search) as journal:
        mirror = None if table_only else SearchTracker(search, journal, progress.message)
        written = []
        try:
            outcome = outcome_of(search, journal) if table_only else run_search(search, journal, mirror, progress)
        finally:
            write_reports(search, journal)
            results = collect(search, journal)
            written = [*write_tables(results), write_page(results)]
            if mirror is not None:
                mirror.close(written, outcome_of(search, journal).complete)
    progress.close()
    if progress.mode in ("bar", "lines"):
        show(results, Console(highlight=False, width=None if progress.mode == "bar" else 200))
    tell(search, results, outcome, progress)
    return 0 if table_only or outcome.complete else 1


def tell(search: Search, results: SearchResults, outcome: SearchOutcome, progress: Progress) -> None:
    """Print what is left to do, what failed, and what comes next."""
    for number, reason in list(outcome.failed.items())[:_NAMED]:
        progress.message(f"failed: {trial_name(number)}: {reason}")
    if outcome.failed:
        progress.message(
            f"what failed is told in full in {_shown(search.output('logs'))}; the same command tries it again"
        )
    if outcome.open:
        progress.message(f"{outcome.open} trials are not over; the same command goes on with them")
    if results.best is not None:
        text = " ".join(f"{key}={label_of(value)}" for key, value in results.best.values.items())
        progress.message(f"best: {trial_name(results.best.number)}: {text}")
        progress.message(f"to train with it: {best_command(results)}")
    progress.message(f"next: open {_shown(search.output('search.html'))}")


def _shown(path: os.PathLike[str]) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def show(results: SearchResults, console: Console) -> None:
    """Print the best trials, on a terminal or as text."""
    table = Table(title=results.search.settings.title, title_justify="left")
    for place, name in enumerate(columns(results)):
        table.add_column(Text(name), justify="left" if place < 2 else "right", overflow="fold")
    body = lines(results)
    for line in body[:_NAMED]:
        table.add_row(*(Text(text) for text in line))
    console.print(table)
    if len(body) > _NAMED:
        console.print(f"and {len(body) - _NAMED} more trials: trials.csv", markup=False)
