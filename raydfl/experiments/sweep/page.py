"""The page of a sweep: its tables, learning curves with their spread, bars and heat maps. Self-contained, as a run's page is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from raydfl.core.files import write_durably
from raydfl.experiments.sweep.results import CellResult, Results, columns, lines, pivot
from raydfl.runs.report import Picture, Pictures, render
from raydfl.runs.report import figures as plots
from raydfl.runs.report.figures import Bars, Series

_BARS = 48
"""Bars that one figure has room for."""


def write_page(results: Results) -> Path:
    """Write ``<name>.html`` into the sweep's folder.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    settings, pictures = results.sweep.settings, Pictures()
    missing = sum(cell.wanted - cell.done for cell in results.cells)
    total = sum(cell.wanted for cell in results.cells)
    notes = [f"{missing} of {total} runs are missing: raydfl sweep {results.sweep.file} goes on."] if missing else []
    compared, maps = [], []
    for where, cells in _parts(results, 2 if len(results.sweep.axes) > 1 else 1).items():
        compared += _bars(where, cells, results, pictures)
        maps += _maps(where, cells, results, pictures)
    curves = [
        picture for where, cells in _parts(results, 1).items() for picture in _curves(", ".join(where), cells, pictures)
    ]
    folder = results.sweep.folder
    page = render(
        "sweep.html.j2",
        title=settings.title,
        subtitle=f"{len(results.cells)} cells, {total} runs · {folder}",
        notes=notes,
        text=settings.note,
        explanations=results.notes,
        pivot=pivot(results),
        compared=compared,
        maps=maps,
        learning=curves,
        table_of=(columns(results), lines(results)),
        runs=[_run_line(row, results) for row in results.runs],
        axes=results.sweep.axes,
    )
    out = results.sweep.output(".html")
    write_durably(out, page.encode())
    return out


def _run_line(row: dict[str, object], results: Results) -> dict[str, object]:
    state = "finished" if row["finished"] else (f"round {row['rounds']}" if row["rounds"] else "missing")
    if row.get("worthless"):
        state += f", worthless: {row['problems']}"
    labels = [str(row[name]) for name in results.sweep.axes]
    return {"labels": labels, "repeat": row["repeat"], "state": state, "folder": row["run"], "page": row["finished"]}


def _parts(results: Results, inner: int) -> dict[tuple[str, ...], list[CellResult]]:
    """Return the cells that one figure shows: those with equal labels on all but the ``inner`` last axes."""
    parts: dict[tuple[str, ...], list[CellResult]] = {}
    for cell in results.cells:
        parts.setdefault(cell.labels[:-inner], []).append(cell)
    return parts


def _curves(where: str, cells: list[CellResult], pictures: Pictures) -> list[Picture]:
    """Draw the headline over the rounds: a curve for each label of the last axis."""
    series = []
    for place, cell in enumerate(cells):
        if not cell.curves:
            continue
        rounds = cell.curves[0].rounds
        for curve in cell.curves[1:]:
            rounds = np.intersect1d(rounds, curve.rounds)
        values = np.array([curve.values[np.searchsorted(curve.rounds, rounds)] for curve in cell.curves])
        mean, low, high = values.mean(axis=0), None, None
        if len(values) > 1:
            spread = values.std(axis=0, ddof=1)
            low, high = mean - spread, mean + spread
        series.append(Series(cell.labels[-1], rounds, mean, low, high, place, place))
    if not series:
        return []
    title, unit = cells[0].metrics[0].title, _unit(cells)
    caption = (
        "Bands: mean plus and minus the standard deviation." if any(item.low is not None for item in series) else ""
    )
    return [pictures.add(f"{title}{f', {where}' if where else ''}", caption, plots.curves, series, unit)]


def _unit(cells: list[CellResult]) -> str:
    """Return the label of a figure of these cells, which may have different headlines."""
    titles = list(dict.fromkeys(cell.metrics[0].title for cell in cells))
    return " or ".join(titles) + (" (%)" if cells[0].metrics[0].scale == 100 else "")


def _grid(cells: list[CellResult]) -> tuple[list[str], list[str], dict[tuple[str, str], CellResult]]:
    """Return labels of the last axis but one (a blank one when there is none), of the last, and the cells by both."""
    by_both = {(cell.labels[-2] if len(cell.labels) > 1 else "", cell.labels[-1]): cell for cell in cells}
    return list(dict.fromkeys(key[0] for key in by_both)), list(dict.fromkeys(key[1] for key in by_both)), by_both


def _bars(where: tuple[str, ...], cells: list[CellResult], results: Results, pictures: Pictures) -> list[Picture]:
    """Draw the headline with its spread, and the paper's numbers."""
    groups, labels, by_both = _grid(cells)
    if not any(cell.done for cell in cells) or len(groups) * len(labels) > _BARS:
        return []
    summary, nothing = results.sweep.settings.summary, float("nan")

    def numbers(cell: CellResult | None) -> tuple[float, float, float]:
        if cell is None:
            return nothing, nothing, nothing
        score = cell.score(summary)
        return score.mean, score.std, nothing if cell.paper is None else cell.paper[0]

    series = [Bars(label, *np.array([numbers(by_both.get((group, label))) for group in groups]).T) for label in labels]
    title = ", ".join((_unit(cells), *where))
    caption = (
        "Lines: standard deviation over the runs." if any(np.isfinite(item.spread).any() for item in series) else ""
    )
    return [pictures.add(title, caption, plots.bars, series, groups, _unit(cells), "paper")]


def _maps(where: tuple[str, ...], cells: list[CellResult], results: Results, pictures: Pictures) -> list[Picture]:
    """Draw the headline, and its drop, as a matrix of the last two axes."""
    rows, columns_, by_both = _grid(cells)
    if len(rows) < 2 or len(columns_) < 2 or not any(cell.done for cell in cells):
        return []
    names = (results.sweep.axes[-2], results.sweep.axes[-1])
    made = []
    for title, value in _kinds(cells, results):
        matrix = np.full((len(rows), len(columns_)), np.nan)
        for (row, column), cell in by_both.items():
            matrix[rows.index(row), columns_.index(column)] = value(cell)
        if np.isfinite(matrix).any():
            made.append(pictures.add(", ".join((title, *where)), "", plots.heat_map, matrix, rows, columns_, names))
    return made


def _kinds(cells: list[CellResult], results: Results) -> list[tuple[str, Callable[[CellResult], float]]]:
    """Return by title what there is a heat map of: the headline, its drop, and the further numbers."""
    settings = results.sweep.settings

    def mean(place: int) -> Callable[[CellResult], float]:
        return lambda cell: cell.score(settings.summary, place).mean

    kinds: list[tuple[str, Callable[[CellResult], float]]] = [(_unit(cells), mean(0))]
    if settings.reference:
        kinds.append(("drop", lambda cell: float("nan") if cell.drop is None else cell.drop))
    return kinds + [(metric.title, mean(place)) for place, metric in enumerate(settings.also, start=1)]
