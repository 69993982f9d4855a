"""The report of a study: tables, learning curves with spread, bars, heat maps, and the importance of settings."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from raydfl.core.files import write_durably
from raydfl.experiments.contestants import Contestant
from raydfl.experiments.domains import Domain
from raydfl.experiments.notes import describe_results
from raydfl.experiments.results import FEWEST, StudyResults
from raydfl.experiments.statistics import format_number
from raydfl.experiments.study import describe_value
from raydfl.experiments.tables import make_controls_table, make_full_table, pivot
from raydfl.runs.report import Plot, Section, align, render_page
from raydfl.runs.report.figures import INK, SERIES, SHARES, Axes, Series, plot, plot_curves

_BARS = 48
"""Maximum bars in a figure."""
_TICKS = 5
"""Maximum ticks on the axis of a domain that is a list."""
_EQUAL = 1.05
"""Maximum ratio of the bytes of a round between contestants with equal traffic."""
_STACKED = 2.2
"""Height in inches of axes above the last ones of a figure."""
_NAMED = 6
"""Number of best draws with their own colour and name."""


def write_page(results: StudyResults) -> Path:
    """Write the self-contained report ``NAME.html`` into the study's folder.

    Raises:
        ResourcesError: The disk is full, or the folder is not writable.
    """
    study, settings = results.study, results.study.settings
    search, left = bool(settings.domains), results.open + len(results.failed)
    curves = [draw_curves(results, metric) for metric in range(1 if search else 1 + len(settings.also))]
    notes, table = describe_results(results), ([], []) if search else pivot(results)
    parts = [] if search else _group_contestants(results, 2 if len(study.axes) > 1 else 1)
    sections = [
        Section("", text=[text for text in (settings.question, settings.note) if text]),
        _show_best(results),
        Section("Notes" if search else "Table", headings=table[0], rows=_emphasise(table[1]), notes=notes),
        Section(
            "Controls without training", headings=make_controls_table(results)[0], rows=make_controls_table(results)[1]
        ),
        Section("Comparison", [plot for part in parts for plot in _draw_bars(part, results)]),
        Section("Heat maps", [plot for part in parts for plot in _draw_maps(part, results)]),
        Section("Importance of settings", list(_draw_importance(results))),
        Section("Settings and scores", list(_draw_parallel(results))),
        Section("Learning curves", [plot for plot in (*curves, draw_by_bytes(results)) if plot]),
        Section("All values", headings=make_full_table(results)[0], rows=_emphasise(make_full_table(results)[1])),
        _show_runs(results),
        Section("Failures", headings=("trial", "reason"), rows=list(results.failed.items())),
    ]
    page = render_page(
        settings.title,
        f"{len(results.contestants)} contestants, {study.total} runs · {study.folder}",
        sections,
        [f"{left} of {study.total} runs are missing. Continue with: raydfl study {study.file}"] if left else [],
    )
    out = study.output(".html")
    write_durably(out, page.encode())
    return out


def _emphasise(rows: Sequence[Sequence[str]]) -> list[list[Markup]]:
    """Convert ``**bold**`` text to HTML, and escape the rest."""
    return [
        [Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", str(escape(text)))) for text in row] for row in rows
    ]


def format_best_command(results: StudyResults) -> str:
    """Format the command that trains with the best settings."""
    return f"raydfl run {shlex.quote(str(results.study.output('-best.yaml')))}"


def _show_best(results: StudyResults) -> Section:
    """Make the section with the best settings of a search."""
    best, title = results.best, "Best settings"
    if best is None:
        return Section(title, text=["No trial has a score yet."] if results.study.settings.domains else [])
    return Section(
        title,
        headings=("setting", "value"),
        rows=[[key, describe_value(value)] for key, value in best.values.items()],
        text=[
            f"{best.name}: {results.headline} {best.score(results.summary)} (n: {best.n}).",
            "Train with these settings:",
        ],
        commands=[format_best_command(results)],
    )


def _show_runs(results: StudyResults) -> Section:
    """Make the section with the state of each run, and a link to an existing report."""
    study, rows = results.study, []
    names = [*study.axes, *study.searched]
    for run in results.runs:
        state = f"{run['state']}, worthless: {run['problems']}" if run.get("worthless") else run["state"]
        page = Markup('<a href="{0}/report.html">{0}</a>').format(run["run"])
        link = page if (study.folder / str(run["run"]) / "report.html").exists() else run["run"]
        rows.append([*(describe_value(run.get(name, "-")) for name in names), run["repeat"], state, link])
    headings = (*names, "repeat", "state", "run")
    return Section("Runs", headings=headings, rows=rows, folded=f"{len(rows)} runs")


def _group_contestants(results: StudyResults, inner: int) -> list[list[Contestant]]:
    """Group contestants into figures by their labels on all axes but the last ``inner`` axes."""
    parts: dict[tuple[str, ...], list[Contestant]] = {}
    for contestant in results.contestants:
        parts.setdefault(contestant.labels[: len(contestant.labels) - inner], []).append(contestant)
    return list(parts.values())


def _make_title(title: str, cells: Sequence[Contestant], inner: int) -> str:
    """Make the title of a figure with the common labels of its contestants."""
    return ", ".join(filter(None, (title, _name_group(cells, inner))))


def _name_group(cells: Sequence[Contestant], inner: int) -> str:
    """Join the common labels of a figure's contestants, on all axes but the last ``inner`` axes."""
    return ", ".join(cells[0].labels[: len(cells[0].labels) - inner])


def draw_curves(results: StudyResults, metric: int = 0) -> Plot | None:
    """Draw a metric over the rounds: a curve per label of the last axis or per draw, axes per label of the others.

    Args:
        results: Results of a study.
        metric: Index of the metric; 0: the headline.
    """
    search = bool(results.study.settings.domains)
    groups = _group_contestants(results, 0 if search else 1)
    return _stack([(cells, _draw_cells(cells, search, metric)) for cells in groups], 0 if search else 1)


def draw_by_bytes(results: StudyResults) -> Plot | None:
    """Draw the mean headline over the bytes of all clients, if contestants of a study send different amounts in a round.

    Exploratory studies have no figure. Methods with phases send different amounts in each, so their studies have none either.
    """
    phases = any(type(run.config.components.method).phases for cell in results.contestants for run in cell.trials)
    if phases or not results.study.settings.confirmatory:
        return None
    return _stack([(cells, _draw_by_bytes(cells)) for cells in _group_contestants(results, 1)], 1)


def _stack(groups: Sequence[tuple[Sequence[Contestant], Plot | None]], inner: int) -> Plot | None:
    """Combine the plots of groups of contestants into a figure with axes for each group and a common legend."""
    titles, plots = [], []
    for cells, part in groups:
        if part:
            titles.append(_name_group(cells, inner))
            plots.append(part)
    if not plots:
        return None

    def draw(*axes: Axes) -> None:
        for own, part, title in zip(axes, plots, titles, strict=True):
            part.draw(own)
            own.set_title(title, loc="left", fontsize=9)
        for own in axes[:-1]:
            own.set_xlabel("")

    height = plots[0].height + _STACKED * (len(plots) - 1)
    return replace(plots[0], draw=draw, height=height, rows=len(plots))


def _draw_by_bytes(cells: Sequence[Contestant]) -> Plot | None:
    series, sent = [], []
    for place, cell in enumerate(cells):
        amount = cell.budget.get("MB down", 0.0) + cell.budget.get("MB up", 0.0)
        if not cell.curves or not amount:
            continue
        rounds, values, _ = align(cell.curves)
        by_round = amount / max(result.rounds for result in cell.results)
        series.append(Series(cell.labels[-1], rounds * by_round, values.mean(axis=0), None, None, place, place))
        sent.append(by_round)

    def draw(axes: Axes) -> None:
        plot(axes, series)
        axes.set_ylabel(_make_unit(cells))
        axes.set_xlabel("sent to and from clients (MB)")

    if not sent or max(sent) <= _EQUAL * min(sent):
        return None
    title = f"{cells[0].metrics[0].title} by bytes"
    return Plot(title, "The same evaluations, over the bytes sent so far.", draw, 2.9 + 0.16 * len(series))


def _draw_cells(cells: Sequence[Contestant], search: bool, metric: int) -> Plot | None:
    series = []
    for place, cell in enumerate(cells):
        curves = cell.find_curves(metric)
        if not curves:
            continue
        rounds, values, _ = align(curves)
        mean, low, high = values.mean(axis=0), None, None
        if len(values) > 1:
            spread = values.std(axis=0, ddof=1)
            low, high = mean - spread, mean + spread
        label, look = "" if search else cell.labels[-1], (place, place)
        if search:
            look = (min(place, _NAMED), 0 if cell.complete else 1)
            if place < _NAMED:
                label = cell.draw + ("" if cell.complete else f" ({cell.states[0]})")
        series.append(Series(label, rounds, mean, low, high, *look))
    if not series:
        return None
    caption = "Bands: mean ± standard deviation." if any(item.low is not None for item in series) else ""
    if search:
        caption += f" Dashed: stopped early or unfinished. All draws except the best {_NAMED} are grey."
        series.reverse()
    return plot_curves(cells[0].metrics[metric].title, caption.strip(), series, _make_unit(cells, metric))


def _make_unit(cells: Sequence[Contestant], metric: int = 0) -> str:
    """Make the axis label of contestants that may have different metrics."""
    titles = list(dict.fromkeys(cell.metrics[metric].title for cell in cells))
    return " or ".join(titles) + (" (%)" if cells[0].metrics[metric].scale == 100 else "")


def _arrange(cells: Sequence[Contestant]) -> tuple[list[str], list[str], dict[tuple[str, str], Contestant]]:
    """Arrange contestants by their labels on the last two axes.

    Returns:
        Labels of the second last axis (``""`` for a single axis), labels of the last axis, and contestants by both labels.
    """
    by_both = {(cell.labels[-2] if len(cell.labels) > 1 else "", cell.labels[-1]): cell for cell in cells}
    return list(dict.fromkeys(key[0] for key in by_both)), list(dict.fromkeys(key[1] for key in by_both)), by_both


def _draw_bars(cells: Sequence[Contestant], results: StudyResults) -> Iterator[Plot]:
    """Draw the headline with its spread and the paper's results, with a colour per label of the last axis."""
    groups, labels, by_both = _arrange(cells)
    if not any(cell.done for cell in cells) or len(groups) * len(labels) > _BARS:
        return

    def read_values(cell: Contestant | None) -> tuple[float, float, float]:
        if cell is None:
            return math.nan, math.nan, math.nan
        score = cell.score(results.summary)
        return score.mean, score.std, math.nan if cell.paper is None else cell.paper[0]

    table = np.array([[read_values(by_both.get((group, label))) for group in groups] for label in labels])
    means, spread, paper = np.moveaxis(table, -1, 0)

    def draw(axes: Axes) -> None:
        width = 0.8 / len(labels)
        places = np.arange(len(groups)) + (np.arange(len(labels))[:, None] - (len(labels) - 1) / 2) * width
        for number, label in enumerate(labels):
            look: dict[str, Any] = {
                "color": SERIES[number % len(SERIES)],
                "alpha": 0.9 if number < len(SERIES) else 0.5,
            }
            errors = {"ecolor": INK, "elinewidth": 0.9}
            heights = np.nan_to_num(means[number])
            axes.bar(places[number], heights, 0.92 * width, yerr=spread[number], error_kw=errors, label=label, **look)
        known, half = np.isfinite(paper), 0.46 * width
        if known.any():
            at = places[known]
            axes.hlines(paper[known], at - half, at + half, color=INK, linewidth=1.4, label="paper")
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylabel(_make_unit(cells))
        axes.set_ylim(bottom=0)

    caption = "Lines: standard deviation over the runs." if np.isfinite(spread).any() else ""
    yield Plot(_make_title(_make_unit(cells), cells, 2), caption, draw, 3.0 + 0.12 * len(labels))


def _draw_maps(cells: Sequence[Contestant], results: StudyResults) -> Iterator[Plot]:
    """Draw heat maps over the last two axes: the headline, its difference, and the further metrics."""
    rows, columns, by_both = _arrange(cells)
    if len(rows) < 2 or len(columns) < 2 or not any(cell.done for cell in cells):
        return
    kinds: dict[str, Callable[[Contestant], float]] = {_make_unit(cells): lambda cell: cell.score(results.summary).mean}
    if results.study.settings.control:
        kinds["difference"] = lambda cell: math.nan if cell.difference is None else cell.difference.mean
    for place, metric in enumerate(cells[0].metrics[1:], start=1):
        kinds[metric.title] = lambda cell, place=place: cell.score(results.summary, place).mean  # type: ignore[misc]
    for title, value in kinds.items():
        grid = ((by_both.get((row, column)) for column in columns) for row in rows)
        matrix = np.array([[math.nan if cell is None else value(cell) for cell in row] for row in grid])
        if np.isfinite(matrix).any():
            yield _draw_heat_map(_make_title(title, cells, 2), matrix, rows, columns, results.study.axes[-2:])


def _draw_heat_map(
    title: str, values: np.ndarray, rows: list[str], columns: list[str], axes_names: Sequence[str]
) -> Plot:
    """Draw a matrix with stronger colours for larger values. Cells without a value are hatched."""

    def draw(axes: Axes) -> None:
        low, high = np.nanmin(values), np.nanmax(values)
        strength = 0.05 + 0.9 * (values - low) / (high - low) if high > low else 0.5 + 0 * values
        edges = (np.arange(len(columns) + 1) - 0.5, np.arange(len(rows) + 1) - 0.5)
        axes.pcolormesh(*edges, strength, cmap=SHARES, vmin=0, vmax=1)
        unknown = np.argwhere(~np.isfinite(values)).T
        axes.bar(unknown[1], 1, 1, unknown[0] - 0.5, fill=False, hatch="//", edgecolor=INK, linewidth=0, alpha=0.3)
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "white" if strength[row, column] > 0.6 else INK
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylabel(axes_names[0])
        axes.set_xlabel(axes_names[1])

    width = min(11.0, max(3.6, 0.75 * len(columns) + 2.2))
    return Plot(title, "", draw, max(2.4, 0.42 * len(rows) + 1.6), width=width)


def _draw_importance(results: StudyResults) -> Iterator[Plot]:
    """Draw the importance of each setting as horizontal bars, the largest at the top."""
    if not results.importance:
        return

    def draw(axes: Axes) -> None:
        shares = dict(sorted(results.importance.items(), key=lambda item: item[1]))
        axes.barh(list(shares), [100 * share for share in shares.values()], color=SERIES[0], height=0.7)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0)
        axes.set_xlabel("share (%)")

    caption = (
        f"Increase of the squared error of a random forest after shuffling a setting (permutation importance), as a share of the "
        f"sum. It needs many times more draws than settings, and at least {FEWEST}. Stopped trials count with their last score."
    )
    yield Plot("Importance of each setting", caption, draw, 0.9 + 0.3 * len(results.importance))


def _draw_parallel(results: StudyResults) -> Iterator[Plot]:
    """Draw each draw as a line across vertical axes for settings and score, with a stronger colour for better scores."""
    domains = results.study.searched
    ranked = [cell for cell in results.contestants if math.isfinite(cell.score(results.summary).mean)]
    if len(ranked) < 2 or not domains:
        return
    scores = np.array([cell.score(results.summary).mean for cell in ranked])
    low, high = float(scores.min()), float(scores.max())
    heights = (scores - low) / (high - low or 1.0)
    strength = heights if ranked[0].metrics[0].best == "max" else 1 - heights
    ticks = [*map(_make_ticks, domains.values()), [(0.0, format_number(low)), (1.0, format_number(high))]]

    def draw(axes: Axes) -> None:
        x = np.arange(len(ticks))
        for index in sorted(range(len(ranked)), key=lambda index: (ranked[index] is results.best, strength[index])):
            cell = ranked[index]
            places = [
                domain.position(cell.values[key]) if key in cell.values else math.nan for key, domain in domains.items()
            ] + [float(heights[index])]
            best = cell is results.best
            colour, width, alpha = (SERIES[1], 2.0, 1.0) if best else (SERIES[0], 1.0, 0.15 + 0.7 * strength[index])
            axes.plot(x, places, "-" if cell.complete else "--", color=colour, alpha=alpha, linewidth=width)
        for place, texts in zip(x.tolist(), ticks, strict=True):
            axes.axvline(place, color=INK, linewidth=0.8)
            for height, text in texts:
                axes.text(place + 0.03, height, text, fontsize=7, va="center", ha="left")
        axes.set_xticks(x, [*domains, _make_unit(ranked)], rotation=20, ha="right", rotation_mode="anchor")
        axes.set_yticks([])
        axes.set_ylim(-0.05, 1.05)
        axes.set_xlim(-0.2, len(ticks) - 0.5)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)

    caption = "Each line is a draw, with the best draw highlighted. Dashed: stopped early or unfinished."
    yield Plot("Parallel coordinates", caption, draw, 3.6)


def _make_ticks(domain: Domain) -> list[tuple[float, str]]:
    values = domain.ends()
    if domain.listed and len(values) > _TICKS:
        values = [values[round(index)] for index in np.linspace(0, len(values) - 1, _TICKS)]
    return [(domain.position(value), describe_value(value)) for value in values]
