"""Terminal output of the command ``raydfl study``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydfl.core.errors import printable
from raydfl.core.files import display_path
from raydfl.experiments import (
    Study,
    StudyResults,
    describe_results,
    format_best_command,
    make_summary_table,
    run_study,
)
from raydfl.runs import Progress

_MOST_NAMED = 10
"""Largest number of runs to name at the end, and of draws of a search to show."""


def describe_study(study: Study) -> str:
    """Summarise a valid study in a few lines."""
    settings = study.settings
    lines = [settings.title, *filter(None, [settings.question])]
    lines += [f"  {name}: {', '.join(labels)}" for name, labels in settings.axes.items()]
    lines += [f"  {key}: {domain}" for key, domain in settings.domains.items()]
    for labels in study.cells:
        own = {
            key: domain for key, domain in settings.get_domains(labels).items() if domain != settings.domains.get(key)
        }
        lines += [f"  {', '.join(labels)}: {key}: {domain}" for key, domain in own.items()]
    cells, shared = len(study.cells), len(study.trials) - len(study.distinct)
    counts = [f"{cells} cell{'s' if cells > 1 else ''}"] if study.axes else []
    counts.append(f"{study.total} runs" + (f" ({shared} shared by cells)" if shared else ""))
    counts.append(f"{sum(trial.finished for trial in study.distinct)} finished, in {study.folder}")
    lines.append(", ".join(counts))
    if settings.domains:
        metric, rounds = study.first.metric, max(trial.config.train.rounds for trial in study.distinct or [study.first])
        lines.append(
            f"searcher {settings.searcher}, scheduler {settings.scheduler.name}, at most {rounds} rounds, best: "
            f"{metric.best} of {metric.title}"
        )
    return "\n".join([*lines, "All configurations are valid."])


def do_study(study: Study, progress: Progress, table_only: bool = False) -> int:
    """Train the runs of a study, then write and print the results.

    Args:
        study: the study.
        progress: display of the progress and the messages.
        table_only: whether to write and print the results so far without training.

    Returns:
        The exit code of the command: 0 if all runs are finished or ``table_only`` is true, else 1.
    """
    results = run_study(study, progress, table_only=table_only)
    progress.close()
    if progress.mode in ("bar", "lines"):
        _print(Console(highlight=False, width=None if progress.mode == "bar" else 200), results)
    _report(progress, [f"failed: {name}: {reason}" for name, reason in results.failed.items()], "failed")
    if results.failed:
        logs = display_path(study.folder / "logs")
        _show_problem(progress, f"The tracebacks of failures are in {logs}. Run the same command to retry these runs.")
    worthless = [f"worthless: {row['run']}: {row['problems']}" for row in results.runs if row.get("worthless")]
    _report(progress, worthless, "are worthless")
    if results.open:
        progress.message(f"{results.open} runs are not finished. Run the same command to continue them.")
    if results.best is not None:
        progress.message(f"best: {results.best.name}: {results.best.trials[0].text}")
        progress.message(f"to train with these settings: {format_best_command(results)}")
    progress.message(f"tables: {', '.join(display_path(study.output(suffix)) for suffix in ('.md', '.tex', '.csv'))}")
    progress.message(f"next: open {display_path(study.output('.html'))}")
    return 0 if table_only or results.complete else 1


def _print(console: Console, results: StudyResults) -> None:
    """Print the table and the notes. Lines separate the values of the leading axes."""
    study = results.study
    headings, lines = make_summary_table(results)
    left = len(study.axes) + (1 + len(study.searched) if study.searched else 0)
    table = Table(title=study.settings.title, title_justify="left")
    for place, name in enumerate(headings):
        table.add_column(Text(name), justify="left" if place < left else "right", overflow="fold")
    rows = lines[:_MOST_NAMED] if study.settings.domains else lines
    for before, line in zip([rows[0] if rows else [], *rows], rows, strict=False):
        if len(study.axes) > 1 and line[: len(study.axes) - 1] != before[: len(study.axes) - 1]:
            table.add_section()
        table.add_row(*(Text(text.replace("**", "")) for text in line))
    console.print(table)
    if len(lines) > len(rows):
        console.print(f"and {len(lines) - len(rows)} more draws: {display_path(study.output('.csv'))}", markup=False)
    for note in describe_results(results):
        console.print(note, markup=False)


def _report(progress: Progress, messages: Sequence[str], what: str) -> None:
    for message in messages[:_MOST_NAMED]:
        _show_problem(progress, message)
    if len(messages) > _MOST_NAMED:
        _show_problem(progress, f"and {len(messages) - _MOST_NAMED} more {what}")


def _show_problem(progress: Progress, text: str) -> None:
    """Show a message. Quiet mode prints it to the error stream."""
    if progress.mode == "quiet":
        print(printable(text), file=sys.stderr)  # noqa: T201
    else:
        progress.message(text)
