"""Results of a sweep: mean and spread of each cell, drop from the reference, the paper's numbers; CSV, Parquet, Markdown."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raydfl.core.metrics import HIGHER_IS_BETTER, base_name
from raydfl.engine import Config
from raydfl.experiments.metric import MetricSettings, keys_of
from raydfl.experiments.plan import rounds_done
from raydfl.experiments.sweep.descriptions import axis_of_features, features_text
from raydfl.experiments.sweep.grid import Sweep
from raydfl.experiments.table import markdown_table, shown, to_csv, to_parquet, to_table, write_files
from raydfl.runs.report import Curve, RunRecord, problems_of, read_run

SUMMARIES = {"tail": "mean of the last evaluations", "last": "last", "best": "best"}
CHOSEN = {"chosen": "in the round of run.best"}
"""Summaries of a run's evaluations, with their words."""
_MARK = "*"
"""Mark of cells with another number or interval of evaluations than most cells of the table."""
_ADVICE = "make room or make the folder writable, then write the tables again with raydfl sweep FILE --table"


@dataclass(frozen=True, slots=True)
class Spread:
    """Some runs' values of one number, in the table's unit."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean; NaN of nothing."""
        return float(np.mean(self.values)) if self.values else float("nan")

    @property
    def std(self) -> float:
        """Standard deviation over the runs (of a sample: divided by their number less one); NaN of fewer than two."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else float("nan")

    def __str__(self) -> str:
        if not self.values:
            return "-"
        return shown(self.mean) if len(self.values) == 1 else f"{shown(self.mean)} ± {shown(self.std)}"


@dataclass(frozen=True)
class CellResult:
    """Results of one cell."""

    labels: tuple[str, ...]
    metrics: tuple[MetricSettings, ...]
    """The headline first."""
    scores: Mapping[tuple[str, str], Spread]
    """By title of the metric and summary (a key of :data:`SUMMARIES`)."""
    wanted: int
    """Runs that the cell should have."""
    done: int
    """Runs that are finished."""
    curves: tuple[Curve, ...]
    """The headline over the rounds, of every finished run, in the table's unit."""
    rounds: tuple[int, ...]
    """Rounds done of the runs that are not finished."""
    evaluations: tuple[str, ...] = ()
    """Count and interval of the headline's evaluations, each value once: ``last 10 of 30, every 5 rounds``."""
    worthless: int = 0
    """Finished runs that diverged or could not learn: they count like others, and are named."""
    paper: tuple[float, float | None] | None = None
    """The paper's mean and spread."""
    drop: float | None = None
    """The headline's mean below that of the reference cell."""
    paper_drop: float | None = None
    """The same of the paper's numbers."""

    def score(self, summary: str, metric: int = 0) -> Spread:
        """Return one number of the cell; by default the headline's."""
        return self.scores[self.metrics[metric].title, summary]

    @property
    def state(self) -> str:
        """The missing runs, in words; empty when nothing is."""
        if self.done == self.wanted:
            return ""
        under_way = [rounds for rounds in self.rounds if rounds]
        text = "missing" if not self.done else f"{self.done} of {self.wanted} runs"
        return f"{text} (begun: {', '.join(f'round {rounds}' for rounds in under_way)})" if under_way else text


@dataclass(frozen=True)
class Results:
    """A sweep's table."""

    sweep: Sweep
    cells: tuple[CellResult, ...]
    runs: tuple[dict[str, Any], ...]
    """A row for each run: labels, folder, state and its own numbers."""
    notes: tuple[str, ...] = ()
    """Notes that a reader needs: features, spread, paper."""

    @property
    def by_labels(self) -> dict[tuple[str, ...], CellResult]:
        """Cells by their labels."""
        return {cell.labels: cell for cell in self.cells}


def collect(sweep: Sweep) -> Results:
    """Read what the finished runs of a sweep recorded. A run that is not finished counts as missing."""
    settings, shown_summaries = sweep.settings, summaries_of(sweep)
    read: dict[str, RunRecord] = {}
    rows: list[dict[str, Any]] = []
    cells: dict[tuple[str, ...], CellResult] = {}
    for labels, runs in sweep.cells.items():
        metrics = (runs[0].metric, *settings.also)
        values: dict[tuple[str, str], list[float]] = {}
        curves: list[Curve] = []
        evaluations: list[str] = []
        unfinished: list[int] = []
        worthless = 0
        for each in runs:
            row: dict[str, Any] = {**dict(zip(sweep.axes, labels, strict=True)), "repeat": each.repeat}
            rows.append(
                row | {"run": each.run_dir.name, "rounds": rounds_done(each.run_dir), "finished": each.finished}
            )
            if not each.finished:
                unfinished.append(rounds_done(each.run_dir))
                continue
            if each.identity not in read:
                read[each.identity] = read_run(each.run_dir)
            best_rounds = read[each.identity].curves.get(("server", "best_round"))
            best = 0 if best_rounds is None else int(best_rounds.last)
            found = problems_of(read[each.identity])
            rows[-1]["problems"] = "; ".join(problem.text for problem in found)
            rows[-1]["worthless"] = any(problem.worthless for problem in found)
            worthless += rows[-1]["worthless"]
            for place, metric in enumerate(metrics):
                curve = curve_of(read[each.identity], each.config, metric)
                if curve is None:
                    continue
                if not place:
                    curves.append(curve)
                    evaluations.append(_evaluations_text(curve, each.config.evaluate.every))
                    rows[-1]["evaluations"] = evaluations[-1]
                found_there = {s: v for s, v in summaries(curve, metric, best).items() if s in shown_summaries}
                for summary, value in found_there.items():
                    values.setdefault((metric.title, summary), []).append(value)
                    rows[-1][f"{metric.title}, {shown_summaries[summary]}"] = value
        scores = {
            (metric.title, summary): Spread(tuple(values.get((metric.title, summary), ())))
            for metric in metrics
            for summary in shown_summaries
        }
        cells[labels] = CellResult(
            labels,
            metrics,
            scores,
            wanted=len(runs),
            done=len(runs) - len(unfinished),
            curves=tuple(curves),
            rounds=tuple(unfinished),
            evaluations=tuple(dict.fromkeys(evaluations)),
            worthless=worthless,
        )
    compared = tuple(_compared(sweep, cells))
    return Results(sweep, compared, tuple(rows), tuple(_notes(sweep, compared)))


def _evaluations_text(curve: Curve, every: int) -> str:
    return f"{curve.tail_text}, every {f'{every} rounds' if every > 1 else 'round'}"


def _kinds_of_evaluations(cells: Sequence[CellResult]) -> list[str]:
    """Return the count and interval of evaluations of all runs, the most frequent first."""
    return [text for text, _ in Counter(text for cell in cells for text in cell.evaluations).most_common()]


def curve_of(run: RunRecord, config: Config, metric: MetricSettings) -> Curve | None:
    """Return a metric over the rounds in the table's unit: of what clients measured their mean; ``None``: not recorded."""
    for key in keys_of(config, metric):
        found = run.curves.get(key)
        if found is not None:
            return Curve(found.rounds, found.values * metric.scale, found.totals)
    return None


def summaries_of(sweep: Sweep, cells: Sequence[CellResult] = ()) -> dict[str, str]:
    """Return the titles of the numbers that a sweep's table has of a run, by their keys.

    If all runs of ``cells`` have equally many evaluations, the title of the tail states how many it averages.
    """
    titles = {**SUMMARIES, **(CHOSEN if sweep.settings.summary == "chosen" else {})}
    counts = {text.partition(",")[0] for text in _kinds_of_evaluations(cells)}
    return titles | ({"tail": f"mean of the {counts.pop()} evaluations"} if len(counts) == 1 else {})


def summaries(curve: Curve, metric: MetricSettings, chosen: int = 0) -> dict[str, float]:
    """Return the numbers of one run, by the keys of :data:`SUMMARIES` and :data:`CHOSEN`. Untrained models do not count.

    Args:
        curve: the metric over the rounds.
        metric: says whether larger is better.
        chosen: the best round by ``run.best``; 0: there is none.
    """
    best = np.nanmax if HIGHER_IS_BETTER.get(base_name(metric.score), True) else np.nanmin
    values, nothing = curve.trained, float("nan")
    there = curve.values[(curve.rounds == chosen) & (curve.rounds > 0)]
    return {
        "tail": curve.tail,
        "last": float(values[-1]) if len(values) else nothing,
        "best": float(best(values)) if np.isfinite(values).any() else nothing,
        "chosen": float(there[0]) if len(there) else nothing,
    }


def _compared(sweep: Sweep, cells: Mapping[tuple[str, ...], CellResult]) -> list[CellResult]:
    """Return the cells with the paper's numbers and the drops."""
    settings = sweep.settings
    published = settings.published()
    found = []
    for labels, cell in cells.items():
        home = tuple(settings.reference.get(name, label) for name, label in zip(sweep.axes, labels, strict=True))
        paper, paper_home = published.get(labels), published.get(home)
        drop = paper_drop = None
        if settings.reference and home != labels:
            if home in cells:
                less = cells[home].score(settings.summary).mean - cell.score(settings.summary).mean
                drop = None if np.isnan(less) else less
            if paper is not None and paper_home is not None:
                paper_drop = paper_home[0] - paper[0]
        found.append(replace(cell, paper=paper, drop=drop, paper_drop=paper_drop))
    return found


def _notes(sweep: Sweep, cells: Sequence[CellResult]) -> list[str]:
    settings = sweep.settings
    repeats = " or ".join(dict.fromkeys(run.repeat.partition("=")[0] for run in sweep.runs))
    title = summaries_of(sweep, cells)[settings.summary]
    headline = f"of a run's evaluations the {'one ' * (settings.summary == 'chosen')}{title}"
    notes = [f"Headline: {headline}; mean ± standard deviation over {repeats}."]
    if settings.summary == "chosen":
        choosers = {c.metric: c for run in sweep.runs for c in run.config.selection.for_best.values()}
        notes += [f"{name} chooses the round ({criterion.chooser})." for name, criterion in choosers.items()]
    if settings.summary == "best":
        notes.append("The best evaluation is chosen on the test data.")
    if len(kinds := _kinds_of_evaluations(cells)) > 1:
        notes.append(
            f"Runs have different evaluations ({'; '.join(kinds)}). {_MARK} marks cells that differ from {kinds[0]}."
        )
    described: dict[str, list[str]] = {}
    for labels, runs in sweep.cells.items():
        described.setdefault(features_text(runs[0].config), []).append(", ".join(labels))
    axis = axis_of_features(sweep)
    for text, alike in described.items():
        where = "" if len(described) == 1 else f" ({axis[text] if axis else f'{len(alike)} cells, such as {alike[0]}'})"
        notes.append(f"Features{where}: {text}.")
    if settings.reference:
        names = ", ".join(f"{name} {label}" for name, label in settings.reference.items())
        notes.append(f"Drop: below the mean of the cell with {names}.")
    if settings.paper is not None:
        notes.append(f"Paper: {settings.paper.source}.{' ' + settings.paper.note if settings.paper.note else ''}")
    return notes


# -- as tables -------------------------------------------------------------------------------------------------------


def _columns(results: Results) -> dict[str, Callable[[CellResult], str]]:
    """Return the columns beside the labels: what stands there for a cell, by heading."""
    settings = results.sweep.settings
    mixed = len({cell.metrics[0].title for cell in results.cells}) > 1
    headline = "headline" if mixed else results.cells[0].metrics[0].title
    found: dict[str, Callable[[CellResult], str]] = {}
    if mixed:
        found["score"] = lambda cell: cell.metrics[0].title
    titles = summaries_of(results.sweep, results.cells)
    found[f"{headline}, {titles[settings.summary]}"] = lambda cell: str(cell.score(settings.summary))
    found["runs"] = lambda cell: (cell.state or str(cell.done)) + _worthless_text(cell)
    if len(_kinds_of_evaluations(results.cells)) > 1:
        found["evaluations"] = lambda cell: "; ".join(cell.evaluations) or "-"
    if settings.reference:
        found["drop"] = lambda cell: shown(cell.drop)
    for summary, title in titles.items():
        if summary != settings.summary:
            found[title] = lambda cell, summary=summary: str(cell.score(summary))  # type: ignore[misc]
    for place, metric in enumerate(settings.also, start=1):
        found[metric.title] = lambda cell, place=place: str(cell.score(settings.summary, place))  # type: ignore[misc]
    if settings.paper is not None:
        found["paper"] = paper_text
        if settings.reference:
            found["paper's drop"] = lambda cell: shown(cell.paper_drop)
    return found


def columns(results: Results) -> list[str]:
    """Return the headings of :func:`lines`."""
    return [*results.sweep.axes, *_columns(results)]


def lines(results: Results) -> list[list[str]]:
    """Return the table's cells as text, a line for each cell of the grid."""
    texts = _columns(results).values()
    return [[*cell.labels, *(text(cell) for text in texts)] for cell in results.cells]


def _worthless_text(cell: CellResult) -> str:
    return f" ({cell.worthless} worthless)" if cell.worthless else ""


def paper_text(cell: CellResult) -> str:
    """Return the paper's number; ``-`` when it gives none."""
    if cell.paper is None:
        return "-"
    mean, spread = cell.paper
    return shown(mean) + (f" ± {shown(spread)}" if spread is not None else "")


def pivot(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the headline as papers print it: the last axis across, the others down; headings and lines."""
    settings, by_labels = results.sweep.settings, results.by_labels
    usual = tuple(_kinds_of_evaluations(results.cells)[:1])
    across = [
        label for label in settings.axes[results.sweep.axes[-1]] if any(c.labels[-1] == label for c in results.cells)
    ]
    found = []
    for down in dict.fromkeys(cell.labels[:-1] for cell in results.cells):
        line = list(down)
        for label in across:
            cell = by_labels.get((*down, label))
            line.append("-" if cell is None else _pivot_cell(cell, settings.summary, usual))
        found.append(line)
    return [*results.sweep.axes[:-1], *across], found


def _pivot_cell(cell: CellResult, summary: str, usual: tuple[str, ...]) -> str:
    mark = _MARK if cell.evaluations not in ((), usual) else ""
    parts = [(str(cell.score(summary)) + mark if cell.done else cell.state) + _worthless_text(cell)]
    parts += [f"({cell.done} of {cell.wanted} runs)"] if cell.done and cell.done < cell.wanted else []
    parts += [f"(drop {shown(cell.drop)})"] if cell.drop is not None else []
    parts += [f"[paper {shown(cell.paper[0])}]"] if cell.paper is not None else []
    return " ".join(parts)


def records(results: Results) -> list[dict[str, Any]]:
    """Return the table as numbers: a flat record for each cell of the grid; NaN where there is none."""
    found = []
    for cell in results.cells:
        row: dict[str, Any] = dict(zip(results.sweep.axes, cell.labels, strict=True))
        row |= {"score": cell.metrics[0].title, "summary": results.sweep.settings.summary}
        row |= {"runs": cell.done, "wanted": cell.wanted, "worthless": cell.worthless}
        row |= {"evaluations": "; ".join(cell.evaluations)}
        headline = cell.score(results.sweep.settings.summary)
        row |= {"mean": headline.mean, "std": headline.std, "drop": _nan(cell.drop)}
        paper = cell.paper or (None, None)
        row |= {"paper": _nan(paper[0]), "paper_std": _nan(paper[1]), "paper_drop": _nan(cell.paper_drop)}
        for place, summary in itertools.product(range(len(cell.metrics)), summaries_of(results.sweep)):
            name = f"{'headline' if not place else cell.metrics[place].title} {summary}"
            score = cell.score(summary, place)
            row |= {f"{name} mean": score.mean, f"{name} std": score.std}
        found.append(row)
    return found


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def markdown(results: Results) -> str:
    """Return both tables and the notes."""
    settings = results.sweep.settings
    parts = [f"# {settings.title}", *([settings.note] if settings.note else [])]
    parts += [markdown_table(*pivot(results)), "\n".join(f"- {note}" for note in results.notes)]
    parts += [markdown_table(columns(results), lines(results))]
    return "\n\n".join(parts) + "\n"


def write_tables(results: Results) -> list[Path]:
    """Write ``.csv``, ``.parquet`` and ``.md`` of the cells and ``-runs.csv`` of the single runs, in the sweep's folder.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    sweep = results.sweep
    cells = to_table(records(results))
    runs = to_table(list(results.runs))
    contents = {
        sweep.output(".csv"): to_csv(cells),
        sweep.output(".parquet"): to_parquet(cells),
        sweep.output(".md"): markdown(results).encode(),
        sweep.output("-runs.csv"): to_csv(runs),
    }
    return write_files(contents, _ADVICE)
