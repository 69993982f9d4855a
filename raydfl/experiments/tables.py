"""Tables of a study: text for people, and the files of Markdown, LaTeX, CSV and Parquet."""

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
from raydfl.experiments.notes import describe_results
from raydfl.experiments.results import Contestant, StudyResults, shown
from raydfl.experiments.settings import label_of
from raydfl.experiments.study import describe_value

_MARK = "*"
"""Mark of cells with another number or interval of evaluations than most cells of the table."""
_ADVICE = "make room or make the folder writable, then write the tables again with raydfl study FILE --table"
_IN_LATEX = 20
"""Most draws of a cell in the table for a paper."""
Table = tuple[list[str], list[list[str]]]
"""Headings, and the text of each line."""


def full_table(results: StudyResults) -> Table:
    """Return a line for each contestant, with all that is known of it."""
    texts = _columns(results)
    domains = results.study.settings.domains
    left = [*results.study.axes, *(["draw", *domains] if domains else [])]
    lines = [
        [*each.labels, *([each.draw, *(describe_value(each.values[key]) for key in domains)] if domains else [])]
        + [text(each) for text in texts.values()]
        for each in results.contestants
    ]
    return [*left, *texts], lines


def _columns(results: StudyResults) -> dict[str, Callable[[Contestant], str]]:
    """Return the columns beside the labels: the text of a contestant, by heading."""
    settings, summary = results.study.settings, results.summary
    found: dict[str, Callable[[Contestant], str]] = {}
    if results.headline.startswith("headline"):
        found["score"] = lambda each: each.metrics[0].title
    found[results.headline] = lambda each: _bold(str(each.score(summary)), each)
    found["n"] = lambda each: each.n
    if settings.domains:
        found["rounds"] = lambda each: str(each.rounds)
    elif len(results.kinds_of_evaluations) > 1:
        found["evaluations"] = lambda each: "; ".join(each.evaluations) or "-"
    if settings.control:
        found["difference"] = lambda each: "-" if each.difference is None else str(each.difference)
    if any(len(each.trials) > 1 for each in results.contestants):
        found["values by repeat"] = lambda each: ", ".join(map(shown, each.score(summary).values)) or "-"
    for key, title in results.titles.items():
        if key != summary:
            found[title] = lambda each, key=key: str(each.score(key))  # type: ignore[misc]
    for place, metric in enumerate(settings.also, start=1):
        title = results.contestants[0].metrics[place].title if results.contestants else metric.title
        found[title] = lambda each, place=place: str(each.score(summary, place))  # type: ignore[misc]
    if settings.paper is not None:
        found["paper"] = paper_text
        if settings.control:
            found["paper's difference"] = lambda each: shown(each.paper_difference, signed=True)
    return found


def _bold(text: str, contestant: Contestant) -> str:
    return f"**{text}**" if contestant.best else text


def paper_text(contestant: Contestant) -> str:
    """Return the paper's result; ``-`` when it gives none."""
    if contestant.paper is None:
        return "-"
    mean, spread = contestant.paper
    return shown(mean) + (f" ± {shown(spread)}" if spread is not None else "")


def pivot(results: StudyResults, text: Callable[[Contestant], str] | None = None) -> Table:
    """Return the headline as papers print it: the last axis across, the others down."""
    by_labels = {each.labels: each for each in results.contestants}
    usual = tuple(results.kinds_of_evaluations[:1])
    text = text or (lambda each: _pivot_text(each, results.summary, usual))
    across = [
        label for label in results.study.settings.axes[results.study.axes[-1]] if any(k[-1] == label for k in by_labels)
    ]
    lines = []
    for down in dict.fromkeys(labels[:-1] for labels in by_labels):
        cells = [by_labels.get((*down, label)) for label in across]
        lines.append([*down, *("-" if each is None else text(each) for each in cells)])
    return [*results.study.axes[:-1], *across], lines


def _pivot_text(each: Contestant, summary: str, usual: tuple[str, ...]) -> str:
    if not each.done:
        parts = [each.n]
    else:
        mark = _MARK if each.evaluations not in ((), usual) else ""
        parts = [_bold(str(each.score(summary)), each) + mark]
        parts += [f"({each.n})"] if not each.complete or each.worthless else []
    parts += [f"({each.difference})"] if each.difference is not None else []
    parts += [f"[paper {shown(each.paper[0])}]"] if each.paper is not None else []
    return " ".join(parts)


def markdown(results: StudyResults) -> str:
    """Return the tables and the notes."""
    settings = results.study.settings
    parts = [f"# {settings.title}", *filter(None, (settings.question, settings.note))]
    if not settings.domains:
        parts.append(_markdown_table(pivot(results)))
    parts += ["\n".join(f"- {note}" for note in describe_results(results)), _markdown_table(full_table(results))]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    headings, lines = table
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(text.replace('|', '/') for text in row)} |" for row in rows)


# -- LaTeX -----------------------------------------------------------------------------------------------------------


def latex(results: StudyResults) -> str:
    """Return tables for a paper; they need the package booktabs.

    The first has the last axis across. The second has a line for each contestant: mean, n, values by repeat, difference.
    """
    settings, summary = results.study.settings, results.summary
    notes = [
        note for note in describe_results(results) if note.startswith(("Headline", "Bold", "Difference", "Runs have"))
    ]
    caption = " ".join(filter(None, [f"{settings.title.rstrip('.')}.", settings.question, *notes]))
    caption = caption.replace(f"{_MARK} marks", "An asterisk marks")
    tables = []
    if len(results.study.axes) > 1 and not settings.domains:
        headings, lines = pivot(results, lambda each: _bold(str(each.score(summary)), each))
        left = len(results.study.axes) - 1
        tables.append(_latex_table(headings, lines, left, caption, f"tab:{results.study.file.stem}"))
    headings, lines = full_table(results)
    kept = {
        *results.study.axes,
        "draw",
        *settings.domains,
        "score",
        results.headline,
        "n",
        "difference",
        "values by repeat",
    }
    places = [place for place, name in enumerate(headings) if name in kept]
    cells = itertools.groupby(zip(results.contestants, lines, strict=True), key=lambda pair: pair[0].labels)
    best = [line for _, pairs in cells for _, line in itertools.islice(pairs, _IN_LATEX)]
    if len(best) < len(lines):
        caption += f" The table has the best {_IN_LATEX} draws{' of each cell' if results.study.axes else ''}."
    chosen = [[line[place] for place in places] for line in best]
    left = len(results.study.axes) + (1 + len(settings.domains) if settings.domains else 0)
    name = f"tab:{results.study.file.stem}-all"
    tables.append(_latex_table([headings[place] for place in places], chosen, left, caption, name))
    return "% \\usepackage{booktabs}\n" + "\n".join(tables)


def _latex_table(headings: Sequence[str], lines: Sequence[Sequence[str]], left: int, caption: str, label: str) -> str:
    frame = pd.DataFrame([list(map(_in_latex, line)) for line in lines], columns=list(map(_in_latex, headings)))
    text: str = frame.style.hide(axis="index").to_latex(
        hrules=True,
        column_format="l" * left + "r" * (len(headings) - left),
        position_float="centering",
        caption=_in_latex(caption),
        label=re.sub(r"[^A-Za-z0-9:-]", "-", label),
    )
    return text


_SPECIAL = {
    "\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}  # fmt: skip


def _in_latex(text: str) -> str:
    """Return text with LaTeX's special characters escaped, bold text as such and a minus sign before negative numbers.

    A first ``[`` or ``*`` is escaped too: at the start of a row LaTeX would read it as an argument of the command before it.
    """
    escaped = "".join(_SPECIAL.get(character, character) for character in text)
    signed = re.sub(r"(?<![\w.])([-+])(?=\d)", r"$\1$", escaped)
    bold = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", signed)
    return re.sub(r"^(\s*)([\[*])", r"\1{\2}", bold)


# -- numbers ---------------------------------------------------------------------------------------------------------


def records(results: StudyResults) -> list[dict[str, Any]]:
    """Return a flat record of numbers for each contestant; NaN where there is none."""
    found, nothing = [], float("nan")
    for each in results.contestants:
        score, difference = each.score(results.summary), each.difference
        row: dict[str, Any] = dict(zip(results.study.axes, each.labels, strict=True))
        row |= {"draw": each.draw, **each.values} if each.draw else {}
        row |= {"score": each.metrics[0].title, "summary": results.summary}
        row |= {"n": each.done, "wanted": len(each.trials), "worthless": each.worthless, "best": each.best}
        row |= {"evaluations": "; ".join(each.evaluations), "mean": score.mean, "std": score.std}
        for trial in each.trials if len(each.trials) > 1 else ():
            row[trial.repeat] = score.by_repeat.get(trial.repeat, nothing)
        if results.study.settings.control:
            names = ("mean", "low", "high", "n")
            row |= {
                f"difference {name}": nothing if difference is None else getattr(difference, name) for name in names
            }
        if results.study.settings.paper is not None:
            values = (*(each.paper or (None, None)), each.paper_difference)
            titles = ("paper", "paper_std", "paper_difference")
            row |= {name: nothing if value is None else value for name, value in zip(titles, values, strict=True)}
        for place, metric in enumerate(each.metrics):
            for summary in results.titles:
                name = f"{metric.title if place else 'headline'} {summary}"
                row |= {f"{name} mean": each.score(summary, place).mean, f"{name} std": each.score(summary, place).std}
        found.append(row)
    return found


def to_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Return rows as a table. Settings that are not numbers in all rows become text."""
    frame = pd.DataFrame(rows)
    for name in [name for name in frame if frame[name].dtype == object]:
        known = [None if pd.api.types.is_scalar(value) and pd.isna(value) else value for value in frame[name]]
        kinds = {type(value) for value in known if value is not None}
        frame[name] = known if kinds <= {bool} else [None if value is None else label_of(value) for value in known]
    return pa.Table.from_pandas(frame, preserve_index=False)


def _to_bytes(write: Callable[[pa.Table, Any], object], rows: Sequence[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    write(to_table(rows), buffer)
    return buffer.getvalue()


def best_config(results: StudyResults) -> dict[str, Any] | None:
    """Return the configuration of the best draw, with all rounds, for a run of its own; ``None``: there is none yet."""
    if results.best is None:
        return None
    config: dict[str, Any] = results.best.trials[0].config.model_dump(mode="json")
    config["run"] |= {"name": None, "dir": "runs"}
    return config


def write_tables(results: StudyResults) -> list[Path]:
    """Write the tables into the study's folder: ``.md``, ``.tex``, ``.csv``, ``.parquet``, ``-runs.csv``, ``-best.yaml``.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    place, rows = results.study.output, records(results)
    contents = {
        place(".csv"): _to_bytes(pa.csv.write_csv, rows),
        place(".parquet"): _to_bytes(pa.parquet.write_table, rows),
        place(".md"): markdown(results).encode(),
        place(".tex"): latex(results).encode(),
        place("-runs.csv"): _to_bytes(pa.csv.write_csv, results.runs),
    }
    config = best_config(results)
    if config is not None:
        contents[place("-best.yaml")] = to_yaml(config, flow=False).encode()
    for path, content in contents.items():
        write_durably(path, content, _ADVICE)
    return list(contents)
