"""Reports of runs: a self-contained HTML page about one run or a comparison of several, without network access."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from raydfl.core.errors import InputError
from raydfl.core.files import write_atomically, writing
from raydfl.data import check_tables
from raydfl.engine import Config
from raydfl.runs.report import figures
from raydfl.runs.report.compare import render_comparison
from raydfl.runs.report.controls import measure_once
from raydfl.runs.report.cost import split_round_times
from raydfl.runs.report.data import Curve, Key, RunRecord, align, read_run
from raydfl.runs.report.diagnosis import find_problems
from raydfl.runs.report.figures import Plot
from raydfl.runs.report.fleet import plot_fleet
from raydfl.runs.report.page import Section, render_page
from raydfl.runs.report.partition import plot_partition
from raydfl.runs.report.plateau import PlateauSettings, find_plateau
from raydfl.runs.report.run import draw_figures, render_run
from raydfl.runs.report.verdict import judge

__all__ = [
    "Curve",
    "Key",
    "PlateauSettings",
    "Plot",
    "RunRecord",
    "Section",
    "align",
    "draw_figures",
    "figures",
    "find_plateau",
    "find_problems",
    "judge",
    "measure_run",
    "plot_fleet",
    "plot_partition",
    "read_run",
    "render_page",
    "split_round_times",
    "write_page",
    "write_report",
]


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write a report about one run, or a comparison of several runs.

    Args:
        run_dirs: Folders of finished or unfinished runs. Runs that differ only in seed and machine are shown as one, with mean
            and range.
        out: Path of the HTML file, which is overwritten, or a folder for ``report.html``.

    Returns:
        The path of the HTML file.

    Raises:
        InputError: ``run_dirs`` is empty, or ``out`` cannot be written.
        ResourcesError: The disk is full.
        RunDirectoryError: A folder is missing, is not a run directory, or contains a damaged file.
    """
    folders = list(dict.fromkeys(folder.resolve() for folder in run_dirs))
    if not folders:
        raise InputError("no run directory is given. Name at least one, such as runs/<name>.")
    return write_page([measure_run(folder) for folder in folders], out)


def measure_run(folder: Path, config: Config | None = None) -> RunRecord:
    """Measure the controls of a run if they are missing, then read the run like :func:`read_run`.

    Args:
        folder: Folder of the run.
        config: Configuration of the run. ``None``: read it from the folder.
    """
    if config is None:
        check_tables(folder)
    failure, run = measure_once(folder, config), read_run(folder)
    return dataclasses.replace(run, controls_note=failure) if failure else run


def write_page(runs: Sequence[RunRecord], out: Path) -> Path:
    """Write a report about runs in memory, like :func:`write_report`."""
    page = render_run(runs[0]) if len(runs) == 1 else render_comparison(runs)
    out = out / "report.html" if out.is_dir() else out
    content = page.encode()
    try:
        with writing(out.parent, len(content), "the files of the report", "make room or choose another file"):
            write_atomically(out, lambda path: path.write_bytes(content))
    except OSError as error:
        raise InputError(f"the report {out} cannot be written: {error.strerror}. Choose another file.") from error
    return out
