"""Tables, files and page of a study, compared with given scores."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import Raydfl
from scipy import stats
from studies import StudyFile, write_run_folder

from raydfl.core.errors import RunDirectoryError
from raydfl.engine.config import load_config
from raydfl.engine.storage.record import MetricRow, rows_path, write_rows
from raydfl.experiments import results as results_module
from raydfl.experiments import tables
from raydfl.experiments.contestants import Contestant
from raydfl.experiments.load import load_study
from raydfl.experiments.notes import describe_results
from raydfl.experiments.page import write_page
from raydfl.experiments.results import FEWEST, StudyResults, measure_importance
from raydfl.experiments.results import collect as collect_with
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.state import StudyState
from raydfl.experiments.statistics import Difference, Spread
from raydfl.experiments.study import Study, Trial
from raydfl.experiments.tables import latex, make_full_table, markdown, pivot, records, write_tables
from raydfl.runs.report import Plot
from raydfl.runs.report import page as page_builder

ROUNDS = 12


def collect(study: Study) -> StudyResults:
    return collect_with(study, StudyState.read(study))


def list_columns(results: StudyResults) -> list[str]:
    return make_full_table(results)[0]


def list_lines(results: StudyResults) -> list[list[str]]:
    return make_full_table(results)[1]


def find_contestant(results: StudyResults, *labels: str) -> Contestant:
    return next(contestant for contestant in results.contestants if contestant.labels == labels)


def find_trials(study: Study, labels: tuple[str, ...]) -> list[Trial]:
    return [trial for trial in study.trials if trial.labels == labels]


PAPER = {
    "source": "a paper, table 1",
    "note": "with other data",
    "values": {"clean": {"FedAvg": "80.5±0.5", "FedProx": 79}, "wrong": {"FedAvg": "70.5 ± 1.5"}},
}


def _make_study(grid: StudyFile, **changes: Any) -> Study:
    settings: dict[str, Any] = {"settings": {"train.rounds": ROUNDS}, "control": {"condition": "clean"}, "paper": PAPER}
    settings |= {
        "also": [{"score": "loss"}, {"score": "accuracy", "split": "validation"}],
        "repeat": {"run.seed": [1, 2, 3]},
    }
    return load_study(grid(**settings | changes))


def _draw_scores(study: Study) -> dict[str, dict[str, list[float]]]:
    """Draw scores for all runs, by name of the run."""
    rng = np.random.default_rng(0)
    return {
        run.name: {
            "test model/accuracy": rng.random(ROUNDS).tolist(),
            "test model/loss": (3 * rng.random(ROUNDS)).tolist(),
            # The table uses the mean over clients instead of the pooled value.
            "validation model/accuracy": rng.random(ROUNDS).tolist(),
            "validation model/accuracy_client_mean": rng.random(ROUNDS).tolist(),
        }
        for run in study.trials
    }


@pytest.fixture
def results(grid: StudyFile) -> tuple[StudyResults, dict[str, dict[str, list[float]]]]:
    """Return a study with all runs finished, except for the last cell: a finished, a started and a missing run."""
    study = _make_study(grid)
    scores = _draw_scores(study)
    last = study.cells[-1]
    for run in study.trials:
        if run.labels != last or run.repeat == "run.seed=1":
            write_run_folder(run, scores[run.name])
    started = find_trials(study, last)[1]
    write_run_folder(
        started, {key: values[:4] for key, values in scores[started.name].items()}, finished=False, last_round=4
    )
    return collect(study), scores


def test_every_score_equals_numpys(results: tuple[StudyResults, dict[str, dict[str, list[float]]]]) -> None:
    table, scores = results
    assert len(table.contestants) == 6
    for cell in table.contestants[:-1]:
        scores_of_cell = [scores[run.name] for run in find_trials(table.study, cell.labels)]
        accuracy = 100 * np.array([scores_of_run["test model/accuracy"] for scores_of_run in scores_of_cell])
        loss = np.array([scores_of_run["test model/loss"] for scores_of_run in scores_of_cell])
        validation = 100 * np.array(
            [scores_of_run["validation model/accuracy_client_mean"] for scores_of_run in scores_of_cell]
        )
        expected = {
            ("accuracy", "tail"): accuracy[:, -10:].mean(axis=1),
            ("accuracy", "last"): accuracy[:, -1],
            ("accuracy", "best"): accuracy.max(axis=1),
            ("loss", "tail"): loss[:, -10:].mean(axis=1),
            ("loss", "best"): loss.min(axis=1),
            ("accuracy, validation", "last"): validation[:, -1],
        }
        places = {metric.title: place for place, metric in enumerate(cell.metrics)}
        for (title, summary), values in expected.items():
            np.testing.assert_allclose(cell.score(summary, places[title]).mean, values.mean())
            np.testing.assert_allclose(cell.score(summary, places[title]).std, values.std(ddof=1))
        assert (cell.done, cell.n) == (3, "3")


def test_differences_are_paired_with_students_t_interval(
    results: tuple[StudyResults, dict[str, dict[str, list[float]]]],
) -> None:
    wrong, clean = (find_contestant(results[0], label, "FedAvg") for label in ("wrong", "clean"))
    pairs = np.array(wrong.score("tail").values) - np.array(clean.score("tail").values)
    difference, expected = wrong.difference, stats.ttest_1samp(pairs, 0.0).confidence_interval(0.95)
    assert difference is not None
    assert (difference.mean, difference.n) == (pytest.approx(pairs.mean()), 3)
    assert (difference.low, difference.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert clean.difference is None
    incomplete = find_contestant(results[0], "wrong", "fast").difference  # a single run gives no interval
    assert incomplete is not None
    assert (incomplete.n, np.isnan(incomplete.low)) == (1, True)
    assert Difference.between(Spread({"a": 1.0}), Spread({"b": 1.0})) is None
    assert str(Difference(1.25, 0.5, 2.0, 3)) == "+1.25 [+0.50, +2.00]"


def test_cells_contain_the_papers_values(
    results: tuple[StudyResults, dict[str, dict[str, list[float]]]],
) -> None:
    cells = [
        find_contestant(results[0], *labels)
        for labels in (("clean", "FedAvg"), ("wrong", "FedAvg"), ("clean", "FedProx"))
    ]
    assert [cell.paper for cell in cells] == [(80.5, 0.5), (70.5, 1.5), (79.0, None)]
    assert cells[1].paper_difference == pytest.approx(-10.0)
    assert find_contestant(results[0], "wrong", "FedProx").paper is None


def test_the_best_of_the_last_axis_is_marked(results: tuple[StudyResults, dict[str, dict[str, list[float]]]]) -> None:
    """The incomplete cells of the wrong labels have no best method, because a missing run could be better."""
    table = results[0]
    best = max(
        (contestant for contestant in table.contestants if contestant.labels[0] == "clean"),
        key=lambda contestant: contestant.score("tail").mean,
    )
    assert [contestant for contestant in table.contestants if contestant.best] == [best]
    assert f"| clean | {best.labels[1]} | **{best.score('tail')}** |" in markdown(table)
    assert rf"\textbf{{{str(best.score('tail')).replace('±', '$' + chr(92) + 'pm$')}}}" in latex(table)


def test_missing_runs_are_shown(results: tuple[StudyResults, dict[str, dict[str, list[float]]]]) -> None:
    table, scores = results
    cell = find_contestant(table, "wrong", "fast")
    assert cell.done == 1
    assert cell.n == "1 of 3 runs (begun: round 4)"
    only = find_trials(table.study, ("wrong", "fast"))[0].name
    assert str(cell.score("last")) == f"{100 * scores[only]['test model/accuracy'][-1]:.2f}"
    assert np.isnan(cell.score("last").std)


def test_a_diverged_run_is_named_in_every_table(grid: StudyFile, raydfl: Raydfl) -> None:
    """A diverged run counts in its cell. Omitting it silently would make a bad setting look better."""
    study = _make_study(grid, also=[], repeat={"run.seed": [1, 2]})
    scores = _draw_scores(study)
    for run in study.trials:
        write_run_folder(run, scores[run.name])
    labels = study.cells[1]
    diverged = find_trials(study, labels)[0]
    rows = [MetricRow(ROUNDS, "evaluate", "", "test", "model/loss", 1e20, 20.0)]
    rows += [MetricRow(ROUNDS, "evaluate", "", "test", "model/accuracy", 0.5, 20.0)]
    rows += [
        MetricRow(ROUNDS, "evaluate", "", "test", "model/confusion", np.nan, 20.0, np.array([[10.0, 0], [10.0, 0]]))
    ]
    write_rows(rows_path(diverged.run_dir, ROUNDS), rows)
    table = collect(study)
    assert {cell.labels: cell.worthless for cell in table.contestants if cell.worthless} == {labels: 1}
    assert find_contestant(table, *labels).done == 2
    column = list_columns(table).index("n")
    assert [line[column] for line in list_lines(table)] == ["2", "2 (1 worthless)", "2", "2", "2", "2"]
    assert "(1 worthless)" in pivot(table)[1][0][2]
    assert [row["worthless"] for row in records(table)] == [0, 1, 0, 0, 0, 0]
    assert "worthless: the training diverged" in write_page(table).read_text()
    result = raydfl("sweep", study.file, "--table", "train.rounds=12")
    assert result.code == 0
    assert (
        f"worthless: {diverged.run_dir.name}: the training diverged: the loss on the test data is 1e+20" in result.out
    )


def test_the_headline_names_its_rounds_and_excludes_the_untrained_model(grid: StudyFile) -> None:
    study = _make_study(grid, axes={"method": {"one": {"method": "fedavg"}}}, control={}, paper=None, also=[])
    for run in study.trials:
        write_run_folder(run, {"test model/accuracy": [0.99, 0.2, 0.3, 0.4]}, first=0)
    table = collect(study)
    assert list_columns(table)[1] == "accuracy (%), mean of the last 3 of 3 evaluations"
    cell = table.contestants[0]
    assert [cell.score(summary).mean for summary in ("tail", "last", "best")] == pytest.approx([30, 40, 40])
    assert (
        "Headline: accuracy (%), mean of the last 3 of 3 evaluations; mean ± sample standard deviation over run.seed; n = 3."
        in markdown(table)
    )


def test_cells_with_different_evaluations_are_marked(grid: StudyFile) -> None:
    axes = {"method": {"a": {"method": "fedavg"}, "b": {"method": "fedprox"}, "rare": {"evaluate.every": 6}}}
    study = _make_study(
        grid, axes=axes, control={}, paper=None, also=[], settings={"train.rounds": 12, "method": "fedavg"}
    )
    for run in study.trials:
        write_run_folder(run, {"test model/accuracy": [0.5] * (2 if run.labels == ("rare",) else 12)})
    table = collect(study)
    assert list_columns(table)[1] == "accuracy (%), mean of the last evaluations"
    column = list_columns(table).index("evaluations")
    usual, rare = "last 10 of 12, every round", "last 2 of 2, every 6 rounds"
    assert [line[column] for line in list_lines(table)] == [usual, usual, rare]
    assert pivot(table)[1] == [["50.00 ± 0.00", "50.00 ± 0.00", "50.00 ± 0.00*"]]
    assert [row["evaluations"] for row in records(table)] == [usual, usual, rare]
    assert (
        f"Runs have different evaluations ({usual}; {rare}). * marks cells with evaluations other than {usual}."
        in describe_results(table)
    )


def test_a_sweep_without_runs_gives_a_table_of_missing_cells(grid: StudyFile) -> None:
    table = collect(_make_study(grid))
    assert {cell.n for cell in table.contestants} == {"missing"}
    assert all(line[list_columns(table).index("n")] == "missing" for line in list_lines(table))
    assert pivot(table)[1][0][1] == "missing [paper 80.50]"
    assert "18 of 18 runs are missing" in write_page(table).read_text()


def test_all_files_contain_the_same_scores(results: tuple[StudyResults, dict[str, dict[str, list[float]]]]) -> None:
    table, _ = results
    paths = write_tables(table)
    assert [path.name for path in paths] == ["grid.csv", "grid.parquet", "grid.md", "grid.tex", "grid-runs.csv"]
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    parquet = pq.read_table(paths[1]).to_pylist()
    for row, parquet_row, cell in zip(rows, parquet, table.contestants, strict=True):
        assert (row["condition"], row["method"]) == cell.labels == (parquet_row["condition"], parquet_row["method"])
        assert float(row["mean"]) == pytest.approx(cell.score("tail").mean) == pytest.approx(parquet_row["mean"])
        assert float(row["loss best mean"]) == pytest.approx(cell.score("best", 1).mean)
        assert (row["n"], row["wanted"]) == (str(cell.done), "3")
        assert (
            float(row["run.seed=1"])
            == pytest.approx(cell.score("tail").values[0])
            == pytest.approx(parquet_row["run.seed=1"])
        )
    text = paths[2].read_text()
    assert text == markdown(table)
    assert "| condition | FedAvg | FedProx | fast |" in text
    wrong = find_contestant(table, "wrong", "FedAvg")
    assert f"({wrong.difference}) [paper 70.50]" in text
    assert "80.50 ± 0.50" in text
    for note in (
        "mean of the last 10 of 12 evaluations",
        "log-mel, 16 bands at 8 kHz",
        "Difference: from the cell with condition clean",
        "Paper: a paper, table 1. with other data",
    ):
        assert note in text
    with paths[4].open() as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 18
    assert [row["finished"] for row in runs].count("true") == 16
    assert len(records(table)) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_the_page_has_tables_figures_and_links(results: tuple[StudyResults, dict[str, dict[str, list[float]]]]) -> None:
    page = write_page(results[0])
    assert page.name == "grid.html"
    text = page.read_text()
    assert "2 of 18 runs are missing. Continue with: raydfl study" in text
    for heading in ("Table", "Comparison", "Heat maps", "Learning curves", "All values", "Runs"):
        assert f"<h2>{heading}</h2>" in text
    # Bars of both conditions, heat maps of headline, difference and two more scores, and curves of each score.
    assert text.count("<svg") == 1 + 4 + 3
    assert "accuracy (%)" in text
    assert "mean ± standard deviation" in text
    assert text.count('/report.html">') == 16
    assert "src=" not in text
    assert not re.search(r'href="https?:', text)


def test_a_grid_with_several_headline_scores_names_them(grid: StudyFile) -> None:
    axes = {"data": {"a": {}, "b": {"metric": {"score": "loss"}}}}
    paper = {"source": "P", "values": {"a": 60, "b": 3}}
    study = _make_study(grid, axes=axes, control={"data": "a"}, paper=paper)
    for run in study.trials:
        write_run_folder(run, {"test model/accuracy": [0.5] * ROUNDS, "test model/loss": [2.0] * ROUNDS})
    table = collect(study)
    assert list_columns(table)[:3] == ["data", "score", "headline, mean of the last 10 of 12 evaluations"]
    assert [line[1:3] for line in list_lines(table)] == [["accuracy", "50.00 ± 0.00"], ["loss", "2.00 ± 0.00"]]
    assert [(contestant.difference, contestant.paper_difference) for contestant in table.contestants] == [
        (None, None)
    ] * 2


def test_scores_of_a_private_model_are_found_by_its_name(grid: StudyFile) -> None:
    axes = {"method": {"own": {"method": "fedmlac", "models": {}}}}
    study = _make_study(grid, axes=axes, control={}, paper=None, also=[{"score": "accuracy", "model": "local"}])
    for run in study.trials:
        write_run_folder(
            run, {"test plugin/accuracy": [0.25] * ROUNDS, "test local/accuracy_client_mean": [0.75] * ROUNDS}
        )
    cell = collect(study).contestants[0]
    assert cell.score("tail").mean == 25
    assert cell.score("tail", 1).mean == 75


def test_a_further_metric_without_values_is_reported(grid: StudyFile) -> None:
    axes = {"method": {"one": {"method": "fedavg"}}}
    also = [{"score": "loss"}, {"score": "loss", "split": "server"}, {"score": "loss", "split": "train"}]
    study = _make_study(grid, axes=axes, control={}, paper=None, also=also)
    assert "No run measured" not in " ".join(describe_results(collect(study)))  # no run is finished
    for run in study.trials:
        write_run_folder(
            run,
            {
                f"{split} model/{score}": [0.5] * ROUNDS
                for split, score in (("test", "accuracy"), ("test", "loss"), ("train", "loss"))
            },
        )
    assert "No run measured loss on server. Change the score or the split in also." in describe_results(collect(study))


def test_scores_may_come_from_the_round_of_the_best_validation(grid: StudyFile) -> None:
    chosen = {"summary": "chosen", "settings": {"train.rounds": 3, "run.best": {}, "data.split.validation": 0.2}}
    study = _make_study(grid, axes={"method": {"one": {"method": "fedavg"}}}, control={}, paper=None, **chosen)
    for run in study.trials:
        write_run_folder(run, {"test model/accuracy": [0.9, 0.4, 0.7], "server best_round": [1, 2, 2]})
    table = collect(study)
    assert table.contestants[0].score("chosen").mean == pytest.approx(40)
    assert list_columns(table)[1] == "accuracy (%), in the round of run.best"
    assert "validation model/accuracy chooses the round (validation)." in describe_results(table)


def test_the_spread_of_few_runs_is_formatted() -> None:
    assert str(Spread({})) == "-"
    assert str(Spread({"a": 81.234})) == "81.23"
    assert str(Spread({"a": 1.0, "b": 3.0})) == "2.00 ± 1.41"
    assert MetricSettings(score="macro_f1", model="plugin", split="validation").title == "plugin macro F1, validation"


def test_figures_of_a_study_show_its_scores(
    results: tuple[StudyResults, dict[str, dict[str, list[float]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plots: dict[str, Plot] = {}
    monkeypatch.setattr(page_builder, "draw", lambda plot, _: plots.setdefault(plot.title, plot) and "")
    write_page(results[0])
    means = [contestant.score("tail").mean for contestant in results[0].contestants]
    axes = plots["accuracy (%)"].figure().axes[0]
    assert sorted(patch.get_height() for patch in axes.patches) == pytest.approx(sorted(means))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["clean", "wrong"]
    assert sorted(axes.get_legend_handles_labels()[1]) == ["FedAvg", "FedProx", "fast", "paper"]
    bars, matrix = list(plots.values())[:2]
    assert (bars.caption, matrix.caption) == ("Lines: standard deviation over the runs.", "")
    differences = [contestant.difference.mean for contestant in results[0].contestants if contestant.difference]
    axes = plots["difference"].figure().axes[0]
    assert [text.get_text() for text in axes.texts] == [f"{value:.1f}" for value in differences]
    (cells,) = axes.collections
    strengths = np.ma.compressed(cells.get_array())[-len(differences) :]
    assert np.argsort(strengths).tolist() == np.argsort(differences).tolist()
    assert [(patch.get_hatch(), patch.get_xy()) for patch in axes.patches] == [
        ("//", (column - 0.5, -0.5)) for column in range(3)
    ]
    assert axes.get_xlim() == (-0.5, 2.5)


def test_table_only_writes_the_existing_results(grid: StudyFile, raydfl: Raydfl, tmp_path: Path) -> None:
    file = grid(axes={"method": {"FedAvg": {"method": "fedavg"}}})
    study = load_study(file)
    write_run_folder(study.trials[0], {"test model/accuracy": [0.5] * 3})
    result = raydfl("sweep", file, "--table")
    assert result.code == 0
    assert "50.00" in result.out
    assert "1 of 2 runs" in result.out
    assert (tmp_path / "runs" / "grid.html").exists()
    events = raydfl("sweep", file, "--table", "--json").events
    assert events[-1]["event"] == "message"
    assert "grid.html" in events[-1]["text"]


def test_latex_escapes_labels_and_uses_booktabs(grid: StudyFile) -> None:
    axes = {
        "noise_level": {"[10] % & more": {}, "~0": {"train.cohort": 1.0}, "*": {"train.cohort": 0.9}},
        "method": {"a": {"method": "fedavg"}, "b": {}},
    }
    study = _make_study(grid, axes=axes, control={"method": "a"}, paper=None, also=[], title="Noise: 10 % #1")
    scores = _draw_scores(study)
    for run in study.trials:
        write_run_folder(run, scores[run.name])
    text = latex(collect(study))
    assert r"{[}10] \% \& more & " in text
    assert "{*} & " in text  # after a line's end, LaTeX would read both as an argument
    assert r"\caption{Noise: 10 \% \#1." in text
    assert [text.count(rule) for rule in (r"\toprule", r"\bottomrule", r"\begin{table}")] == [2, 2, 2]
    widths = {line.count(" & ") for line in text.splitlines() if line.endswith(r"\\")}
    assert len(widths) == 2  # all lines of a table have the same number of cells


# -- searches --------------------------------------------------------------------------------------------------------


LOSSES = [(0.5, "finished", 4), (0.2, "stopped", 2), (0.3, "finished", 4), (0.1, "failed", 1), (0.6, "running", 3)]


def _collect_search(file: Path, losses: list[tuple[float, str, int]]) -> StudyResults:
    """Write run folders of trials with the last losses, states and rounds, and collect the results."""
    study = load_study(file)
    state = StudyState.read(study)
    for trial, (loss, status, rounds) in zip(study.trials, losses, strict=False):
        values = [loss + 0.1] * (rounds - 1) + [loss]
        write_run_folder(trial, {"validation model/loss": values}, finished=status == "finished", last_round=rounds)
        state.note(trial, status, {"stopped": "asha", "failed": "it broke"}.get(status, ""))  # type: ignore[arg-type]
    return collect_with(study, StudyState.read(study))


def test_a_quiet_study_prints_its_failures(search_file: StudyFile, raydfl: Raydfl) -> None:
    file = search_file(samples=6)
    _collect_search(file, LOSSES)
    output = raydfl("study", file, "--table", "--quiet")
    assert output.out == ""
    assert output.err.splitlines()[0] == "failed: trial-003: it broke"


def test_the_best_draw_is_chosen_among_complete_trials(search_file: StudyFile, tmp_path: Path) -> None:
    results = _collect_search(search_file(samples=6), LOSSES)
    assert [contestant.draw for contestant in results.contestants] == [f"trial-00{n}" for n in (2, 0, 3, 1, 4, 5)]
    assert [contestant.n for contestant in results.contestants] == [
        "1",
        "1",
        "failed",
        "stopped (asha)",
        "begun: round 3",
        "missing",
    ]
    assert results.best is results.contestants[0]
    assert (results.failed, results.open, results.complete) == ({"trial-003": "it broke"}, 2, False)
    assert list_columns(results)[:2] == ["draw", "method.mu"]
    assert "loss, validation, last evaluation" in list_columns(results)
    paths = {path.name: path for path in write_tables(results)}
    config = load_config(paths["few-best.yaml"])
    assert config.method["mu"] == results.best.values["method.mu"]
    assert (config.run.name, config.train.rounds) == (None, 4)
    assert next(csv.DictReader(paths["few.csv"].open()))["draw"] == "trial-002"
    largest = search_file(samples=6, metric={"score": "loss", "mode": "max"})
    assert collect(load_study(largest)).best.draw == "trial-000"  # type: ignore[union-attr]


def test_a_failed_trial_may_be_finished_later(search_file: StudyFile) -> None:
    study = load_study(search_file(samples=1))
    StudyState(study).note(study.trials[0], "failed", "it broke")
    assert not collect(study).complete
    write_run_folder(study.trials[0], {"validation model/loss": [0.5]})
    assert collect(study).complete


def test_latex_has_the_best_draws_of_every_cell(search_file: StudyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_IN_LATEX", 2)
    study = load_study(search_file(samples=3, axes={"c": {"one": {}, "two": {"train.cohort": 1.0}}}))
    text = latex(collect(study))
    assert [text.count(f"\n{label} & trial-") for label in ("one", "two")] == [2, 2]
    assert "The table has the best 2 draws of each cell." in text


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_the_page_of_a_search_shows_its_results(search_file: StudyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "_TREES", 50)
    monkeypatch.setattr(results_module, "_SHUFFLES", 8)
    file = search_file(samples=10, question="Which <mu>?", metric={"score": "loss", "split": "test"})
    study = load_study(file)
    for place, trial in enumerate(study.trials[:-1]):
        write_run_folder(trial, {"test model/loss": [1.0, 0.5 + place / 10]}, last_round=4)
    page = write_page(collect(study)).read_text()
    assert "Which &lt;mu&gt;?" in page
    assert page.count("<svg") == 3
    for heading in (
        "Best settings",
        "Importance of settings",
        "Settings and scores",
        "Learning curves",
        "All values",
        "Runs",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert "<strong>0.50</strong>" in page
    assert "1 of 10 runs are missing" in page
    assert "chosen on the test data" in page
    assert "No trial has a score yet." in write_page(collect(load_study(search_file("none", samples=1)))).read_text()


@pytest.mark.slow
def test_importance_finds_the_effective_setting(search_file: StudyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "_TREES", 50)
    study = load_study(search_file(samples=30))
    scores = [(trial.values, math.log(trial.values["method.mu"])) for trial in study.trials]
    shares = measure_importance(study, scores)
    assert shares["method.mu"] > 0.9
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares == measure_importance(study, scores)
    assert measure_importance(study, scores[: FEWEST - 1]) == {}
    assert measure_importance(study, [(values, 0.5) for values, _ in scores]) == {}


def test_a_damaged_state_is_rejected(search_file: StudyFile) -> None:
    study = load_study(search_file())
    study.folder.mkdir()
    study.output("-trials.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"few-trials.json is damaged. Restore it"):
        StudyState.read(study)
