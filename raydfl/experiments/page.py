"""The page of a study: its tables, learning curves with their spread, bars and heat maps, and what mattered in a search."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape

from raydfl.core.files import write_durably
from raydfl.experiments.domains import Domain
from raydfl.experiments.results import FEWEST, Contestant, StudyResults, shown
from raydfl.experiments.study import describe_value
from raydfl.experiments.tables import Table, describe_results, full_table, pivot
from raydfl.runs.report import Picture, Pictures, render
from raydfl.runs.report import figures as plots
from raydfl.runs.report.figures import Axis, Bars, Series

_BARS = 48
"""Bars that one figure has room for."""
_TICKS = 5
"""Values of a listed domain that its axis names, at most."""
_NAMED = 6
"""Curves of draws with a colour and a name of their own: the best ones."""


def write_page(results: StudyResults) -> Path:
    """Write ``NAME.html`` into the study's folder; it needs no other file.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    study, pictures = results.study, Pictures()
    settings, best = study.settings, results.best
    left = results.open + len(results.failed)
    compared: list[Picture] = []
    maps: list[Picture] = []
    curves: list[Picture] = []
    if not settings.domains:
        for where, cells in _parts(results, 2 if len(study.axes) > 1 else 1).items():
            compared += _bars(where, cells, results, pictures)
            maps += _maps(where, cells, results, pictures)
    for where, cells in _parts(results, 0 if settings.domains else 1).items():
        curves += _curves(where, cells, results, pictures)
    page = render(
        "study.html.j2",
        title=settings.title,
        subtitle=f"{len(results.contestants)} contestants, {study.total} runs · {study.folder}",
        notes=[f"{left} of {study.total} runs are missing: raydfl study {study.file} continues."] if left else [],
        text=[text for text in (settings.question, settings.note) if text],
        search=bool(settings.domains),
        best=[] if best is None else [[key, describe_value(value)] for key, value in best.values.items()],
        best_text=""
        if best is None
        else f"{best.name}: {results.headline} {best.score(results.summary)} (n: {best.n}).",
        command=best_command(results),
        explanations=describe_results(results),
        pivot=None if settings.domains else _emphasise(pivot(results)),
        galleries=[
            ("Comparison", compared),
            ("Heat maps", maps),
            ("What mattered", _importance(results, pictures)),
            ("Settings and scores", _parallel(results, pictures)),
            ("Learning curves", curves),
        ],
        table_of=_emphasise(full_table(results)),
        runs=[_run_line(row, results) for row in results.runs],
        left=[*study.axes, *settings.domains],
        failures=[[name, reason] for name, reason in results.failed.items()],
    )
    out = study.output(".html")
    write_durably(out, page.encode())
    return out


def _emphasise(table: Table) -> tuple[list[str], list[list[Markup]]]:
    """Turn ``**bold**`` text into HTML."""
    headings, lines = table
    bold = r"<strong>\1</strong>"
    return headings, [
        [Markup(re.sub(r"\*\*(.+?)\*\*", bold, str(escape(text)))) for text in line] for line in lines
    ]  # escaped


def best_command(results: StudyResults) -> str:
    """Return the command that trains with the best settings."""
    return f"raydfl run {shlex.quote(str(results.study.output('-best.yaml')))}"


def _run_line(row: dict[str, object], results: StudyResults) -> dict[str, object]:
    study, state = results.study, str(row["state"])
    if row.get("worthless"):
        state += f", worthless: {row['problems']}"
    labels = [describe_value(row[name]) for name in (*study.axes, *study.settings.domains)]
    page = (study.folder / str(row["run"]) / "report.html").exists()
    return {"labels": labels, "repeat": row["repeat"], "state": state, "folder": row["run"], "page": page}


def _parts(results: StudyResults, inner: int) -> dict[tuple[str, ...], list[Contestant]]:
    """Return the contestants of each figure: those with equal labels on all but the ``inner`` last axes."""
    parts: dict[tuple[str, ...], list[Contestant]] = {}
    for each in results.contestants:
        parts.setdefault(each.labels[: len(each.labels) - inner], []).append(each)
    return parts


def _curves(
    where: tuple[str, ...], cells: Sequence[Contestant], results: StudyResults, pictures: Pictures
) -> list[Picture]:
    """Draw the headline over the rounds: a curve for each label of the last axis, or for each draw."""
    series, search = [], bool(results.study.settings.domains)
    for place, each in enumerate(cells):
        if not each.curves:
            continue
        rounds = each.curves[0].rounds
        for curve in each.curves[1:]:
            rounds = np.intersect1d(rounds, curve.rounds)
        values = np.array([curve.values[np.searchsorted(curve.rounds, rounds)] for curve in each.curves])
        mean, low, high = values.mean(axis=0), None, None
        if len(values) > 1:
            spread = values.std(axis=0, ddof=1)
            low, high = mean - spread, mean + spread
        if search:
            label = each.draw + ("" if each.complete else f" ({each.states[0]})")
            look = (place, 0 if each.complete else 1) if place < _NAMED else (6, 0 if each.complete else 1)
            series.append(Series(label if place < _NAMED else "", rounds, mean, low, high, *look))
        else:
            series.append(Series(each.labels[-1], rounds, mean, low, high, place, place))
    if not series:
        return []
    caption = "Bands: mean ± standard deviation." if any(item.low is not None for item in series) else ""
    if search:
        caption += f" Dashed: stopped early or not finished. Draws after the best {_NAMED} are grey."
    title = ", ".join((cells[0].metrics[0].title, *where))
    return [pictures.add(title, caption.strip(), plots.curves, series[::-1] if search else series, _unit(cells))]


def _unit(cells: Sequence[Contestant]) -> str:
    """Return the label of a figure of these contestants, which may have different headlines."""
    titles = list(dict.fromkeys(each.metrics[0].title for each in cells))
    return " or ".join(titles) + (" (%)" if cells[0].metrics[0].scale == 100 else "")


def _grid(cells: Sequence[Contestant]) -> tuple[list[str], list[str], dict[tuple[str, str], Contestant]]:
    """Return labels of the last axis but one (a blank one when there is none), of the last, and the cells by both."""
    by_both = {(each.labels[-2] if len(each.labels) > 1 else "", each.labels[-1]): each for each in cells}
    return list(dict.fromkeys(key[0] for key in by_both)), list(dict.fromkeys(key[1] for key in by_both)), by_both


def _bars(
    where: tuple[str, ...], cells: Sequence[Contestant], results: StudyResults, pictures: Pictures
) -> list[Picture]:
    """Draw the headline with its spread, and the paper's results."""
    groups, labels, by_both = _grid(cells)
    if not any(each.done for each in cells) or len(groups) * len(labels) > _BARS:
        return []

    def numbers(each: Contestant | None) -> tuple[float, float, float]:
        if each is None:
            return math.nan, math.nan, math.nan
        score = each.score(results.summary)
        return score.mean, score.std, math.nan if each.paper is None else each.paper[0]

    series = [Bars(label, *np.array([numbers(by_both.get((group, label))) for group in groups]).T) for label in labels]
    spread = any(np.isfinite(item.spread).any() for item in series)
    caption = "Lines: standard deviation over the runs." if spread else ""
    title = ", ".join((_unit(cells), *where))
    return [pictures.add(title, caption, plots.bars, series, groups, _unit(cells), "paper")]


def _maps(
    where: tuple[str, ...], cells: Sequence[Contestant], results: StudyResults, pictures: Pictures
) -> list[Picture]:
    """Draw the headline, its difference and the further metrics, each as a matrix of the last two axes."""
    rows, columns, by_both = _grid(cells)
    if len(rows) < 2 or len(columns) < 2 or not any(each.done for each in cells):
        return []
    kinds: dict[str, Callable[[Contestant], float]] = {_unit(cells): lambda each: each.score(results.summary).mean}
    if results.study.settings.control:
        kinds["difference"] = lambda each: math.nan if each.difference is None else each.difference.mean
    for place, metric in enumerate(cells[0].metrics[1:], start=1):
        kinds[metric.title] = lambda each, place=place: each.score(results.summary, place).mean  # type: ignore[misc]
    made = []
    for title, value in kinds.items():
        matrix = np.full((len(rows), len(columns)), np.nan)
        for (row, column), each in by_both.items():
            matrix[rows.index(row), columns.index(column)] = value(each)
        if np.isfinite(matrix).any():
            names = (results.study.axes[-2], results.study.axes[-1])
            made.append(pictures.add(", ".join((title, *where)), "", plots.heat_map, matrix, rows, columns, names))
    return made


def _importance(results: StudyResults, pictures: Pictures) -> list[Picture]:
    if not results.importance:
        return []
    caption = (
        f"Rise of the squared error of a random forest when one setting is shuffled (permutation importance), as a share of the "
        f"sum. It needs many times more draws than settings. Below {FEWEST} it is left out. Stopped trials count with their last "
        f"score."
    )
    return [pictures.add("Importance of each setting", caption, plots.shares, results.importance, "share (%)")]


def _parallel(results: StudyResults, pictures: Pictures) -> list[Picture]:
    domains = results.study.settings.domains
    ranked = [each for each in results.contestants if math.isfinite(each.score(results.summary).mean)]
    if len(ranked) < 2 or not domains:
        return []
    scores = np.array([each.score(results.summary).mean for each in ranked])
    low, high = float(scores.min()), float(scores.max())
    heights = (scores - low) / (high - low or 1.0)
    strength = 0.999 * (heights if ranked[0].metrics[0].best == "max" else 1 - heights)
    strength[next(place for place, each in enumerate(ranked) if each is results.best)] = 1.0
    places = [
        [*(domain.position(each.values[key]) for key, domain in domains.items()), height]
        for each, height in zip(ranked, heights, strict=True)
    ]
    axes = [Axis(key, _ticks(domain)) for key, domain in domains.items()]
    axes.append(Axis(_unit(ranked), [(0.0, shown(low)), (1.0, shown(high))]))
    caption = "A line for each draw, the best in another colour. Dashed: stopped early or not finished."
    dashed = [not each.complete for each in ranked]
    return [
        pictures.add("Parallel coordinates", caption, plots.parallel_coordinates, places, strength, axes, dashed, "")
    ]


def _ticks(domain: Domain) -> list[tuple[float, str]]:
    values = domain.ends()
    if domain.listed and len(values) > _TICKS:
        values = [values[round(index)] for index in np.linspace(0, len(values) - 1, _TICKS)]
    return [(domain.position(value), describe_value(value)) for value in values]
