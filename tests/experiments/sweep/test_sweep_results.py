"""The table of a sweep against numbers that the test wrote into the records, and what its files and its page contain."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import Raydfl
from studies import StudyFile, leave

from raydfl.engine.storage.record import MetricRow, rows_path, write_rows
from raydfl.experiments.metric import MetricSettings
from raydfl.experiments.sweep.grid import Sweep, load_sweep
from raydfl.experiments.sweep.page import write_page
from raydfl.experiments.sweep.results import (
    Results,
    Spread,
    collect,
    columns,
    lines,
    markdown,
    pivot,
    records,
    write_tables,
)
from raydfl.runs.report.figures import Bars, bars, heat_map, to_svg

ROUNDS = 12
PAPER = {
    "source": "a paper, table 1",
    "note": "with other data",
    "values": {"clean": {"FedAvg": "80.5±0.5", "FedProx": 79}, "wrong": {"FedAvg": "70.5 ± 1.5"}},
}


def _sweep(grid: StudyFile, **changes: Any) -> Sweep:
    given: dict[str, Any] = {"settings": {"train.rounds": ROUNDS}, "reference": {"condition": "clean"}, "paper": PAPER}
    given |= {
        "also": [{"score": "loss"}, {"score": "accuracy", "split": "validation"}],
        "repeat": {"run.seed": [1, 2, 3]},
    }
    return load_sweep(grid(**given | changes))


def _scores(sweep: Sweep) -> dict[str, dict[str, list[float]]]:
    """Numbers of every run, drawn; by name of the run."""
    rng = np.random.default_rng(0)
    return {
        run.name: {
            "test model/accuracy": rng.random(ROUNDS).tolist(),
            "test model/loss": (3 * rng.random(ROUNDS)).tolist(),
            # Of what clients measured, their mean counts and not the pooled number.
            "validation model/accuracy": rng.random(ROUNDS).tolist(),
            "validation model/accuracy_client_mean": rng.random(ROUNDS).tolist(),
        }
        for run in sweep.runs
    }


@pytest.fixture
def results(grid: StudyFile) -> tuple[Results, dict[str, dict[str, list[float]]]]:
    """All runs but those of the last cell, of which one is finished, one begun and one missing."""
    sweep = _sweep(grid)
    scores = _scores(sweep)
    last = list(sweep.cells)[-1]
    for run in sweep.runs:
        if run.labels != last or run.repeat == "run.seed=1":
            leave(run, scores[run.name])
    begun = sweep.cells[last][1]
    leave(begun, {key: values[:4] for key, values in scores[begun.name].items()}, finished=False, done=4)
    return collect(sweep), scores


def test_every_number_is_that_of_numpy(results: tuple[Results, dict[str, dict[str, list[float]]]]) -> None:
    table, scores = results
    assert len(table.cells) == 6
    for cell in table.cells[:-1]:
        own = [scores[run.name] for run in table.sweep.cells[cell.labels]]
        accuracy = 100 * np.array([each["test model/accuracy"] for each in own])
        loss = np.array([each["test model/loss"] for each in own])
        validation = 100 * np.array([each["validation model/accuracy_client_mean"] for each in own])
        expected = {
            ("accuracy", "tail"): accuracy[:, -10:].mean(axis=1),
            ("accuracy", "last"): accuracy[:, -1],
            ("accuracy", "best"): accuracy.max(axis=1),
            ("loss", "tail"): loss[:, -10:].mean(axis=1),
            ("loss", "best"): loss.min(axis=1),
            ("accuracy, validation", "last"): validation[:, -1],
        }
        for key, values in expected.items():
            np.testing.assert_allclose(cell.scores[key].mean, values.mean())
            np.testing.assert_allclose(cell.scores[key].std, values.std(ddof=1))
        assert (cell.done, cell.wanted, cell.state) == (3, 3, "")


def test_drops_and_the_papers_numbers(results: tuple[Results, dict[str, dict[str, list[float]]]]) -> None:
    cells = results[0].by_labels
    wrong, clean = cells["wrong", "FedAvg"], cells["clean", "FedAvg"]
    assert wrong.drop == pytest.approx(clean.score("tail").mean - wrong.score("tail").mean)
    assert clean.drop is None
    assert (clean.paper, wrong.paper, cells["clean", "FedProx"].paper) == ((80.5, 0.5), (70.5, 1.5), (79.0, None))
    assert wrong.paper_drop == pytest.approx(10.0)
    assert cells["wrong", "FedProx"].paper is None


def test_missing_runs_are_shown_as_such(results: tuple[Results, dict[str, dict[str, list[float]]]]) -> None:
    table, scores = results
    cell = table.by_labels["wrong", "fast"]
    assert cell.done == 1
    assert cell.state == "1 of 3 runs (begun: round 4)"
    only = table.sweep.cells["wrong", "fast"][0].name
    assert str(cell.score("last")) == f"{100 * scores[only]['test model/accuracy'][-1]:.2f}"
    assert np.isnan(cell.score("last").std)


def test_a_diverged_run_is_named_in_every_table(grid: StudyFile, raydfl: Raydfl) -> None:
    """It counts in its cell like the others: leaving it out without a word would make a bad setting look better."""
    sweep = _sweep(grid, also=[], repeat={"run.seed": [1, 2]})
    scores = _scores(sweep)
    for run in sweep.runs:
        leave(run, scores[run.name])
    labels = list(sweep.cells)[1]
    diverged = sweep.cells[labels][0]
    ends = [MetricRow(ROUNDS, "evaluate", "", "test", "model/loss", 1e20, 20.0)]
    ends += [MetricRow(ROUNDS, "evaluate", "", "test", "model/accuracy", 0.5, 20.0)]
    ends += [
        MetricRow(ROUNDS, "evaluate", "", "test", "model/confusion", np.nan, 20.0, np.array([[10.0, 0], [10.0, 0]]))
    ]
    write_rows(rows_path(diverged.run_dir, ROUNDS), ends)
    table = collect(sweep)
    assert {cell.labels: cell.worthless for cell in table.cells if cell.worthless} == {labels: 1}
    assert table.by_labels[labels].done == 2
    place = columns(table).index("runs")
    assert [line[place] for line in lines(table)] == ["2", "2 (1 worthless)", "2", "2", "2", "2"]
    assert "(1 worthless)" in pivot(table)[1][0][2]
    assert [row["worthless"] for row in records(table)] == [0, 1, 0, 0, 0, 0]
    assert "worthless: the training diverged" in write_page(table).read_text()
    said = raydfl("sweep", sweep.file, "--table", "train.rounds=12")
    assert said.code == 0
    assert f"worthless: {diverged.run_dir.name}: the training diverged: the loss on the test data is 1e+20" in said.out


def test_the_headline_states_what_it_averages_and_leaves_out_the_untrained_model(grid: StudyFile) -> None:
    sweep = _sweep(grid, axes={"method": {"one": {"method": "fedavg"}}}, reference={}, paper=None, also=[])
    for run in sweep.runs:
        leave(run, {"test model/accuracy": [0.99, 0.2, 0.3, 0.4]}, first=0)
    table = collect(sweep)
    assert columns(table)[1] == "accuracy, mean of the last 3 of 3 evaluations"
    cell = table.cells[0]
    assert [cell.score(summary).mean for summary in ("tail", "last", "best")] == pytest.approx([30, 40, 40])
    assert "Headline: of a run's evaluations the mean of the last 3 of 3 evaluations;" in markdown(table)


def test_cells_with_other_evaluations_are_marked(grid: StudyFile) -> None:
    axes = {"method": {"a": {"method": "fedavg"}, "b": {"method": "fedprox"}, "rare": {"evaluate.every": 6}}}
    sweep = _sweep(
        grid, axes=axes, reference={}, paper=None, also=[], settings={"train.rounds": 12, "method": "fedavg"}
    )
    for run in sweep.runs:
        leave(run, {"test model/accuracy": [0.5] * (2 if run.labels == ("rare",) else 12)})
    table = collect(sweep)
    assert columns(table)[1] == "accuracy, mean of the last evaluations"
    place = columns(table).index("evaluations")
    usual, rare = "last 10 of 12, every round", "last 2 of 2, every 6 rounds"
    assert [line[place] for line in lines(table)] == [usual, usual, rare]
    assert pivot(table)[1] == [["50.00 ± 0.00", "50.00 ± 0.00", "50.00 ± 0.00*"]]
    assert [row["evaluations"] for row in records(table)] == [usual, usual, rare]
    assert f"Runs have different evaluations ({usual}; {rare}). * marks cells that differ from {usual}." in table.notes


def test_a_sweep_without_any_run_is_a_table_of_missing_cells(grid: StudyFile) -> None:
    table = collect(_sweep(grid))
    assert {cell.state for cell in table.cells} == {"missing"}
    assert all(line[columns(table).index("runs")] == "missing" for line in lines(table))
    assert pivot(table)[1][0][1] == "missing [paper 80.50]"
    assert "18 of 18 runs are missing" in write_page(table).read_text()


def test_files_hold_the_same_numbers(results: tuple[Results, dict[str, dict[str, list[float]]]]) -> None:
    table, _ = results
    paths = write_tables(table)
    assert [path.name for path in paths] == ["grid.csv", "grid.parquet", "grid.md", "grid-runs.csv"]
    with paths[0].open() as file:
        rows = list(csv.DictReader(file))
    parquet = pq.read_table(paths[1]).to_pylist()
    for row, other, cell in zip(rows, parquet, table.cells, strict=True):
        assert (row["condition"], row["method"]) == cell.labels == (other["condition"], other["method"])
        assert float(row["mean"]) == pytest.approx(cell.score("tail").mean) == pytest.approx(other["mean"])
        assert float(row["loss best mean"]) == pytest.approx(cell.score("best", 1).mean)
        assert (row["runs"], row["wanted"]) == (str(cell.done), "3")
    text = paths[2].read_text()
    assert text == markdown(table)
    assert "| condition | FedAvg | FedProx | fast |" in text
    wrong = table.by_labels["wrong", "FedAvg"]
    assert f"{wrong.score('tail')} (drop {wrong.drop:.2f}) [paper 70.50]" in text
    assert "80.50 ± 0.50" in text
    for note in (
        "mean of the last 10 of 12 evaluations",
        "log-mel, 16 bands at 8 kHz",
        "Drop: below",
        "Paper: a paper, table 1. with other data",
    ):
        assert note in text
    with paths[3].open() as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 18
    assert [row["finished"] for row in runs].count("true") == 16
    assert len(records(table)) == 6


@pytest.mark.usefixtures("pictures")
def test_the_page_has_tables_figures_and_links(results: tuple[Results, dict[str, dict[str, list[float]]]]) -> None:
    page = write_page(results[0])
    assert page.name == "grid.html"
    text = page.read_text()
    assert "2 of 18 runs are missing: raydfl sweep" in text
    for heading in ("Table", "Comparison", "Heat maps", "Learning curves", "Every number", "Runs"):
        assert f"<h2>{heading}</h2>" in text
    # Bars of both conditions, heat maps of headline, drop and two further numbers, curves for each condition.
    assert text.count("<svg") == 1 + 4 + 2
    assert "accuracy (%)" in text
    assert "mean plus and minus the standard deviation" in text
    assert text.count('/report.html">') == 16
    assert "src=" not in text
    assert not re.search(r'href="https?:', text)


def test_a_grid_with_other_headlines_names_them(grid: StudyFile) -> None:
    axes = {"data": {"a": {}, "b": {"metric": {"score": "loss"}}}}
    sweep = _sweep(grid, axes=axes, reference={}, paper=None)
    for run in sweep.runs:
        leave(run, {"test model/accuracy": [0.5] * ROUNDS, "test model/loss": [2.0] * ROUNDS})
    table = collect(sweep)
    assert columns(table)[:3] == ["data", "score", "headline, mean of the last 10 of 12 evaluations"]
    assert [line[1:3] for line in lines(table)] == [["accuracy", "50.00 ± 0.00"], ["loss", "2.00 ± 0.00"]]


def test_a_private_models_number_is_found_by_its_name(grid: StudyFile) -> None:
    axes = {"method": {"own": {"method": "fedmlac", "models": {}}}}
    sweep = _sweep(grid, axes=axes, reference={}, paper=None, also=[{"score": "accuracy", "model": "local"}])
    for run in sweep.runs:
        leave(run, {"test plugin/accuracy": [0.25] * ROUNDS, "test local/accuracy_client_mean": [0.75] * ROUNDS})
    cell = collect(sweep).cells[0]
    assert cell.score("tail").mean == 25
    assert cell.scores["local accuracy", "tail"].mean == 75


def test_the_number_in_the_round_that_validation_chose(grid: StudyFile) -> None:
    chosen = {"summary": "chosen", "settings": {"train.rounds": 3, "run.best": {}, "data.split.validation": 0.2}}
    sweep = _sweep(grid, axes={"method": {"one": {"method": "fedavg"}}}, reference={}, paper=None, **chosen)
    for run in sweep.runs:
        leave(run, {"test model/accuracy": [0.9, 0.4, 0.7], "server best_round": [1, 2, 2]})
    table = collect(sweep)
    assert table.cells[0].score("chosen").mean == pytest.approx(40)
    assert columns(table)[1] == "accuracy, in the round of run.best"
    assert "validation model/accuracy chooses the round (validation)." in table.notes


def test_spread_of_few_runs() -> None:
    assert str(Spread(())) == "-"
    assert str(Spread((81.234,))) == "81.23"
    assert str(Spread((1.0, 3.0))) == "2.00 ± 1.41"
    assert MetricSettings(score="macro_f1", model="plugin", split="validation").title == "plugin macro f1, validation"


def test_figures_of_a_sweep() -> None:
    nothing = float("nan")
    series = [
        Bars("one", np.array([1.0, nothing]), np.array([0.1, nothing]), np.array([1.1, nothing])),
        Bars("two", np.array([2.0, 3.0]), np.array([nothing, 0.2]), np.array([nothing, nothing])),
    ]
    figure = bars(series, ["left", "right"], "accuracy (%)", "paper")
    axes = figure.axes[0]
    assert sorted(patch.get_height() for patch in axes.patches) == [0.0, 1.0, 2.0, 3.0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["left", "right"]
    assert sorted(axes.get_legend_handles_labels()[1]) == ["one", "paper", "two"]
    figure = heat_map([[1.0, nothing], [3.0, 2.0]], ["a", "b"], ["x", "y"], ("rows", "columns"))
    axes = figure.axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["1.0", "2.0", "3.0"]
    strength = {
        text.get_text(): patch.get_alpha()
        for text, patch in zip(axes.texts, [p for p in axes.patches if not p.get_hatch()], strict=True)
    }
    assert strength["1.0"] < strength["2.0"] < strength["3.0"]
    assert len([patch for patch in axes.patches if patch.get_hatch()]) == 1
    assert "<svg" in to_svg(figure, "map", "a heat map")


def test_table_only_writes_what_is_there(grid: StudyFile, raydfl: Raydfl, tmp_path: Path) -> None:
    file = grid(axes={"method": {"FedAvg": {"method": "fedavg"}}})
    sweep = load_sweep(file)
    leave(sweep.runs[0], {"test model/accuracy": [0.5] * 3})
    said = raydfl("sweep", file, "--table")
    assert said.code == 0
    assert "50.00" in said.out
    assert "1 of 2 runs" in said.out
    assert (tmp_path / "runs" / "grid.html").exists()
    events = raydfl("sweep", file, "--table", "--json").events
    assert events[-1]["event"] == "message"
    assert "grid.html" in events[-1]["text"]
