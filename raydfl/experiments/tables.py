"""Tables of a study with notes, as Markdown, LaTeX, CSV and Parquet."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from raydfl.core.files import write_durably
from raydfl.core.yaml import to_yaml
from raydfl.experiments.contestants import Contestant
from raydfl.experiments.notes import describe_results
from raydfl.experiments.results import StudyResults
from raydfl.experiments.settings import label_of
from raydfl.experiments.statistics import format_number
from raydfl.experiments.study import describe_value

_MARK = "*"
"""Mark of cells with an unusual number or interval of evaluations."""
_ADVICE = "make room or make the folder writable, then write the tables again with raydfl study FILE --table"
_IN_LATEX = 20
"""Maximum draws of a cell in the LaTeX table."""
Table = tuple[list[str], list[list[str]]]
"""Headings, and the texts of each line."""


def make_full_table(results: StudyResults) -> Table:
    """Make a table with a line per contestant and all its results."""
    domains, texts = results.study.searched, _columns(results)
    lines = []
    for contestant in results.contestants:
        draw = (
            [contestant.draw, *(describe_value(contestant.values.get(key, "-")) for key in domains)] if domains else []
        )
        lines.append([*contestant.labels, *draw, *(text(contestant) for text in texts.values())])
    return [*results.study.axes, *(["draw", *domains] if domains else []), *texts], lines


def make_summary_table(results: StudyResults) -> Table:
    """Make the full table, or for a confirmatory study its columns of scores and conclusions."""
    headings, lines = make_full_table(results)
    selected = {*results.study.axes, "score", results.headline, "n", "difference", "conclusion", "at plateau"}
    selected |= {metric.title for contestant in results.contestants[:1] for metric in contestant.metrics[1:]}
    places = [
        place for place, name in enumerate(headings) if name in selected or not results.study.settings.confirmatory
    ]
    return [headings[place] for place in places], [[line[place] for place in places] for line in lines]


def _columns(results: StudyResults) -> dict[str, Callable[[Contestant], str]]:
    """Return a formatter of contestants for each column after the labels, by heading."""
    settings, summary = results.study.settings, results.summary
    columns: dict[str, Callable[[Contestant], str]] = {}
    if results.headline.startswith("headline"):
        columns["score"] = lambda contestant: contestant.metrics[0].title
    columns[results.headline] = lambda contestant: _bold(str(contestant.score(summary)), contestant)
    columns["n"] = lambda contestant: contestant.n
    if settings.domains:
        columns["rounds"] = lambda contestant: str(contestant.rounds)
    elif len(results.kinds_of_evaluations) > 1:
        columns["evaluations"] = lambda contestant: "; ".join(contestant.evaluations) or "-"
    if settings.control:
        columns["difference"] = lambda contestant: "-" if contestant.difference is None else str(contestant.difference)
    columns |= _protocol_columns(results)
    if any(len(contestant.trials) > 1 for contestant in results.contestants):
        columns["values by repeat"] = lambda contestant: (
            ", ".join(map(format_number, contestant.score(summary).values)) or "-"
        )
    for key, title in results.titles.items():
        if key != summary:
            columns[title] = lambda contestant, key=key: str(contestant.score(key))  # type: ignore[misc]
    for place, metric in enumerate(settings.also, start=1):
        title = results.contestants[0].metrics[place].title if results.contestants else metric.title
        columns[title] = lambda contestant, place=place: str(contestant.score(summary, place))  # type: ignore[misc]
    columns |= _budget_columns(results)
    if settings.paper is not None:
        columns["paper"] = _format_paper
        if settings.control:
            columns["paper's difference"] = lambda contestant: format_number(contestant.paper_difference, signed=True)
    return columns


def _protocol_columns(results: StudyResults) -> dict[str, Callable[[Contestant], str]]:
    columns: dict[str, Callable[[Contestant], str]] = {}
    if results.study.settings.confirmatory:
        columns["conclusion"] = lambda contestant: contestant.conclusion or "-"
    if (rule := results.study.settings.plateau) is not None:
        columns["at plateau"] = lambda contestant: str(contestant.score_at_plateau(rule, results.study))
    return columns


def _budget_columns(results: StudyResults) -> dict[str, Callable[[Contestant], str]]:
    """Return a formatter for each recorded column of the budget of a confirmatory study."""
    contestants = results.contestants if results.study.settings.confirmatory else ()
    recorded = dict.fromkeys(column for contestant in contestants for column in contestant.budget)
    return {
        column: lambda contestant, column=column: _format_amount(contestant.budget.get(column))  # type: ignore[misc]
        for column in recorded
    }


def _format_amount(value: float | None) -> str:
    """Format an amount with three significant digits and separated thousands."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def make_controls_table(results: StudyResults) -> Table:
    """Make a table of the controls without training: a line per control, a column per cell of the remaining axes.

    A score has its standard error on the test clips. Cells with equal scores share a column.
    """
    names = dict.fromkeys(name for contestant in results.controls.values() for name in contestant.controls)
    columns: dict[tuple[str, ...], list[str]] = {}
    for labels, contestant in results.controls.items():
        scores = [contestant.controls.get(name) for name in names]
        texts = ["-" if score is None else f"{score[0]} (standard error {format_number(score[1])})" for score in scores]
        columns.setdefault(tuple(texts), []).append(", ".join(labels))
    title = results.headline.partition(",")[0]
    headings = [title] if len(columns) == 1 else ["; ".join(cells) for cells in columns.values()]
    lines = [[name, *texts] for name, *texts in zip(names, *columns, strict=True)]
    return ["control without training", *headings] if columns else [], lines


def _bold(text: str, contestant: Contestant) -> str:
    return f"**{text}**" if contestant.best else text


def _format_paper(contestant: Contestant) -> str:
    mean, spread = contestant.paper or (None, None)
    return format_number(mean) + (f" ± {format_number(spread)}" if spread is not None else "")


def pivot(results: StudyResults, text: Callable[[Contestant], str] | None = None) -> Table:
    """Make a table of the headline with the last axis as columns and all further axes as rows."""
    by_labels = {contestant.labels: contestant for contestant in results.contestants}
    usual = results.kinds_of_evaluations[:1]
    text = text or (lambda contestant: _format_cell(contestant, results.summary, usual))
    last = results.study.settings.axes[results.study.axes[-1]]
    across = [label for label in last if any(labels[-1] == label for labels in by_labels)]
    lines = []
    for down in dict.fromkeys(labels[:-1] for labels in by_labels):
        cells = [by_labels.get((*down, label)) for label in across]
        lines.append([*down, *("-" if contestant is None else text(contestant) for contestant in cells)])
    return [*results.study.axes[:-1], *across], lines


def _format_cell(contestant: Contestant, summary: str, usual: Sequence[str]) -> str:
    if not contestant.done:
        parts = [contestant.n]
    else:
        mark = _MARK if contestant.evaluations not in ([], usual) else ""
        parts = [_bold(str(contestant.score(summary)), contestant) + mark]
        parts += [f"({contestant.n})"] if not contestant.complete or contestant.worthless else []
    parts += [f"({contestant.difference})"] if contestant.difference is not None else []
    parts += [f"[paper {format_number(contestant.paper[0])}]"] if contestant.paper is not None else []
    return " ".join(parts)


def markdown(results: StudyResults) -> str:
    """Format tables and notes as Markdown."""
    settings = results.study.settings
    parts = [f"# {settings.title}", *filter(None, (settings.question, settings.note))]
    parts += [] if settings.domains else [format_markdown(pivot(results))]
    controls = make_controls_table(results)
    parts += [format_markdown(controls)] if controls[1] else []
    parts += ["\n".join(f"- {note}" for note in describe_results(results)), format_markdown(make_full_table(results))]
    return "\n\n".join(parts) + "\n"


def format_markdown(table: Table) -> str:
    """Format a table as Markdown."""
    headings, lines = table
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(text.replace('|', '/') for text in row)} |" for row in rows)


# -- LaTeX -----------------------------------------------------------------------------------------------------------


def latex(results: StudyResults) -> str:
    """Format the tables as LaTeX with the package booktabs.

    The first table has the last axis as columns. The second has a line per contestant: mean, n, values by repeat, difference.
    """
    study, settings = results.study, results.study.settings
    prefixes = ("Headline", "Bold", "Difference", "Runs have")
    notes = [note for note in describe_results(results) if note.startswith(prefixes)]
    caption = " ".join(filter(None, [f"{settings.title.rstrip('.')}.", settings.question, *notes]))
    caption = caption.replace(f"{_MARK} marks", "An asterisk marks")
    tables, label = [], f"tab:{study.file.stem}"
    if len(study.axes) > 1 and not settings.domains:
        table = pivot(results, lambda contestant: _bold(str(contestant.score(results.summary)), contestant))
        tables.append(_format_latex(table, len(study.axes) - 1, caption, label))
    headings, lines = make_full_table(results)
    left = [*study.axes, *(["draw", *settings.domains] if settings.domains else [])]
    selected = {*left, "score", results.headline, "n", "difference", "conclusion", "values by repeat"}
    places = [place for place, name in enumerate(headings) if name in selected]
    cells = itertools.groupby(zip(results.contestants, lines, strict=True), key=lambda pair: pair[0].labels)
    best = [line for _, pairs in cells for _, line in itertools.islice(pairs, _IN_LATEX)]
    if len(best) < len(lines):
        caption += f" The table has the best {_IN_LATEX} draws{' of each cell' if study.axes else ''}."
    table = [headings[place] for place in places], [[line[place] for place in places] for line in best]
    tables.append(_format_latex(table, len(left), caption, f"{label}-all"))
    return "% \\usepackage{booktabs}\n" + "\n".join(tables)


def _format_latex(table: Table, left: int, caption: str, label: str) -> str:
    headings, lines = table
    frame = pd.DataFrame([list(map(_escape_latex, line)) for line in lines], columns=list(map(_escape_latex, headings)))
    text: str = frame.style.hide(axis="index").to_latex(
        hrules=True,
        column_format="l" * left + "r" * (len(headings) - left),
        position_float="centering",
        caption=_escape_latex(caption),
        label=re.sub(r"[^A-Za-z0-9:-]", "-", label),
    )
    return text


_SPECIAL = str.maketrans({
    "\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", **{mark: f"\\{mark}" for mark in "&%$#_{}"},
})  # fmt: skip


def _escape_latex(text: str) -> str:
    """Convert text to LaTeX: escape special characters, and convert bold text and signs of numbers.

    A leading ``[`` or ``*`` is escaped too. At the start of a row, LaTeX would read it as an argument of the previous command.
    """
    escaped = text.translate(_SPECIAL)
    signed = re.sub(r"(?<![\w.])([-+])(?=\d)", r"$\1$", escaped)
    bold = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", signed)
    return re.sub(r"^(\s*)([\[*])", r"\1{\2}", bold)


# -- numbers ---------------------------------------------------------------------------------------------------------


def records(results: StudyResults) -> list[dict[str, Any]]:
    """Make a flat row of values for each contestant, with NaN for missing values."""
    rows, settings, nothing = [], results.study.settings, float("nan")
    for contestant in results.contestants:
        score, difference = contestant.score(results.summary), contestant.difference
        row: dict[str, Any] = dict(zip(results.study.axes, contestant.labels, strict=True))
        row |= {"draw": contestant.draw, **contestant.values} if contestant.draw else {}
        row |= {"score": contestant.metrics[0].title, "summary": results.summary}
        row |= {
            "n": contestant.done,
            "wanted": len(contestant.trials),
            "worthless": contestant.worthless,
            "best": contestant.best,
        }
        row |= {"evaluations": "; ".join(contestant.evaluations), "mean": score.mean, "std": score.std}
        for trial in contestant.trials if len(contestant.trials) > 1 else ():
            row[trial.repeat] = score.by_repeat.get(trial.repeat, nothing)
        for name in ("mean", "low", "high", "n") if settings.control else ():
            row[f"difference {name}"] = getattr(difference, name, nothing)
        if settings.confirmatory:
            row |= {"conclusion": contestant.conclusion, "learned": contestant.learned, **contestant.budget}
            row |= {f"{name} control": spread.mean for name, (spread, _) in contestant.controls.items()}
        if settings.paper is not None:
            values = (*(contestant.paper or (None, None)), contestant.paper_difference)
            titles = ("paper", "paper_std", "paper_difference")
            row |= {name: nothing if value is None else value for name, value in zip(titles, values, strict=True)}
        for (place, metric), summary in itertools.product(enumerate(contestant.metrics), results.titles):
            name, score = f"{metric.title if place else 'headline'} {summary}", contestant.score(summary, place)
            row |= {f"{name} mean": score.mean, f"{name} std": score.std}
        rows.append(row)
    return rows


def _to_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Convert rows to a table. Settings with a non-numeric value become text."""
    frame = pd.DataFrame(rows)
    for name in frame.select_dtypes(exclude=["number", "bool"]):
        if not frame[name].dropna().map(lambda value: isinstance(value, bool)).all():
            frame[name] = frame[name].map(label_of, na_action="ignore")
    return pa.Table.from_pandas(frame, preserve_index=False)


def _to_bytes(write: Callable[[pa.Table, Any], object], rows: Sequence[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    write(_to_table(rows), buffer)
    return buffer.getvalue()


def write_tables(results: StudyResults) -> list[Path]:
    """Write the tables into the study's folder: ``.md``, ``.tex``, ``.csv``, ``.parquet``, ``-runs.csv``, ``-best.yaml``.

    ``-best.yaml`` is the configuration of the best draw for a separate run with all rounds.

    Raises:
        ResourcesError: The disk is full, or the folder is not writable.
    """
    place, rows = results.study.output, records(results)
    contents = {
        place(".csv"): _to_bytes(pa.csv.write_csv, rows),
        place(".parquet"): _to_bytes(pa.parquet.write_table, rows),
        place(".md"): markdown(results).encode(),
        place(".tex"): latex(results).encode(),
        place("-runs.csv"): _to_bytes(pa.csv.write_csv, results.runs),
    }
    if results.best is not None:
        config = results.best.trials[0].config.model_dump(mode="json")
        config["run"] |= {"name": None, "dir": "runs"}
        contents[place("-best.yaml")] = to_yaml(config, flow=False).encode()
    for path, content in contents.items():
        write_durably(path, content, _ADVICE)
    return list(contents)
