"""Tables of a study with notes, as Markdown, LaTeX, CSV and Parquet."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from raydfl.core.files import write_durably
from raydfl.core.yaml import to_yaml
from raydfl.data import DataSettings, Population
from raydfl.data.features import FeatureSettings, FileFeatures, ImageFeatures, KaldiFeatures, PretrainedFeatures
from raydfl.engine import Config, Criterion
from raydfl.experiments.results import CONFIDENCE, Contestant, StudyResults, format_number
from raydfl.experiments.settings import label_of
from raydfl.experiments.study import Study, Trial, describe_value

_MARK = "*"
"""Mark of cells with an unusual number or interval of evaluations."""
_ADVICE = "make room or make the folder writable, then write the tables again with raydfl study FILE --table"
_IN_LATEX = 20
"""Maximum draws of a cell in the LaTeX table."""
Table = tuple[list[str], list[list[str]]]
"""Headings, and the texts of each line."""


def make_full_table(results: StudyResults) -> Table:
    """Make a table with a line per contestant and all its results."""
    domains, texts = results.study.settings.domains, _columns(results)
    lines = []
    for contestant in results.contestants:
        draw = [contestant.draw, *(describe_value(contestant.values[key]) for key in domains)] if domains else []
        lines.append([*contestant.labels, *draw, *(text(contestant) for text in texts.values())])
    return [*results.study.axes, *(["draw", *domains] if domains else []), *texts], lines


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
    if settings.paper is not None:
        columns["paper"] = _paper_text
        if settings.control:
            columns["paper's difference"] = lambda contestant: format_number(contestant.paper_difference, signed=True)
    return columns


def _bold(text: str, contestant: Contestant) -> str:
    return f"**{text}**" if contestant.best else text


def _paper_text(contestant: Contestant) -> str:
    mean, spread = contestant.paper or (None, None)
    return format_number(mean) + (f" ± {format_number(spread)}" if spread is not None else "")


def pivot(results: StudyResults, text: Callable[[Contestant], str] | None = None) -> Table:
    """Make a table of the headline with the last axis as columns and all further axes as rows."""
    by_labels = {contestant.labels: contestant for contestant in results.contestants}
    usual = results.kinds_of_evaluations[:1]
    text = text or (lambda contestant: _pivot_text(contestant, results.summary, usual))
    last = results.study.settings.axes[results.study.axes[-1]]
    across = [label for label in last if any(labels[-1] == label for labels in by_labels)]
    lines = []
    for down in dict.fromkeys(labels[:-1] for labels in by_labels):
        cells = [by_labels.get((*down, label)) for label in across]
        lines.append([*down, *("-" if contestant is None else text(contestant) for contestant in cells)])
    return [*results.study.axes[:-1], *across], lines


def _pivot_text(contestant: Contestant, summary: str, usual: Sequence[str]) -> str:
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
    parts += [] if settings.domains else [_markdown_table(pivot(results))]
    parts += ["\n".join(f"- {note}" for note in describe_results(results)), _markdown_table(make_full_table(results))]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
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
        tables.append(_latex_table(table, len(study.axes) - 1, caption, label))
    headings, lines = make_full_table(results)
    left = [*study.axes, *(["draw", *settings.domains] if settings.domains else [])]
    selected = {*left, "score", results.headline, "n", "difference", "values by repeat"}
    places = [place for place, name in enumerate(headings) if name in selected]
    cells = itertools.groupby(zip(results.contestants, lines, strict=True), key=lambda pair: pair[0].labels)
    best = [line for _, pairs in cells for _, line in itertools.islice(pairs, _IN_LATEX)]
    if len(best) < len(lines):
        caption += f" The table has the best {_IN_LATEX} draws{' of each cell' if study.axes else ''}."
    table = [headings[place] for place in places], [[line[place] for place in places] for line in best]
    tables.append(_latex_table(table, len(left), caption, f"{label}-all"))
    return "% \\usepackage{booktabs}\n" + "\n".join(tables)


def _latex_table(table: Table, left: int, caption: str, label: str) -> str:
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


# -- notes -----------------------------------------------------------------------------------------------------------


def describe_results(results: StudyResults) -> list[str]:
    """Make the notes of the tables about summary, best, control, features, paper and search."""
    study, settings = results.study, results.study.settings
    trials = [trial for contestant in results.contestants for trial in contestant.trials]
    repeats = " or ".join(dict.fromkeys(trial.repeat.partition("=")[0] for trial in trials if trial.repeat))
    over = f"; mean ± sample standard deviation over {repeats}" if repeats else ""
    counts = {contestant.n for contestant in results.contestants}
    runs = f"n = {counts.pop()}" if len(counts) == 1 and results.complete else "n: runs"
    notes = [f"Headline: {results.headline}{over}; {runs}."]
    if results.summary == "chosen":
        choosers = {c.metric: c for trial in trials for c in _find_choosers(trial)}
        notes += [f"{name} chooses the round ({criterion.chooser})." for name, criterion in choosers.items()]
    if results.summary == "best":
        notes.append("The best evaluation is selected on the measured data.")
    kinds = results.kinds_of_evaluations
    if len(kinds) > 1 and not settings.domains:
        notes.append(
            f"Runs have different evaluations ({'; '.join(kinds)}). * marks cells with evaluations other than {kinds[0]}."
        )
    if any(contestant.best for contestant in results.contestants):
        cells = f"of the cells that differ only in {study.axes[-1]}" if study.axes else ""
        notes.append(
            f"Bold: the best {('draw of each cell' if study.axes else 'draw') if settings.domains else cells}."
        )
    if settings.control:
        names = ", ".join(f"{name} {label}" for name, label in settings.control.items())
        notes.append(
            f"Difference: from the cell with {names}, mean of the differences between runs with equal {repeats or 'seed'}, "
            f"with the {100 * CONFIDENCE:.0f} % interval of Student's t (for two or more pairs)."
        )
    notes += _describe_features(study)
    if settings.paper is not None:
        notes.append(f"Paper: {settings.paper.source}.{' ' + settings.paper.note if settings.paper.note else ''}")
    if settings.domains:
        notes.append("Draws are ranked by the headline, finished draws first and worthless draws last.")
    if settings.domains and study.first.metric.split == "test":
        notes.append(
            "The best settings are chosen on the test data, so their score is an optimistic estimate for new data."
        )
    if settings.scheduler.name != "none":
        notes.append(
            f"Scheduler: {label_of(settings.scheduler.model_dump(mode='json'))}. Ray Tune keeps its state in memory. After an "
            f"interruption, it compares only resumed and new trials, so it may stop different trials."
        )
    if settings.population is not None:
        notes.append(
            "A member of the population has the settings of its last exchange. Its result also depends on earlier settings of the "
            "member and its parents (branches in its run.json), so training from round 1 with the best settings differs."
        )
    return notes


def _find_choosers(trial: Trial) -> Iterable[Criterion]:
    """Return the criteria of ``run.best``, with the validation data of the trial's run if it exists."""
    folder, config = trial.run_dir / "population", trial.config
    population = Population.load(folder, features=False) if folder.exists() else None
    return config.make_selection(population).for_best.values()


def _describe_features(study: Study) -> list[str]:
    """Make notes about the input features of a study's networks, with the labels of differing cells."""
    described: dict[str, list[tuple[str, ...]]] = {}
    for labels in study.cells:
        trial = next((trial for trial in study.trials if trial.labels == labels), study.first)
        described.setdefault(describe_features(trial.config), []).append(labels)
    if len(described) == 1:
        return [f"Features: {next(iter(described))}."]
    for place in range(len(study.axes)):  # A single axis may determine the features.
        groups = {text: dict.fromkeys(labels[place] for labels in cells) for text, cells in described.items()}
        if sum(map(len, groups.values())) == len(set().union(*groups.values())):
            return [f"Features ({', '.join(labels)}): {text}." for text, labels in groups.items()]
    return [
        f"Features ({len(cells)} cells, such as {', '.join(cells[0])}): {text}." for text, cells in described.items()
    ]


def describe_features(config: Config) -> str:
    """Describe the input features of a configuration's networks."""
    return "; ".join(dict.fromkeys(_describe_data(data) for data in config.data.each.values()))


def _describe_data(data: DataSettings) -> str:
    features = data.features
    by = {"group": "speaker", "part": "data set"}.get(features.normalise, features.normalise)
    z_score = "not normalised" if by == "none" else f"z-score by {by}"
    if isinstance(features, FileFeatures):
        return f"{features.path.name}, {features.bands} bands, {z_score}"
    if isinstance(features, ImageFeatures):
        return f"images of {features.size[0]} x {features.size[1]}, {features.channels} channels"
    if isinstance(features, KaldiFeatures):
        return f"Kaldi's filter bank, {features.bands} bands at {features.sample_rate / 1000:g} kHz"
    if isinstance(features, PretrainedFeatures):
        return features.title
    kind = "log-mel" if isinstance(features, FeatureSettings) else features.title
    return f"{kind}, {features.bands} bands at {features.sample_rate / 1000:g} kHz, {z_score}"
