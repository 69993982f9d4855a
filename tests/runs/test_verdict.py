"""Verdicts on runs. Oracles: real runs with a known symptom, recorded curves and matrices, and counts of clips."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import Raydfl
from fake_run import CLASSES, config, make_run

import raydfl
from raydfl.controls import Control, to_json
from raydfl.core.errors import ConfigError
from raydfl.data import Population
from raydfl.engine.config import Config
from raydfl.engine.storage.record import MetricRow, rows_path, write_rows
from raydfl.runs import Progress, Verdict, run
from raydfl.runs.report import judge, read_run, write_report
from raydfl.runs.report.next_command import choose_command
from raydfl.runs.verdict import find_few_clips

Tiny = Callable[..., Config]
NAN = float("nan")
RIGHT = 40 * np.eye(4)


def make_confusion(accuracy: float, clips: int = 160) -> np.ndarray:
    """Return a matrix of four equal classes with this accuracy. Each wrong answer is the next class."""
    right = round(accuracy * clips / 4)
    return right * np.eye(4) + (clips // 4 - right) * np.roll(np.eye(4), 1, axis=1)


def write_run(
    folder: Path,
    accuracies: Sequence[float],
    *,
    held_out: Sequence[float] = (),
    training: Sequence[float] = (),
    confusion: np.ndarray | None = None,
    raw: float | None = None,
    lr: float = 0.1,
    total: int | None = None,
    score: str = "accuracy",
    **settings: Any,
) -> Path:
    """Write a run of four equal classes with an evaluation in each round.

    Args:
        folder: The run's folder.
        accuracies: Test accuracies by round, on 160 clips.
        held_out: Losses on the test clips by round.
        training: Training losses by round.
        confusion: Matrix of the last round. Defaults to one with the last accuracy.
        raw: Accuracy of raw features.
        lr: Learning rate.
        total: Configured rounds. Defaults to the number of accuracies.
        score: Name of the score. Only accuracies have a confusion matrix.
        settings: Further groups of the configuration.
    """
    values = {**config("fedavg", rounds=total or len(accuracies)), **settings}
    values["train"]["optimiser"] = {"name": "adam", "lr": lr, "models": {}}
    make_run(folder, values, done=0)
    (folder / "LATEST").write_text(f"{len(accuracies):06}-00000000.safetensors")
    for number, accuracy in enumerate(accuracies, 1):
        matrix = make_confusion(accuracy) if confusion is None else confusion
        rows = [MetricRow(number, "evaluate", "", "test", f"model/{score}", accuracy, matrix.sum())]
        if score == "accuracy":
            rows += [MetricRow(number, "evaluate", "", "test", "model/confusion", NAN, matrix.sum(), matrix)]
        for values_of, split, phase, metric in (
            (held_out, "test", "evaluate", "model/loss"),
            (training, "train", "train", "loss"),
        ):
            if values_of:
                rows.append(MetricRow(number, phase, "", split, metric, values_of[number - 1], 160.0))
        write_rows(rows_path(folder, number), rows)
    if raw is not None:
        controls = [Control(name, "test", "accuracy", 0.25, 160, 0.03) for name in ("chance", "majority")]
        controls.append(Control("raw features: linear model", "test", "accuracy", raw, 160, 0.03))
        (folder / "controls.json").write_text(to_json(controls, ""))
    return folder


def judge_run(folder: Path, *given: Any, **settings: Any) -> Verdict:
    return judge(read_run(write_run(folder, *given, **settings)))


def list_kinds(verdict: Verdict) -> set[str]:
    return {finding.kind for finding in verdict.findings}


@pytest.mark.parametrize(
    ("score", "control", "value", "learnt", "text"),
    [
        (
            "cer",
            0.8,
            0.2,
            True,
            r"^character error rate 0.200 \[0.145, 0.269\] on 160 test clips; always the same answer 0.800$",
        ),
        ("cer", 0.8, 0.77, False, "^not better than always the same answer"),
        ("cer", 1.0, 1.2, False, "^not better than always the same answer"),
        ("eer", 0.5, 0.5, False, "^not better than chance"),
        ("eer", 0.5, 0.4, None, "^equal error rate 0.400 on 160 test clips; chance 0.500$"),
    ],
)
def test_lower_scores_are_better_for_error_rates(
    tmp_path: Path, score: str, control: float, value: float, learnt: bool | None, text: str
) -> None:
    folder = write_run(tmp_path / "run", [1.0, 1.0, value], score=score)
    name = "chance" if score == "eer" else "majority"
    (folder / "controls.json").write_text(to_json([Control(name, "test", score, control, 160)], ""))
    verdict = judge(read_run(folder))
    assert verdict.learnt is learnt
    assert re.search(text, verdict.text), verdict.text
    assert ("blanks" in list_kinds(verdict)) is (value > 0.9)


FLAT = [0.25] * 12
LEARNT = [0.3, 0.5, 0.7, 0.8, 0.85, *[0.9] * 7]
FALLING_LOSS = [1.4, 1.2, 1.0, 0.8, *[0.6] * 8]
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("rising", {"accuracies": [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]}, {"accuracies": LEARNT}),
    ("plateau", {"accuracies": LEARNT}, {"accuracies": [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]}),
    (
        "rising",
        {"accuracies": [0.05, 0.05, 0.1, 0.1, 0.28, 0.29], "raw": 0.8},
        {"accuracies": [0.05, 0.05, 0.1, 0.1, 0.29, 0.26], "raw": 0.8},
    ),
    *(
        (
            kind,
            {"accuracies": [*fall, *end], "score": score},
            {"accuracies": [*fall[::-1], *other], "score": score},
        )
        for score in ("cer", "eer")
        for kind, fall, end, other in (
            ("rising", [0.8, 0.7, 0.6, 0.5, 0.4, 0.3], [], []),
            ("falling", [0.5, 0.4, 0.3, 0.2, *[0.1] * 7], [0.4, 0.4, 0.4], [0.05, 0.05, 0.05]),
        )
    ),
    (
        "loss falls",
        {"accuracies": LEARNT, "held_out": list(np.linspace(1.4, 0.3, 12))},
        {"accuracies": LEARNT, "held_out": FALLING_LOSS},
    ),
    ("falling", {"accuracies": [*LEARNT, 0.6, 0.6, 0.6]}, {"accuracies": [*LEARNT, 0.6, 0.6, 0.9]}),
    (
        "overfitting",
        {"accuracies": LEARNT, "held_out": [*FALLING_LOSS[:-1], 0.7], "training": [*np.linspace(1.4, 0.1, 12)]},
        {"accuracies": LEARNT, "held_out": [*FALLING_LOSS[:-1], 0.64], "training": [*np.linspace(1.4, 0.1, 12)]},
    ),
    (
        "overfitting",
        {"accuracies": LEARNT, "held_out": [*FALLING_LOSS[:-1], 0.68], "training": [*np.linspace(1.4, 0.1, 12)]},
        {
            "accuracies": LEARNT,
            "held_out": [*(loss / 10 for loss in FALLING_LOSS[:-1]), 0.12],
            "training": [*np.linspace(1.4, 0.1, 12)],
        },
    ),
    ("few evaluations", {"accuracies": [0.25, 0.5]}, {"accuracies": [0.25, 0.5, 0.7]}),
    ("few evaluations", {"accuracies": [0.5] * 5}, {"accuracies": [0.5] * 6}),
    ("plateau", {"accuracies": [0.5] * 6}, {"accuracies": [0.5] * 5}),
    (
        "rate too high",
        {"accuracies": FLAT, "training": [1.4, *[2.0] * 11], "lr": 0.001},
        {"accuracies": FLAT, "training": [1.4, *[1.5] * 11], "lr": 0.001},
    ),
    (
        "rate too high",
        {"accuracies": FLAT, "held_out": [3.0, *[1.4] * 11], "training": [*np.linspace(1.4, 1.3, 12)]},
        {"accuracies": FLAT, "held_out": [2.7, *[1.4] * 11], "training": [*np.linspace(1.4, 1.3, 12)]},
    ),
    (
        "rate too high",
        {"accuracies": FLAT, "held_out": [1.4, *[3.0] * 11], "training": [*np.linspace(1.4, 1.3, 12)]},
        {"accuracies": FLAT, "held_out": [1.4, *[3.0] * 11], "training": FALLING_LOSS},
    ),
    (
        "rate too high",
        {"accuracies": FLAT, "training": [1.4, NAN, *[1.3] * 10]},
        {"accuracies": LEARNT, "training": [1.4, NAN, *[1.3] * 10]},
    ),
    ("rate too high", {"accuracies": FLAT, "training": [1.4] * 12}, {"accuracies": LEARNT, "training": [1.4] * 12}),
    (
        "rate too low",
        {"accuracies": FLAT, "training": [1.4] * 12, "lr": 1e-5},
        {"accuracies": FLAT, "training": [*np.linspace(1.4, 1.3, 12)], "lr": 1e-5},
    ),
    (
        "rate too low",
        {"accuracies": FLAT, "training": [1.4] * 12, "lr": 1e-5, "raw": 0.4},
        {"accuracies": FLAT, "training": [1.4] * 12, "lr": 1e-5, "raw": 0.3},
    ),
    ("labels", {"accuracies": FLAT, "raw": 0.3}, {"accuracies": FLAT, "raw": 0.4}),
    ("below raw features", {"accuracies": LEARNT, "raw": 0.96}, {"accuracies": LEARNT, "raw": 0.92}),
    ("raw features", {"accuracies": LEARNT, "raw": 0.92}, {"accuracies": LEARNT, "raw": 0.8}),
    (
        "few test clips",
        {"accuracies": LEARNT, "confusion": 24 * np.eye(4)},
        {"accuracies": LEARNT, "confusion": 25 * np.eye(4)},
    ),
    (
        "never predicted",
        {"accuracies": LEARNT, "confusion": RIGHT[[0, 0, 2, 3]]},
        {"accuracies": LEARNT, "confusion": RIGHT},
    ),
]


@pytest.mark.parametrize(("kind", "with_symptom", "without"), CASES)
def test_each_rule_finds_its_symptom_only(
    tmp_path: Path, kind: str, with_symptom: dict[str, Any], without: dict[str, Any]
) -> None:
    assert kind in list_kinds(judge_run(tmp_path / "with", **with_symptom))
    assert kind not in list_kinds(judge_run(tmp_path / "without", **without))


def test_the_first_words_tell_whether_the_run_learnt(tmp_path: Path) -> None:
    """Wilson's interval of 46 of 160 clips contains 1/4; that of 52 of 160 clips is [0.257, 0.401]."""
    verdict = judge_run(tmp_path / "guesses", [46 / 160])
    assert verdict.learnt is False
    assert verdict.text.startswith("not better than always answering 'zero' (0.250): accuracy 0.287 [0.223, 0.362]")
    verdict = judge_run(tmp_path / "learns", [52 / 160], raw=0.31)
    assert verdict.learnt is True
    assert verdict.text == (
        "accuracy 0.325 [0.257, 0.401] on 160 test clips; chance and always answering 'zero' 0.250, raw features 0.310 "
        "(linear model)"
    )


def test_the_majority_class_is_the_bar(tmp_path: Path) -> None:
    """An accuracy far above chance does not count if one answer gives the same."""
    skewed = np.zeros((4, 4))
    skewed[:, 1] = [10, 120, 20, 10]
    verdict = judge_run(tmp_path / "run", [0.75], confusion=skewed)
    assert verdict.learnt is False
    assert verdict.text.startswith("not better than always answering 'one' (0.750): accuracy 0.750 ")
    (score,) = verdict.scores
    assert (score.chance, score.majority) == (0.25, 0.75)


def test_an_auc_has_an_interval(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder, config("fedavg", rounds=1), done=0)
    (folder / "LATEST").write_text("000001-00000000.safetensors")
    write_rows(rows_path(folder, 1), [MetricRow(1, "evaluate", "", "client_test", "model/auc", 0.6, 40.0)])
    controls = [Control("chance", "validation", "auc", 0.5, 40, positives=5)]  # of other clips
    controls.append(Control("chance", "client_test", "auc", 0.5, 40, 0.092, positives=20))
    (folder / "controls.json").write_text(to_json(controls, ""))
    verdict = judge(read_run(folder))
    assert verdict.text.startswith("not better than chance (0.500): AUC 0.600 [0.42")
    (score,) = verdict.scores
    assert score.high == pytest.approx(0.76, abs=0.01)
    # Earlier versions did not store the number of anomalous clips.
    (folder / "controls.json").write_text(to_json([Control("chance", "client_test", "auc", 0.5, 40, 0.092)], ""))
    assert judge(read_run(folder)).learnt is None


def test_each_part_of_the_data_has_a_score(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    parts = {"digits": CLASSES, "words": CLASSES[:2]}
    make_run(folder, config("fedavg", rounds=1), done=0, about={"parts": parts})
    rows = []
    for name, classes in parts.items():
        matrix = 100 * np.eye(len(classes))
        rows.append(MetricRow(1, "evaluate", "", "test", f"{name}:model/accuracy", 1.0, matrix.sum()))
        rows.append(MetricRow(1, "evaluate", "", "test", f"{name}:model/confusion", NAN, matrix.sum(), matrix))
    (folder / "LATEST").write_text("000001-00000000.safetensors")
    write_rows(rows_path(folder, 1), rows)
    verdict = judge(read_run(folder))
    assert [score.clips for score in verdict.scores] == [400, 200]
    assert verdict.text.startswith("digits: accuracy 1.000 [0.990, 1.000] on 400 test clips")
    assert " | words: accuracy 1.000 " in verdict.text


COMMANDS: list[tuple[dict[str, Any], str]] = [
    ({"accuracies": [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]}, "raydfl resume {run} train.rounds=12"),
    ({"accuracies": [0.25]}, "raydfl resume {run} train.rounds=4"),
    ({"accuracies": LEARNT, "total": 20}, "raydfl resume {run}"),
    (
        {"accuracies": LEARNT},
        "raydfl run {run}/config.yaml run.name=run-reference 'run.reference={{pooled: true, local: true}}'",
    ),
    (
        {"accuracies": FLAT, "training": [1.4] * 12, "lr": 1e-5, "raw": 0.8},
        "raydfl run {run}/config.yaml run.name=run-rate train.optimiser.lr=0.003",
    ),
    (
        {"accuracies": FLAT, "training": [1.4, *[2.0] * 11], "lr": 10.0},
        "raydfl run {run}/config.yaml run.name=run-rate train.optimiser.lr=0.003",
    ),
    ({"accuracies": LEARNT, "raw": 0.97}, "raydfl resume {run} train.rounds=24"),
    ({"accuracies": FLAT, "raw": 0.25}, "raydfl data info {run}/config.yaml"),
    ({"accuracies": [*LEARNT, 0.6, 0.6, 0.6]}, "raydfl run {run}/config.yaml run.name=run-best run.best={{}}"),
]


@pytest.mark.parametrize(("given", "command"), COMMANDS)
def test_the_next_command_fits_the_symptom(tmp_path: Path, given: dict[str, Any], command: str) -> None:
    verdict = judge_run(tmp_path / "run", **given)
    assert shlex.split(verdict.next) == shlex.split(command.format(run=tmp_path / "run"))


def test_few_clips_lead_to_a_pretrained_encoder(tmp_path: Path) -> None:
    write_run(tmp_path / "run", FLAT)
    run = read_run(tmp_path / "run")
    expected = (
        f"raydfl run {tmp_path}/run/config.yaml run.name=run-embedding 'data.features={{kind: speech_embedding}}'"
    )
    assert choose_command(run, False, {"few clips"}) == f"{expected} models.model=linear"
    other = dataclasses.replace(run, config={**run.config, "data": {"features": {"kind": "kaldi"}}})
    assert choose_command(other, False, {"few clips"}) == "raydfl methods pretrained"


def test_clients_with_a_single_class_need_gentle_training(tmp_path: Path) -> None:
    write_run(tmp_path / "run", FLAT)
    run = read_run(tmp_path / "run")
    kinds = {"single classes", "rising"}
    command = choose_command(run, False, kinds)
    assert command == f"raydfl run {tmp_path}/run/config.yaml run.name=run-gentle train.cohort=1.0 train.local_epochs=1"
    train = {**run.config["train"], "cohort": 1.0, "local_epochs": 1}
    gentle = dataclasses.replace(run, config={**run.config, "train": train})
    assert choose_command(gentle, False, kinds).startswith("raydfl resume ")


def test_doubtful_labels_need_a_check_before_more_rounds(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", FLAT))
    assert choose_command(run, False, {"labels", "few evaluations"}) == f"raydfl data info {tmp_path}/run/config.yaml"
    assert choose_command(run, False, {"labels", "rising"}).startswith("raydfl resume ")


def test_the_encoder_of_speech_is_proposed_for_speech_only(tmp_path: Path) -> None:
    write_run(tmp_path / "run", FLAT)
    run = read_run(tmp_path / "run")
    sounds = dataclasses.replace(run, config={**run.config, "data": {"name": "esc"}})
    assert choose_command(sounds, False, {"few clips"}) == "raydfl methods pretrained"
    part = SimpleNamespace(class_counts=lambda: np.array([3, 3]))
    population = SimpleNamespace(has_clips=True, parts={"": part})
    assert [
        text.endswith("3 each. Use a pretrained encoder.") for text in find_few_clips(population, "logmel", "esc")
    ] == [True]


def test_a_run_without_scores_has_a_verdict(tmp_path: Path) -> None:
    make_run(tmp_path / "run", config(rounds=2), done=0)
    verdict = judge(read_run(tmp_path / "run"))
    assert (verdict.learnt, verdict.scores, verdict.text) == (None, (), "no score was measured")
    assert json.dumps(verdict.to_dict(), allow_nan=False)


def test_the_report_begins_with_the_verdict(tmp_path: Path) -> None:
    write_run(tmp_path / "run", FLAT, raw=0.9)
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert page.index("<h2>Verdict</h2>") == page.index("<h2>")
    assert "Not better than always answering" in page


# -- real runs -----------------------------------------------------------------------------------------------------------


def run_tiny(tiny: Tiny, *overrides: str) -> tuple[raydfl.Result, list[str]]:
    """Return the result and the printed lines of a run."""
    output = io.StringIO()
    result = run(tiny("data.test_takes=5", *overrides), Progress("lines", output))
    return result, output.getvalue().splitlines()


def test_a_run_with_a_tiny_rate_is_told_so(tiny: Tiny) -> None:
    result, lines = run_tiny(tiny, "train.rounds=3", "train.optimiser.lr=1e-9")
    verdict = result.verdict
    assert verdict.learnt is False
    assert {"rate too low", "below raw features"} <= list_kinds(verdict)
    assert any(line.startswith("verdict: not better than always answering 'tone") for line in lines)
    assert lines[-1] == f"next: {verdict.next}"
    assert verdict.next.endswith("run.name=tiny-rate train.optimiser.lr=0.1")
    (score,) = verdict.scores
    assert score.clips == 6 * 3 * 5
    assert score.value == result.scores["test model/accuracy"]


def test_a_run_that_learns_is_told_so(tiny: Tiny) -> None:
    """Its next command continues it."""
    result, lines = run_tiny(
        tiny, "train.rounds=12", "train.cohort=1.0", "train.optimiser={name: adam, lr: 0.03}", "run.best={}"
    )
    verdict = result.verdict
    assert verdict.learnt is True
    assert not {"rate too low", "rate too high", "labels", "single clips"} & list_kinds(verdict)
    assert any(line.startswith("verdict: accuracy ") for line in lines)
    assert raydfl.load_result(result.run_dir).verdict == verdict


def test_few_and_single_clips_are_counted(tiny: Tiny) -> None:
    result, _ = run_tiny(tiny, "train.rounds=1", "data.split.validation=0.05", "evaluate.clients=all")
    findings = {finding.kind: finding.text for finding in result.verdict.findings}
    trained = int(Population.load(result.run_dir / "population", features=False).class_counts().sum())
    assert findings["few clips"].startswith(f"{trained} training clips of 3 classes are few: ")
    assert "clients have a single held-out clip" in findings["single clips"]
    many, _ = run_tiny(tiny, "train.rounds=1", "data.takes=12", "data.split.validation=0.2", "run.name=many")
    assert not {"few clips", "single clips"} & list_kinds(many.verdict)


def test_clients_with_a_single_class_and_known_speakers_are_reported(tiny: Tiny) -> None:
    settings = "data.partition={by: classes, clients: 3, classes: 1}", "data.split.test={by: clip, fraction: 0.3}"
    skewed, _ = run_tiny(tiny, "train.rounds=1", "train.cohort=1.0", "data.takes=6", settings[0])
    texts = {finding.kind: finding.text for finding in skewed.verdict.findings}
    assert texts["single classes"].startswith("3 of 3 clients have clips of a single class")
    assert "known groups" not in texts
    assert not {"rate too high", "rate too low"} & texts.keys()
    known, _ = run_tiny(tiny, "train.rounds=1", settings[1], "run.name=known")
    assert "known groups" in list_kinds(known.verdict)
    assert "single classes" not in list_kinds(known.verdict)


def test_references_are_other_runs_of_the_same_clips(tiny: Tiny, tmp_path: Path) -> None:
    """The pooled run makes as many passes: 4 rounds of half the clients are 2 rounds of all clips."""
    settings = "run.reference={pooled: true, local: true}"
    run_tiny(tiny, "train.rounds=2", settings)
    result = raydfl.resume(tmp_path / "runs" / "tiny", ["train.rounds=4"])  # continues the references, too
    folder = result.run_dir / "reference"
    pooled, local = (raydfl.load_result(folder / name) for name in ("pooled", "local"))
    assert (pooled.round, local.round) == (2, 4)
    findings = {finding.kind.removeprefix("worse than "): finding.text for finding in result.verdict.findings}
    assert f"accuracy {pooled.scores['test model/accuracy']:.3f} [" in findings["pooled"]
    assert f"accuracy {local.scores['test model/accuracy']:.3f} [" in findings["local"]
    alone = run(
        tiny("train.rounds=4", "data.test_takes=5", "run.name=alone", "method={name: fedper, personal: [model]}")
    )
    assert alone.scores == local.scores


@pytest.mark.parametrize(
    ("settings", "method", "problem"),
    [
        ([], "fedmlac", "the method 'fedmlac' does not train a single model named model"),
        (["data.parts={low: {speakers: 4}, high: {classes: 5, first: 10}}"], "fedavg", "the data have parts or sites"),
    ],
)
def test_references_that_are_not_defined_are_rejected(
    tiny: Tiny, settings: list[str], method: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"run.reference: {problem}"):
        tiny(*settings, "run.reference={local: true}", method=method)


def test_references_decide_the_next_command(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", LEARNT)
    write_run(folder / "reference" / "pooled", [0.98])
    write_run(folder / "reference" / "local", [0.88])
    verdict = judge(read_run(folder))
    texts = {finding.kind: finding.text for finding in verdict.findings}
    assert texts["worse than pooled"].startswith("The same clips pooled: accuracy 0.980 [")
    assert texts["local"].endswith("so a benefit of the federation is not shown.")
    assert verdict.next.endswith("run.name=run-fedopt method=fedopt")


def test_the_command_explains_a_run(tiny: Tiny, raydfl: Raydfl) -> None:
    result, lines = run_tiny(tiny, "train.rounds=2", "train.optimiser.lr=1e20")
    place = next(number for number, line in enumerate(lines) if line.startswith("verdict: "))
    output = raydfl("explain", result.run_dir)
    assert output.code == 0
    explained = output.out.splitlines()
    assert explained[0].startswith("worthless: the training diverged")
    assert explained[1:] == lines[place:]
    assert explained[-1].endswith("run.name=tiny-rate train.optimiser.lr=0.1")
    described = json.loads(raydfl("explain", result.run_dir, "--json").out)
    assert described["learnt"] is False
    assert described["problems"][0]["kind"] == "diverged"
    assert f"next: {described['next']}" == lines[-1]


def test_the_finish_event_has_the_verdict(tiny: Tiny) -> None:
    output = io.StringIO()
    result = run(tiny("train.rounds=1"), Progress("json", output))
    event = json.loads(output.getvalue().splitlines()[-1])
    assert event["verdict"]["text"] == result.verdict.text
    assert event["next_step"] == event["verdict"]["next"]
    assert math.isclose(event["verdict"]["scores"][0]["value"], result.scores["test model/accuracy"])


def test_few_clips_are_reported_before_the_first_round(tiny: Tiny) -> None:
    output = io.StringIO()
    run(tiny("train.rounds=1", method="fedavg"), Progress("lines", output))
    lines = output.getvalue().splitlines()
    (few, *_) = [number for number, line in enumerate(lines) if "training clips of 3 classes are few" in line]
    assert few < next(number for number, line in enumerate(lines) if "round 1" in line)


@pytest.mark.parametrize(
    ("counts", "start"),
    [
        ([50, 50], None),
        ([50, 49], "99 training clips of 2 classes are few: 50 each."),
        ([3, 0], None),
        ([1, 0, 3], "4 "),
    ],
)
def test_fewer_than_fifty_clips_per_class_are_few(counts: list[int], start: str | None) -> None:
    part = SimpleNamespace(class_counts=lambda: np.array(counts))
    texts = list(find_few_clips(SimpleNamespace(has_clips=True, parts={"digits": part}), "logmel"))
    assert [text[: len(f"digits: {start}")] for text in texts] == ([] if start is None else [f"digits: {start}"])
