"""Write the tables and figures of the docs from the JSON files of studies in benchmarks/results.

A page names a study between two comments, and this program writes the text between them:

    <!-- study: benchmarks/studies/NAME.yaml -->
    <!-- end of study -->

    python benchmarks/study_tables.py            # all pages
    python benchmarks/study_tables.py --check    # change nothing; exit code 1 if a page differs from the JSON files
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

import matplotlib as mpl

from raydfl.experiments import StudyResults, describe_results, load_study, make_full_table, make_summary_table
from raydfl.experiments.page import draw_curves
from raydfl.experiments.results import collect
from raydfl.experiments.state import StudyState
from raydfl.experiments.tables import format_markdown, make_controls_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(<!-- study: (?P<study>\S+) -->\n).*?(<!-- end of study -->)", re.DOTALL)


def read_results(study_file: str) -> StudyResults:
    """Read the results of a study from its JSON files."""
    study = load_study(ROOT / study_file)
    return collect(study, StudyState(study))


def format_block(study_file: str, results: StudyResults) -> str:
    """Format the text of a page about a study: plan, tables, notes, values by seed, figure and command."""
    study, settings = results.study, results.study.settings
    headings, lines = make_full_table(results)
    summary = make_summary_table(results)
    hidden = [name for name in headings if name not in summary[0] or name in study.axes]
    places = [headings.index(name) for name in hidden]
    more = hidden, [[line[place] for place in places] for line in lines]
    controls = make_controls_table(results)
    name = Path(study_file).stem
    parts = [
        f"**Question:** {settings.question}" * bool(settings.question),
        settings.note,
        format_markdown(summary),
        format_markdown(controls) if controls[1] else "",
        "\n".join(f"- {note}" for note in describe_results(results)),
        f"![Learning curves of {settings.title}](study-{name}.svg)"
        if any(c.curves for c in results.contestants)
        else "",
        f"<details><summary>Values by seed, and budgets</summary>\n\n{format_markdown(more)}\n\n</details>",
        "Repeat one cell (the result is not stored):",
        "<!-- test: skip: trains for long -->\n```bash\n"
        f'raydfl study {study_file} results=null --only "{study.axes[-1]}={study.cells[0][-1]}" data.root=PATH/TO/DATA\n```',
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def draw_figure(study_file: str, results: StudyResults) -> None:
    """Draw the learning curves of the first cell of the leading axes into the folder of the pages."""
    plot = next(draw_curves(results), None)
    if plot is not None:
        buffer = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": study_file}):
            plot.figure().savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
        (DOCS / f"study-{Path(study_file).stem}.svg").write_bytes(buffer.getvalue())


def update(page: Path, check: bool) -> bool:
    """Write the blocks of a page, and return whether the page differed from the JSON files."""
    text = page.read_text(encoding="utf-8")
    results = {match["study"]: read_results(match["study"]) for match in _BLOCK.finditer(text)}
    blocks = {study_file: format_block(study_file, found) for study_file, found in results.items()}
    made = _BLOCK.sub(lambda match: f"{match[1]}{blocks[match['study']]}{match[3]}", text)
    if not check:
        page.write_text(made, encoding="utf-8")
        for study_file, found in results.items():
            draw_figure(study_file, found)
    return made != text


def main() -> None:
    """Write or check all pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page differs")
    check = parser.parse_args().check
    outdated = [page.name for page in sorted(DOCS.glob("*.md")) if update(page, check)]
    for name in outdated:
        print(f"{'differs from the JSON files' if check else 'written'}: {name}")
    sys.exit(1 if check and outdated else 0)


if __name__ == "__main__":
    main()
