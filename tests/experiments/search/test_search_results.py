"""What comes out of a search: ranking, tables, the best configuration, importance, the page."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest
from studies import StudyFile

from raydfl.cluster.resources import bundles_of
from raydfl.engine.config import load_config
from raydfl.experiments.search import importance
from raydfl.experiments.search.importance import FEWEST, importances
from raydfl.experiments.search.journal import Journal, TrialRecord
from raydfl.experiments.search.page import write_page
from raydfl.experiments.search.plan import Search, load_search
from raydfl.experiments.search.results import best_command, collect, lines, write_tables


def _journal(search: Search, rows: list[tuple[float, str, int]]) -> Journal:
    """Trials with these last scores, states and rounds."""
    journal = Journal(search.output("journal.jsonl"))
    for number, (score, status, rounds) in enumerate(rows):
        journal.add("trial", number, values=search.drawn(number))
        for round_index in range(1, rounds):
            journal.add("round", number, round=round_index, score=score + 0.1, decision="CONTINUE")
        if status == "running":
            continue
        value = None if math.isnan(score) else score
        journal.add(
            "end", number, status=status, round=rounds, score=value, reason="asha" if status == "stopped" else ""
        )
    return journal


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forest and shufflings of a tenth of their time."""
    monkeypatch.setattr(importance, "_TREES", 50)
    monkeypatch.setattr(importance, "_SHUFFLES", 8)


ROWS = [(0.5, "finished", 4), (0.2, "stopped", 2), (0.3, "finished", 4), (math.nan, "failed", 1), (0.6, "running", 3)]


def test_the_best_is_the_best_of_those_that_did_all_rounds(search_file: StudyFile) -> None:
    search = load_search(search_file(samples=6))
    results = collect(search, _journal(search, ROWS))
    assert [record.number for record in results.ranked] == [2, 0, 1, 4]
    largest = load_search(search_file(samples=6, metric={"score": "loss", "mode": "max"}))
    assert [record.number for record in collect(largest, Journal(search.output("journal.jsonl"))).ranked][:2] == [0, 2]
    body = lines(results)
    assert [line[:3] for line in body] == [
        ["trial-002", "finished", "4"],
        ["trial-000", "finished", "4"],
        ["trial-001", "stopped (asha)", "2"],
        ["trial-004", "not finished", "2"],
        ["trial-003", "failed", "1"],
    ]


def test_a_diverged_trial_is_never_the_best(search_file: StudyFile) -> None:
    search = load_search(search_file(samples=6))
    journal = _journal(search, ROWS)
    journal.add("trial", 5, values=search.drawn(5))
    journal.add("end", 5, status="finished", round=4, score=0.01, reason="the training diverged: ...")
    results = collect(search, journal)
    assert [record.number for record in results.ranked] == [2, 0, 1, 4, 5]
    assert lines(results)[4][:3] == ["trial-005", "worthless", "4"]
    assert "the training diverged: ..." in write_page(results).read_text()


def test_tables_and_the_best_configuration_read_back(search_file: StudyFile) -> None:
    search = load_search(search_file(samples=6), ["train.batch_size=4"])
    results = collect(search, _journal(search, ROWS))
    assert {path.name for path in write_tables(results)} == {"trials.csv", "trials.parquet", "best.yaml"}
    table = pyarrow.parquet.read_table(search.output("trials.parquet")).to_pylist()
    assert [row["score"] for row in table][:3] == [0.5, 0.2, 0.3]
    assert table[2]["method.mu"] == search.drawn(2)["method.mu"]
    assert pyarrow.csv.read_csv(search.output("trials.csv")).num_rows == 5
    best = load_config(search.output("best.yaml"))
    assert best.digest() == search.trial(2, search.drawn(2)).config.digest()
    assert best.run.name is None
    assert best.train.rounds == 4
    assert best_command(results) == f"raydfl run {search.output('best.yaml')}"


def test_importance_finds_what_matters(search_file: StudyFile) -> None:
    search = load_search(search_file(samples=60))
    records = []
    for number in range(60):
        values = search.drawn(number)
        score = math.log10(values["method.mu"]) + 0.01 * values["train.optimiser.lr"]
        records.append(TrialRecord(number, values, rounds=[4], scores=[score], status="finished"))
    shares = importances(search, records)
    assert shares["method.mu"] > 0.9
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares == importances(search, records)
    assert importances(search, records[: FEWEST - 1]) == {}
    alike = [TrialRecord(r.number, r.values, rounds=[4], scores=[0.5], status="finished") for r in records]
    assert importances(search, alike) == {}


@pytest.mark.usefixtures("pictures")
def test_the_page_shows_it(search_file: StudyFile) -> None:
    search = load_search(search_file(samples=10, note="A <note>"))
    journal = _journal(search, ROWS * 2)
    (search.folder / "trial-002").mkdir()
    (search.folder / "trial-002" / "report.html").touch()
    page = write_page(collect(search, journal)).read_text()
    assert "A &lt;note&gt;" in page
    assert page.count("<svg") == 3
    for heading in ("Best settings", "What mattered", "Settings and scores", "Learning curves", "Trials", "Failures"):
        assert f"<h2>{heading}</h2>" in page
    assert 'href="trial-002/report.html"' in page
    assert 'href="trial-000/report.html"' not in page
    assert "4 of 10 trials are not over" in page
    assert "chosen on the test data" not in page
    on_test = load_search(search_file(samples=10, metric={"score": "loss", "split": "test"}))
    assert "chosen on the test data" in write_page(collect(on_test, journal)).read_text()


def test_a_page_of_nothing(search_file: StudyFile) -> None:
    search = load_search(search_file())
    page = write_page(collect(search, Journal(search.output("journal.jsonl")))).read_text()
    assert "No trial has a score yet." in page


def test_a_trials_bundles(search_file: StudyFile, tmp_path: Path) -> None:
    alone = load_search(search_file()).first
    assert bundles_of(alone, 1.0, 6) == [{"CPU": 1.0}]
    three = load_search(search_file(), ["ray.actors=3", "ray.cpus=0.5", "ray.gpus=0.25"]).first
    client = {"CPU": 0.5, "GPU": 0.25}
    assert bundles_of(three, 2.0, 6) == [{"CPU": 2.0}, client, client, client]
    each = load_search(search_file(), ["ray.actors=per_client", "ray.cpus=0"]).first
    assert bundles_of(each, 1.0, 6) == [{"CPU": 1.0}]  # actors that ask for nothing
