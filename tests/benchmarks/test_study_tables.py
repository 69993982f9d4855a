"""Pages of studies: commands for the repetition of a cell, and scores in the text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import study_tables
from commands import Raydfl
from scipy import stats

from raydfl.experiments import load_study
from raydfl.experiments.statistics import Difference, Spread

ROOT = Path(__file__).parents[2]
STUDIES = ["fedapta_groups", "groups", "machines", "speech_commands", "views_readings"]
PAGES = ["attacks", "fedapta", "fedmlac", "fedstar", "modality-mirror", "profila", "results"]
TABLES = re.compile(r"<!-- (?:study: \S+|conclusions of studies|list of studies) -->.*?<!-- end of \w+ -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
SCORE = re.compile(r"(?<![\w.])[+-]?(\d+\.\d+)(?= %| points| \[|\]|,[^\[\n|]*\])")
"""A score of per cent, a difference in points, or an end of an interval."""


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)


@pytest.mark.parametrize("name", STUDIES)
def test_the_command_of_a_page_repeats_one_cell(
    name: str, raydfl: Raydfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the command itself, run as printed in a checkout; only the placeholders of paths are replaced."""
    file = f"benchmarks/studies/{name}.yaml"
    command = study_tables.make_command(file, load_study(ROOT / file, ["tuned=null"]))
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(re.sub(r"PATH/TO/\w+", str(tmp_path), command.replace("\\\n", "")))[1:]
    result = raydfl(*arguments, "--check", "tuned=null", f"dir={tmp_path / 'runs'}")
    assert (result.code, "1 cell, " in result.out) == (0, True), result.err


@pytest.mark.slow
def test_a_federation_of_several_sets_has_a_path_for_each_set_of_files() -> None:
    file = "benchmarks/studies/groups.yaml"
    command = study_tables.make_command(file, load_study(ROOT / file, ["tuned=null"]))
    assert re.findall(r"(\S+)=PATH/TO/fsdd", command) == ["data.parts.digits.root"]


def test_the_range_of_a_repetition_is_students_interval_of_the_mean() -> None:
    values = [50.33, 54.96, 52.24, 53.92, 53.38]
    expected = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    assert Spread({str(at): value for at, value in enumerate(values)}).interval == pytest.approx(expected)
    assert not any(bound == bound for bound in Spread({"1": 2.0}).interval)


def test_the_list_of_comparisons_counts_other_conclusions_of_the_last_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: B turns from worse to better, C loses its difference, D stays better, and D is compared with C too."""
    (tmp_path / "a.yaml").write_text("question: which?")
    metrics = [SimpleNamespace(title="accuracy")]

    def make(label: str, difference: str, conclusion: str) -> SimpleNamespace:
        return SimpleNamespace(labels=(label,), difference=difference, conclusion=conclusion, metrics=metrics, n="5")

    results = SimpleNamespace(
        study=SimpleNamespace(settings=SimpleNamespace(confirmatory=True, control={"method": "A"}), axes=("method",)),
        contestants=[make("B", "-2", "worse"), make("C", "+1", "better (not tuned)"), make("D", "+4", "better")],
        changed=[make("B", "+3", "perhaps better"), make("C", "+0", "no difference seen")],
        further={"D minus C": (Difference(3.0, 1.0, 5.0, 5), "better"), "D minus B": (None, "")},
    )
    monkeypatch.setattr(study_tables, "STUDIES", tmp_path)
    monkeypatch.setattr(study_tables, "read_results", lambda file: results)
    text = study_tables.format_conclusions()
    assert "4 comparisons in 1 studies, 1 of them further pairs of the study files: 3 better, 1 worse." in text
    assert "2 conclusions of comparisons with the control differ, 1 of them from better to worse or back." in text
    assert "| D minus C | +3.00 [+1.00, +5.00] | better |  | accuracy | 5 |" in text
    assert "| B minus A | -2 | worse | +3, perhaps better | accuracy | 5 |" in text
    assert "| D minus A | +4 | better |  | accuracy | 5 |" in text


@pytest.mark.parametrize("name", PAGES)
def test_scores_in_the_text_are_scores_of_tables(name: str) -> None:
    """Oracle: the tables. ``study_tables.py --check`` compares the tables with the results of the runs.

    The scores of a section with tables are those of its own tables. A paragraph with a link to another section, and a section
    without tables, may have scores of all tables of the page.
    """
    page = (ROOT / f"docs/{name}.md").read_text()
    everywhere, compared = read_scores(page), 0
    for section in re.split(r"^(?=#{2,4} )", CODE.sub("", page), flags=re.MULTILINE):
        own = read_scores(section)
        for paragraph in TABLES.sub("", section).split("\n\n"):
            known = own if own and "](#" not in paragraph else everywhere
            lines = [
                line for line in paragraph.splitlines() if line.startswith("| measured") or not line.startswith("|")
            ]
            for score in SCORE.findall("\n".join(lines)):
                digits = len(score.partition(".")[2])
                assert any(f"{number:.{digits}f}" == score for number in known), paragraph
                compared += 1
    assert compared


def read_scores(text: str) -> set[float]:
    """Return the numbers of the tables in a text and of the pages of their studies."""
    tables = "".join(TABLES.findall(text))
    for study in re.findall(r"<!-- study: benchmarks/studies/(\w+)\.yaml", text):
        tables += (ROOT / f"benchmarks/results/{study}.md").read_text()
    return {float(number) for number in re.findall(r"\d+\.\d+", tables)}
