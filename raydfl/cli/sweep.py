"""The command ``raydfl sweep``."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydfl.experiments.sweep.grid import Sweep
from raydfl.experiments.sweep.page import write_page
from raydfl.experiments.sweep.results import Results, collect, columns, lines, write_tables
from raydfl.experiments.sweep.run import SweepOutcome, is_finished, run_sweep
from raydfl.runs import Progress

_NAMED = 10
"""Runs that are named one by one at the end."""


def describe(sweep: Sweep) -> str:
    """Return a sweep that was checked, in a few lines."""
    axes = [f"  {name}: {', '.join(labels)}" for name, labels in sweep.settings.axes.items()]
    distinct = sweep.distinct
    done = sum(is_finished(run) for run in distinct)
    shared = len(sweep.runs) - len(distinct)
    cells = len(sweep.cells)
    count = f"{cells} cell{'s' if cells > 1 else ''}, {len(distinct)} runs" + (
        f" ({shared} shared by cells)" if shared else ""
    )
    return "\n".join(
        [sweep.settings.title, *axes, f"{count}, {done} finished, in {sweep.folder}", "all configurations are valid"]
    )


def do_sweep(sweep: Sweep, progress: Progress, parallel: int | None = None, table_only: bool = False) -> int:
    """Do the runs, unless only the table of what is there is wanted, and write and show the results.

    Returns:
        The command's exit code: 0 when every run is finished (or only the table was wanted), else 1.
    """
    outcome = SweepOutcome() if table_only else run_sweep(sweep, parallel, progress)
    results = collect(sweep)
    written = write_tables(results)
    page = write_page(results)
    progress.close()
    if progress.mode in ("bar", "lines"):
        show(results, Console(highlight=False, width=None if progress.mode == "bar" else 200))
    for name, reason in list(outcome.failed.items())[:_NAMED]:
        progress.message(f"failed: {name}: {reason}")
    if len(outcome.failed) > _NAMED:
        progress.message(f"and {len(outcome.failed) - _NAMED} more failed")
    if outcome.failed:
        progress.message(
            f"what failed is told in full in {_shown(sweep.folder / 'logs')}; the same command tries it again"
        )
    worthless = [row for row in results.runs if row.get("worthless")]
    for row in worthless[:_NAMED]:
        progress.message(f"worthless: {row['run']}: {row['problems']}")
    if len(worthless) > _NAMED:
        progress.message(f"and {len(worthless) - _NAMED} more are worthless")
    if outcome.stopped:
        progress.message(f"{len(outcome.stopped)} runs are not finished; the same command goes on with them")
    progress.message(f"tables: {', '.join(_shown(path) for path in written)}")
    progress.message(f"next: open {_shown(page)}")
    return 0 if outcome.complete else 1


def _shown(path: os.PathLike[str]) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def show(results: Results, console: Console) -> None:
    """Print the table, on a terminal or as text."""
    table = Table(title=results.sweep.settings.title, title_justify="left")
    labels = len(results.sweep.axes)
    for place, name in enumerate(columns(results)):
        table.add_column(Text(name), justify="left" if place < labels else "right", overflow="fold")
    before: list[str] = []
    for line in lines(results):
        if before and line[: labels - 1] != before[: labels - 1]:
            table.add_section()
        table.add_row(*(Text(text) for text in line))
        before = line
    console.print(table)
    for note in results.notes:
        console.print(note, markup=False)
