"""Problems of runs. Oracles: runs with known divergence, ordinary runs, and the closed form of the loss of guessing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Raydfl, write_config
from fake_run import CLASSES, config, make_run

from raydfl.core.types import Problem
from raydfl.engine.config import Config
from raydfl.engine.storage.record import MetricRow, rows_path, write_rows
from raydfl.runs.report import write_report
from raydfl.runs.report.data import read_run
from raydfl.runs.report.diagnosis import find_problems

Tiny = Callable[..., Config]
GUESSING = np.log(4)
NAN = float("nan")


def diagnose(folder: Path, *rows: MetricRow, settings: dict[str, Any] | None = None, **about: Any) -> list[Problem]:
    """Return the problems of a run of five rounds with these rows in the last round."""
    make_run(folder, {**config("fedavg", rounds=5), **(settings or {})}, about=about)
    write_rows(rows_path(folder, 5), rows)
    return find_problems(read_run(folder))


def make_scores(loss: float, confusion: np.ndarray, split: str = "test") -> list[MetricRow]:
    number, right = float(confusion.sum()), float(np.trace(confusion))
    return [
        MetricRow(5, "evaluate", "", split, "model/loss", loss, number),
        MetricRow(5, "evaluate", "", split, "model/accuracy", right / number, number),
        MetricRow(5, "evaluate", "", split, "model/confusion", NAN, number, confusion.astype(np.float64)),
    ]


def make_training_rows(loss: float, clients: int = 10, bad: int = 0) -> list[MetricRow]:
    return [
        MetricRow(5, "train", "", "train", "loss", loss, 40.0),
        MetricRow(5, "train", "", "server", "clients", float(clients), 1.0),
        *(MetricRow(5, "train", f"c{i}", "server", "failed", 1.0, 1.0, note="not finite: model/x") for i in range(bad)),
    ]


GUESSES = np.full((4, 4), 10)  # each class for each class, as often
CONSTANT = np.eye(1, 4).repeat(4, 0) * 40  # always the first class
RIGHT = np.eye(4) * 40
SLIGHT = GUESSES + 8 * np.eye(4)  # 18 of 48 right in each class: far above chance


@pytest.mark.parametrize(
    ("loss", "confusion", "diverged"),
    [
        (8.9e19, CONSTANT, True),
        (NAN, CONSTANT, True),
        (float("inf"), GUESSES, True),
        (11 * GUESSING, GUESSES, True),
        (9 * GUESSING, GUESSES, False),  # very wrong, but of this world
        (GUESSING, CONSTANT, False),  # nothing learnt yet
        (40 * GUESSING, SLIGHT, False),  # overconfident, and better than guessing
        (0.1, RIGHT, False),
    ],
)
def test_excessive_loss_without_skill_is_divergence(
    tmp_path: Path, loss: float, confusion: np.ndarray, diverged: bool
) -> None:
    problems = diagnose(tmp_path / "run", *make_training_rows(1.0), *make_scores(loss, confusion))
    assert [(problem.kind, problem.worthless) for problem in problems] == [("diverged", True)] * diverged
    if diverged:
        assert "train.optimiser.lr" in problems[0].text
        assert "guessing 1.39" in problems[0].text


def test_one_model_with_skill_prevents_the_alarm(tmp_path: Path) -> None:
    """The shared model diverged, but the clients' models did not, as with personal models or a failed robust rule."""
    own = make_scores(0.5, RIGHT, "validation")
    assert diagnose(tmp_path / "own", *make_training_rows(1.0), *make_scores(1e9, CONSTANT), *own) == []
    own = make_scores(1e9, CONSTANT, "validation")
    (problem,) = diagnose(tmp_path / "both", *make_training_rows(1.0), *make_scores(1e9, CONSTANT), *own)
    assert problem.worthless


@pytest.mark.parametrize(("bad", "confusion", "diverged"), [(6, GUESSES, True), (5, GUESSES, False), (9, RIGHT, False)])
def test_non_finite_updates_of_most_clients_are_divergence(
    tmp_path: Path, bad: int, confusion: np.ndarray, diverged: bool
) -> None:
    """Non-finite updates are excluded, so the model may still be the initial model with the loss of guessing."""
    problems = diagnose(tmp_path / "run", *make_training_rows(1.0, 10, bad), *make_scores(GUESSING, confusion))
    assert [problem.kind for problem in problems] == ["diverged"] * diverged
    if diverged:
        assert "6 of 10 clients in round 5 were not finite" in problems[0].text


def test_divergence_under_attack_is_only_a_warning(tmp_path: Path) -> None:
    attack = {"attack": {"name": "scaling"}}
    (problem,) = diagnose(tmp_path / "run", *make_training_rows(1e9), *make_scores(1e9, CONSTANT), settings=attack)
    assert (problem.kind, problem.worthless) == ("diverged", False)
    assert "attack" in problem.text


@pytest.mark.parametrize(("loss", "warned"), [(1e9, True), (NAN, True), (2.0, False), (0.01, False)])
def test_excessive_training_loss_without_evaluation_is_a_warning(tmp_path: Path, loss: float, warned: bool) -> None:
    """The scale of a method's own loss is unknown, so a loss below the first round's is no problem."""
    folder = tmp_path / "run"
    make_run(folder, config("fedavg", rounds=5), done=0)
    (folder / "LATEST").write_text("000005-00000000.safetensors")
    for round_index, value in ((1, 500.0), (5, loss)):
        write_rows(rows_path(folder, round_index), [MetricRow(round_index, "train", "", "train", "loss", value, 40.0)])
    assert [(p.kind, p.worthless) for p in find_problems(read_run(folder))] == [("diverged", False)] * warned
    write_rows(rows_path(folder, 5), [MetricRow(5, "train", "", "train", "loss", 400.0, 40.0)])
    assert find_problems(read_run(folder)) == []


def test_classes_without_test_clips_are_named(tmp_path: Path) -> None:
    confusion = RIGHT.copy()
    confusion[[1, 3]] = 0
    (problem,) = diagnose(tmp_path / "run", *make_training_rows(0.1), *make_scores(0.1, confusion))
    assert (problem.kind, problem.worthless) == ("missing classes", False)
    assert "no clip of 2 of 4 classes ('one', 'three')" in problem.text
    # A private model is measured on a sample of the test data, which proves nothing.
    assert diagnose(tmp_path / "own", *make_scores(0.1, confusion), models={"model": {"shared": False}}) == []


def test_single_class_is_a_problem(tmp_path: Path) -> None:
    alone = np.full((1, 1), 40)
    (problem,) = diagnose(tmp_path / "run", *make_training_rows(0.0), *make_scores(0.0, alone), classes=["bark"])
    assert (problem.kind, problem.worthless) == ("one class", True)
    assert "'bark'" in problem.text
    folder = tmp_path / "anomalies"  # a method of its own scores, for which one class is right
    make_run(folder, config("fedavg", rounds=5), done=0, classes=["normal"])
    write_rows(rows_path(folder, 5), [MetricRow(5, "evaluate", "", "test", "model/auc", 0.9, 40.0)])
    assert find_problems(read_run(folder)) == []


@pytest.mark.parametrize("method", ["fedavg", "fedmlac"])
def test_ordinary_runs_have_no_problems(tmp_path: Path, method: str) -> None:
    make_run(tmp_path / "run", config(method, rounds=6), classes=CLASSES)
    assert find_problems(read_run(tmp_path / "run")) == []


def test_problems_are_at_the_top_of_the_report(tmp_path: Path) -> None:
    diagnose(tmp_path / "bad", *make_training_rows(1.0), *make_scores(1e20, CONSTANT))
    make_run(tmp_path / "good", config(rounds=5))
    page = write_report([tmp_path / "bad"], tmp_path / "one.html").read_text()
    assert "Worthless: the training diverged: the loss on the test data is 1e+20" in page
    assert "00000000000" not in page  # a number of twenty digits says less
    page = write_report([tmp_path / "bad", tmp_path / "good"], tmp_path / "two.html").read_text()
    assert "bad: Worthless: the training diverged" in page
    assert "good: Worthless" not in page


# -- real runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "kind", "text"),
    [
        (["train.optimiser.lr=1e20"], "diverged", "worthless: the training diverged: the loss on the test data is "),
        (["data.classes=1"], "one class", "worthless: the data have a single class, 'tone0'"),
    ],
)
def test_worthless_run_exits_with_code_2(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, overrides: list[str], kind: str, text: str
) -> None:
    file = write_config(tiny("train.rounds=2", *overrides), tmp_path)
    output = raydfl("run", file)
    assert output.code == 2
    assert "failed after 2 of 2 rounds" in output.out
    assert text in output.out
    report = (tmp_path / "runs" / "tiny" / "report.html").read_text()
    assert "Worthless: " in report
    output = raydfl("resume", tmp_path / "runs" / "tiny", "--json")
    assert output.code == 2
    end = output.events[-1]
    assert (end["status"], end["round"]) == ("failed", 2)
    assert [(problem["kind"], problem["worthless"]) for problem in end["problems"]] == [(kind, True)]
    output = raydfl("run", file, "--quiet")
    output.refuses(text.removeprefix("worthless: "))
    assert output.out == ""


def test_lowering_train_rounds_finishes_the_run(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    raydfl("run", write_config(tiny("train.rounds=2"), tmp_path))
    output = raydfl("resume", tmp_path / "runs" / "tiny", "train.rounds=1")
    assert output.code == 0
    assert "all 2 rounds are done" in output.out
    assert "finished after 2 of 2 rounds" in output.out
    assert json.loads((tmp_path / "runs" / "tiny" / "run.json").read_text())["id"] == "tiny"
