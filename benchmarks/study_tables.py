"""Write the tables and figures of the docs from the JSON files of studies in benchmarks/results.

A page names a study, or asks for the list or the conclusions of all studies, between two comments. This program writes the text
between them:

    <!-- study: benchmarks/studies/NAME.yaml -->
    <!-- end of study -->
    <!-- list of studies -->
    <!-- end of list -->
    <!-- conclusions of studies -->
    <!-- end of conclusions -->

The values by seed are in benchmarks/results/NAME.md.

    python benchmarks/study_tables.py            # all pages
    python benchmarks/study_tables.py --check    # change nothing; exit code 1 if a page differs from the JSON files
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

import matplotlib as mpl

from raydfl.core.errors import ConfigError
from raydfl.core.options import path_options
from raydfl.data import find_dataset, place_of
from raydfl.experiments import StudyResults, describe_results, load_study, make_full_table, make_summary_table
from raydfl.experiments.page import draw_by_bytes, draw_curves
from raydfl.experiments.protocol import LABELS
from raydfl.experiments.results import collect
from raydfl.experiments.state import StudyState
from raydfl.experiments.statistics import get_kind
from raydfl.experiments.study import Study
from raydfl.experiments.tables import format_markdown, make_controls_table
from raydfl.runs.report import Plot

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STUDIES = ROOT / "benchmarks" / "studies"
RESULTS = ROOT / "benchmarks" / "results"
_COLUMNS = 100
"""Characters in a line of a code block on the site."""
_MAIN_NOTES = re.compile(
    r"^Exploratory: |^Smallest difference|^Tuning: |^Did not learn, so not ranked|^Undecided|[Uu]nfinished|^No held-out"
    r"|^Best at an end|^Not tuned, |different commits|^Settings are not tuned|^Other conclusions| minus "
)
_LIST = re.compile(r"(<!-- list of studies -->\n).*?(<!-- end of list -->)", re.DOTALL)
_CONCLUSIONS = re.compile(r"(<!-- conclusions of studies -->\n).*?(<!-- end of conclusions -->)", re.DOTALL)
_BLOCK = re.compile(r"(<!-- study: (?P<study>\S+) -->\n).*?(<!-- end of study -->)", re.DOTALL)


@functools.cache
def read_results(study_file: str) -> StudyResults:
    """Read the results of a study from its JSON files. Pages share them."""
    study = load_study(ROOT / study_file)
    return collect(study, StudyState(study))


def format_block(study_file: str, results: StudyResults) -> str:
    """Format the text of a page about a study: plan, tables, main notes and figures."""
    settings = results.study.settings
    controls = make_controls_table(results)
    name = Path(study_file).stem
    parts = [
        f"**Question:** {settings.question}" * bool(settings.question),
        settings.note,
        format_markdown(make_summary_table(results)),
        format_markdown(controls) if controls[1] else "",
        "\n".join(f"- {note}" for note in describe_results(results) if _MAIN_NOTES.search(note)),
        "\n\n".join(f"![{settings.title}: {alt}]({file})" for file, (alt, _) in list_figures(name, results).items()),
        f"[Protocol, budgets, values by seed, command](../benchmarks/results/{name}.md).",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def format_details(study_file: str, results: StudyResults) -> str:
    """Format the file with all notes of a study, its values by seed, its budgets, and the command that repeats a cell."""
    headings, lines = make_full_table(results)
    summary = make_summary_table(results)
    places = [place for place, name in enumerate(headings) if name not in summary[0] or name in results.study.axes]
    table = [headings[place] for place in places], [[line[place] for place in places] for line in lines]
    notes = "\n".join(f"- {note}" for note in describe_results(results))
    command = f"{format_repetition(results)}\n\n```bash\n{make_command(study_file, results.study)}\n```"
    return f"# {results.study.settings.title}\n\n{notes}\n\n{format_markdown(table)}\n\n{command}\n"


def format_repetition(results: StudyResults) -> str:
    """Format the introduction of :func:`make_command`, with the range of scores of a successful repetition."""
    contestant = results.contestants[0]
    low, high = contestant.score(results.summary).interval
    expected = f" The score of {contestant.name} should be from {low:.2f} to {high:.2f}, the 95 % interval of its mean."
    return f"Repeat one cell in a checkout.{expected * math.isfinite(low)}"


def make_command(study_file: str, study: Study) -> str:
    """Make the command that repeats the first cell of a study, with a placeholder for each path of a data set."""
    words = [f'--only "{axis}={label}"' for axis, label in zip(study.axes, study.cells[0], strict=True)]
    words += [
        f"{place_of(part)}.{option}=PATH/TO/{settings.name}"
        for part, settings in study.first.config.data.each.items()
        for option in path_options(find_dataset(settings.name))
        if (settings.model_extra or {}).get(option) is not None
    ]
    lines = [f"raydfl study {study_file} results=null"]
    for word in words:
        if len(f"{lines[-1]} {word} \\") > _COLUMNS:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def format_list() -> str:
    """Format the list of studies with unfinished runs: question, finished runs, hours of work. The last line counts all runs."""
    lines = []
    for path in sorted(STUDIES.glob("*.yaml")):
        if "question:" not in path.read_text(encoding="utf-8"):
            continue  # a base configuration, or a search
        try:
            known = read_results(f"benchmarks/studies/{path.name}")
            study, found = known.study, [result for part in known.contestants for result in part.results]
        except ConfigError:  # The tuning is unfinished.
            study, found = load_study(path, ["tuned=null"]), []
        if len(found) == len(study.trials):
            continue
        hours = sum(result.budget.get("client seconds", 0.0) for result in found) / 3600
        link = f"[{path.stem}](../benchmarks/studies/{path.name})"
        lines.append([link, study.settings.question, f"{len(found)} of {len(study.trials)}", f"{hours:.1f}"])
    results = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.rglob("*.json")]
    budgets = [result["budget"] for result in results if "budget" in result]  # the rest are no runs of studies
    hours = sum(budget.get("client seconds", 0.0) for budget in budgets) / 3600
    table = format_markdown((["study", "question", "finished runs", "hours of clients' work"], lines))
    return f"{table}\n\nAll studies and searches: {len(budgets):,} runs with {hours:.0f} hours of clients' work.\n"


def format_conclusions() -> str:
    """Format the conclusions of all confirmatory studies: a line for each contestant that trained and finished, and each pair."""
    lines, opposite, pairs = [], 0, 0
    for path in sorted(STUDIES.glob("*.yaml")):
        if "question:" not in path.read_text(encoding="utf-8"):
            continue
        try:
            results = read_results(f"benchmarks/studies/{path.name}")
        except ConfigError:  # The tuning is unfinished.
            continue
        settings = results.study.settings
        changed = {last.labels: last for last in results.changed}
        for contestant in results.contestants:
            trained = LABELS["untrained"] not in contestant.labels and contestant.conclusion != "unfinished"
            if settings.confirmatory and contestant.difference and trained:
                control = ", ".join(settings.control.get(axis, "") for axis in results.study.axes).strip(", ")
                labels, unit = ", ".join(contestant.labels), contestant.metrics[0].title
                link = f"[{path.stem}](../benchmarks/studies/{path.name})"
                line = [f"{labels} minus {control}", str(contestant.difference), contestant.conclusion]
                last = changed.get(contestant.labels)
                other = f"{last.difference}, {get_kind(last.conclusion)}" if last else ""
                opposite += {"better", "worse"} <= {*f"{get_kind(contestant.conclusion)} {other}".split()}
                lines.append([*line, other, unit, contestant.n, link])
        if settings.confirmatory:
            unit, link = results.contestants[0].metrics[0].title, f"[{path.stem}](../benchmarks/studies/{path.name})"
            further = {name: found for name, found in results.further.items() if found[1]}
            pairs += len(further)
            lines += [
                [name, str(found), conclusion, "", unit, str(found.n), link]
                for name, (found, conclusion) in further.items()
            ]
    studies = len({line[-1] for line in lines})
    kinds = Counter(get_kind(line[2]) for line in lines)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    headings = ["comparison", "difference", "conclusion", "in the last evaluation, if different", "score", "n", "study"]
    changes = sum(bool(line[3]) for line in lines)
    table = format_markdown((headings, lines))
    return (
        f"{len(lines)} comparisons in {studies} studies, {pairs} of them further pairs of the study files: {counts}. Holm's "
        f"correction holds within a study. In the last evaluation alone, {changes} conclusions of comparisons with the control "
        f"differ, {opposite or 'none'} of them from better to worse or back.\n\n{table}\n"
    )


def list_figures(name: str, results: StudyResults) -> dict[str, tuple[str, Plot]]:
    """List the figures of a study by file name, each with its description and plot.

    They are the metrics over the rounds, and the headline over the bytes if contestants send different amounts.
    """
    plots = {f"study-{name}.svg": draw_curves(results), f"study-{name}-bytes.svg": draw_by_bytes(results)}
    for metric in range(1, 1 + len(results.study.settings.also)):
        plots[f"study-{name}-{metric + 1}.svg"] = draw_curves(results, metric)
    return {file: (plot.title, plot) for file, plot in plots.items() if plot}


def draw_figures(study_file: str, results: StudyResults) -> None:
    """Draw the figures of a study into the folder of the pages."""
    for file, (_, plot) in list_figures(Path(study_file).stem, results).items():
        buffer = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": study_file}):
            plot.figure().savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
        (DOCS / file).write_bytes(buffer.getvalue())


def update(page: Path, check: bool) -> bool:
    """Write the blocks of a page and its studies' details, and return whether any differed from the JSON files."""
    before = text = page.read_text(encoding="utf-8")
    results = {match["study"]: read_results(match["study"]) for match in _BLOCK.finditer(text)}
    blocks = {study_file: format_block(study_file, found) for study_file, found in results.items()}
    details = {RESULTS / f"{Path(file).stem}.md": format_details(file, found) for file, found in results.items()}
    if _LIST.search(text):
        text_of_list = format_list()
        text = _LIST.sub(lambda match: f"{match[1]}{text_of_list}{match[2]}", text)
    if _CONCLUSIONS.search(text):
        conclusions = format_conclusions()
        text = _CONCLUSIONS.sub(lambda match: f"{match[1]}{conclusions}{match[2]}", text)
    made = _BLOCK.sub(lambda match: f"{match[1]}{blocks[match['study']]}{match[3]}", text)
    differs = made != before or any(not file.exists() or file.read_text() != new for file, new in details.items())
    if not check:
        page.write_text(made, encoding="utf-8")
        for file, new in details.items():
            file.write_text(new, encoding="utf-8")
        for study_file, found in results.items():
            draw_figures(study_file, found)
    return differs


def main() -> None:
    """Write or check all pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page differs")
    check = parser.parse_args().check
    pages = sorted(DOCS.glob("*.md"))
    outdated = [page.name for page in pages if update(page, check)]
    for name in outdated:
        print(f"{'differs from the JSON files' if check else 'written'}: {name}")
    print(
        f"{len(pages) - len(outdated)} of {len(pages)} pages {'equal the JSON files' if check else 'were up to date'}"
    )
    sys.exit(1 if check and outdated else 0)


if __name__ == "__main__":
    main()
