"""Decisions: those of the published rules, and after an interruption those that there would have been without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from studies import StudyFile

from raydfl.core.errors import RunDirectoryError
from raydfl.experiments.search.controller import SearchController
from raydfl.experiments.search.journal import Journal
from raydfl.experiments.search.plan import Search, load_search

Score = Callable[[int, int], float]


def _score(number: int, round_index: int) -> float:
    """A loss that falls at a rate of the trial's own, with noise of (trial, round)."""
    return 1 / (1 + number) ** 0.1 / round_index + 0.05 * math.sin(17 * number + round_index)


def _open(search: Search, path: Path) -> SearchController:
    judge = SearchController(search, Journal(path))
    assert judge.open_turn(0)
    return judge


def _go_on(judge: SearchController, score: Score = _score, events: int = 10**9) -> list[tuple[int, int, str]]:
    """Trials one after another, until ``events`` decisions are made; what was decided."""
    decided: list[tuple[int, int, str]] = []
    while (trial := judge.suggest()) is not None:
        for round_index in range(judge.journal.trials[trial.number].reported + 1, judge.search.rounds):
            if len(decided) >= events:
                return decided
            decision = judge.result(trial.number, round_index, score(trial.number, round_index))
            decided.append((trial.number, round_index, decision))
            if decision == "STOP":
                judge.ended(trial.number, "stopped", judge.rule_of(trial.number))
                break
        else:
            last = judge.search.rounds
            judge.ended(trial.number, "finished", round_index=last, score=score(trial.number, last))
    return decided


def _halved(search: Search, grace: int, factor: float) -> list[tuple[int, int, str]]:
    """Asynchronous successive halving written down from its paper, for trials that run one after another."""
    rungs: dict[int, list[float]] = {}
    milestone = float(grace)
    while milestone <= search.rounds:
        rungs[int(milestone)] = []
        milestone *= factor
    decided = []
    for number in range(search.samples):
        for round_index in range(1, search.rounds):
            decision = "CONTINUE"
            if round_index in rungs:
                scores = rungs[round_index]
                # better than the boundary of the best 1/factor of those that came before
                if scores and _score(number, round_index) > np.percentile(scores, 100 / factor):
                    decision = "STOP"
                scores.append(_score(number, round_index))
            decided.append((number, round_index, decision))
            if decision == "STOP":
                break
    return decided


def test_asha_is_the_published_rule(search_file: StudyFile, tmp_path: Path) -> None:
    search = load_search(search_file(samples=12, rounds=9, scheduler={"name": "asha", "grace": 2, "factor": 2}))
    decided = _go_on(_open(search, tmp_path / "journal"))
    assert decided == _halved(search, 2, 2)
    stopped = {number for number, _, decision in decided if decision == "STOP"}
    assert 0 < len(stopped) < 12


SEARCHES: list[dict[str, Any]] = [
    {"scheduler": {"name": "asha", "grace": 1, "factor": 2}},
    {"scheduler": {"name": "median", "grace": 2, "trials": 2}},
    {"patience": 2},
    {"searcher": "optuna", "scheduler": {"name": "asha", "grace": 1, "factor": 2}},
    {"searcher": "grid", "samples": None, "space": {"method.mu": {"grid": [0.1, 0.2, 0.3, 0.4, 0.5]}}},
]


@pytest.mark.parametrize("changes", SEARCHES, ids=str)
@pytest.mark.parametrize(
    "events", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(13, marks=pytest.mark.slow)]
)
def test_an_interrupted_search_decides_as_an_undisturbed_one(
    search_file: StudyFile, tmp_path: Path, changes: dict[str, Any], events: int
) -> None:
    search = load_search(search_file(**{"samples": 14, "rounds": 8, **changes}))
    undisturbed = _open(search, tmp_path / "a")
    _go_on(undisturbed)
    _go_on(_open(search, tmp_path / "b"), events=events)
    again = _open(search, tmp_path / "b")
    _go_on(again, events=events)
    with (tmp_path / "b").open("a") as file:
        file.write('{"event": "round", "tri')  # the end of a process that was killed
    again = _open(search, tmp_path / "b")
    _go_on(again)
    assert (tmp_path / "b").read_text() == (tmp_path / "a").read_text()
    assert again.journal.trials == undisturbed.journal.trials
    assert all(record.over for record in again.journal.trials.values())


def test_optuna_learns_from_scores(search_file: StudyFile, tmp_path: Path) -> None:
    """TPE comes nearer to the best value than it began; with other scores it makes other suggestions."""
    space = {"method.mu": {"uniform": [0.0, 1.0]}}
    search = load_search(search_file(searcher="optuna", samples=40, rounds=2, space=space))

    def tried(best: float, path: Path) -> list[float]:
        judge = _open(search, path)
        while (trial := judge.suggest()) is not None:
            judge.ended(trial.number, "finished", round_index=2, score=abs(trial.values["method.mu"] - best))
        return [record.values["method.mu"] for record in judge.journal.trials.values()]

    low, high = tried(0.2, tmp_path / "low"), tried(0.8, tmp_path / "high")
    assert low[:10] == high[:10]  # drawn at random
    assert abs(np.median(low[20:]) - 0.2) < 0.1
    assert abs(np.median(high[20:]) - 0.8) < 0.1


def test_median_stops_what_is_worse_than_the_others(search_file: StudyFile, tmp_path: Path) -> None:
    search = load_search(search_file(samples=4, rounds=5, scheduler={"name": "median", "grace": 2, "trials": 3}))
    decided = _go_on(_open(search, tmp_path / "journal"), lambda number, _: [0.1, 0.2, 0.3, 0.9][number])
    assert [entry for entry in decided if entry[2] == "STOP"] == [(3, 2, "STOP")]
    patient = load_search(search_file(samples=4, rounds=5, scheduler={"name": "median", "grace": 4, "trials": 3}))
    decided = _go_on(_open(patient, tmp_path / "other"), lambda number, _: [0.1, 0.2, 0.3, 0.9][number])
    assert [entry for entry in decided if entry[2] == "STOP"] == [(3, 4, "STOP")]


def test_patience_counts_evaluations_without_progress(search_file: StudyFile, tmp_path: Path) -> None:
    search = load_search(search_file(samples=1, rounds=9, patience=2))
    losses = {1: 0.9, 2: 0.8, 3: 0.85, 4: 0.7, 5: 0.7, 6: math.nan, 7: 0.1}
    judge = _open(search, tmp_path / "journal")
    decided = _go_on(judge, lambda _, round_index: losses[round_index])
    assert decided[-1] == (0, 6, "STOP")
    assert judge.journal.trials[0].reason == "patience"


def test_a_score_that_is_no_number_is_the_worst(search_file: StudyFile, tmp_path: Path) -> None:
    search = load_search(search_file(samples=3, rounds=4, scheduler={"name": "asha", "grace": 1, "factor": 2}))
    decided = _go_on(_open(search, tmp_path / "journal"), lambda number, _: math.nan if number == 1 else 0.5)
    assert (1, 1, "STOP") in decided
    assert not any(number in (0, 2) and decision == "STOP" for number, _, decision in decided)


def test_what_is_reported_twice_counts_once(search_file: StudyFile, tmp_path: Path) -> None:
    judge = _open(load_search(search_file()), tmp_path / "journal")
    trial = judge.suggest()
    assert trial is not None
    judge.result(trial.number, 2, 0.5)
    assert judge.result(trial.number, 1, 0.4) == "CONTINUE"
    assert judge.result(trial.number, 2, 0.3) == "CONTINUE"
    assert (judge.journal.trials[0].rounds, judge.journal.trials[0].scores) == ([2], [0.5])


def test_a_failed_trial_is_tried_again_and_others_are_not(search_file: StudyFile, tmp_path: Path) -> None:
    judge = _open(load_search(search_file(samples=2)), tmp_path / "journal")
    for status in ("failed", "finished"):
        trial = judge.suggest()
        assert trial is not None
        judge.ended(trial.number, status, "it broke" if status == "failed" else "", 4, 0.5)  # type: ignore[arg-type]
    again = _open(load_search(search_file(samples=3)), tmp_path / "journal")
    assert again.left == 2
    first, second = again.suggest(), again.suggest()
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (0, 2)
    assert again.suggest() is None


def test_a_crash_between_decision_and_end_stops_the_trial(search_file: StudyFile, tmp_path: Path) -> None:
    search = load_search(search_file(patience=1, rounds=9))
    judge = _open(search, tmp_path / "journal")
    trial = judge.suggest()
    assert trial is not None
    judge.result(0, 1, 0.5)
    assert judge.result(0, 2, 0.6) == "STOP"
    again = _open(search, tmp_path / "journal")
    assert again.journal.trials[0].status == "stopped"
    assert again.journal.trials[0].reason == "patience"


def test_a_damaged_journal_is_refused(search_file: StudyFile, tmp_path: Path) -> None:
    (tmp_path / "journal").write_text('{"event": "trial", "trial": 0, "values": {}}\nnonsense\n')
    with pytest.raises(RunDirectoryError, match=r"journal is damaged in line 2; restore it from a copy"):
        Journal(tmp_path / "journal")


# -- population based training ---------------------------------------------------------------------------------------


def _turn(judge: SearchController, turn: int, score: Callable[[int], float]) -> list[Any]:
    assert judge.open_turn(turn)
    trials = []
    while (trial := judge.suggest()) is not None:
        trials.append(trial)
        judge.ended(trial.number, "finished", round_index=trial.config.train.rounds, score=score(trial.number))
    return trials


def test_the_worst_members_become_changed_copies_of_the_best(search_file: StudyFile, tmp_path: Path) -> None:
    settings = {"samples": 8, "rounds": 7, "scheduler": {"name": "pbt", "interval": 3, "share": 0.25, "resample": 0.0}}
    search = load_search(search_file(**settings))
    assert search.turns == [3, 6, 7]
    judge = SearchController(search, Journal(tmp_path / "journal"))
    losses = [0.5, 0.1, 0.9, 0.4, 0.8, 0.2, 0.6, 0.3]
    first = _turn(judge, 0, lambda number: losses[number])
    second = _turn(judge, 1, lambda number: 0.5)
    assert [trial.config.train.rounds for trial in (first[0], second[0])] == [3, 6]
    assert [trial.number for trial in second] == list(range(8, 16))
    # a quarter of eight: the worst (2) copies the best (1), the next (4) the next (5); the others go on as they are
    assert [trial.parent for trial in second] == [0, 1, 1, 3, 5, 5, 6, 7]
    for member, trial in enumerate(second):
        parent = first[trial.parent]
        if member not in (2, 4):
            assert trial.values == parent.values
            continue
        for key, value in trial.values.items():
            domain = search.settings.space[key]
            up, down = (domain.neighbour(parent.values[key], 1.2, up=way) for way in (True, False))
            assert value in (up, down)
    resampling = load_search(search_file(**{**settings, "scheduler": {**settings["scheduler"], "resample": 1.0}}))  # type: ignore[dict-item]
    other = SearchController(resampling, Journal(tmp_path / "other"))
    _turn(other, 0, lambda number: losses[number])
    assert _turn(other, 1, lambda number: 0.5)[2].values != second[2].values


def test_a_turn_begins_only_after_all_of_the_last(search_file: StudyFile, tmp_path: Path) -> None:
    search = load_search(search_file(samples=2, scheduler={"name": "pbt", "interval": 2}))
    judge = SearchController(search, Journal(tmp_path / "journal"))
    assert judge.open_turn(0)
    trial = judge.suggest()
    assert trial is not None
    judge.ended(trial.number, "finished", round_index=2, score=0.5)
    assert not judge.open_turn(1)
    again = SearchController(search, Journal(tmp_path / "journal"))
    assert again.open_turn(0)
    assert again.left == 1
