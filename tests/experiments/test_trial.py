"""A single trial: reports of evaluations, stopping, continuation to the same bits, and copies of other trials."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import known
from ray import tune

from raydfl.core import ops
from raydfl.core.ops import _backend
from raydfl.engine.config import Config
from raydfl.experiments.federation import WORST, TrialOrder, branch, make_trainable, read_scores
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.study import count_rounds, is_complete, list_keys
from raydfl.testing import assert_same_bits, read_tensors

LOSS = MetricSettings(score="loss", split="validation")


@pytest.fixture
def create_trial(tmp_path: Path) -> Callable[..., tune.Trainable]:
    """Return a function that creates the trial of a study, with a stop file and a log."""

    def make(config: Config, log: Path = tmp_path / "logs" / "trial.log", **changes: Any) -> tune.Trainable:
        keys = tuple((" ".join(key),) for key in list_keys(config, LOSS))
        order = TrialOrder(config, **{"keys": keys, "stop": tmp_path / "stop", "log": log, **changes})
        return make_trainable(lambda *_: order, 1.0, copies=False)({})

    return make


def _train_to_end(trial: tune.Trainable) -> list[dict[str, Any]]:
    results = [trial.train()]
    while results[-1]["status"] == "running":
        results.append(trial.train())
    return results


def _list_scores(results: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(result["round"], result["score"]) for result in results]


def _run_folder(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def test_each_evaluated_round_is_reported_once_with_the_recorded_score(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable]
) -> None:
    config = tiny("train.rounds=5", "evaluate.every=2")
    results = _train_to_end(create_trial(config))
    name = "validation model/loss_client_mean"
    scores = {
        round_index: values.get(name, values["validation model/loss"])
        for round_index, values in read_scores(_run_folder(config), 0).items()
    }
    assert [result["round"] for result in results] == [2, 4, 5]
    assert dict(_list_scores(results)) == scores
    assert [result["status"] for result in results] == ["running", "running", "finished"]


def test_an_early_stopped_trial_is_finished_and_reports_its_round(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable]
) -> None:
    # No loss improves by 1000, so the trial ends after its second evaluation.
    config = tiny("train.rounds=9", "run.best={}", "run.stop={metric: loss, min_delta: 1000, patience: 1}")
    results = _train_to_end(create_trial(config))
    assert [(result["round"], result["status"]) for result in results] == [(1, "running"), (2, "finished")]
    assert results[-1]["stopped"] == "no better validation model/loss since round 1"
    assert results[-1]["best_round"] in (1, 2)
    assert results[-1]["score"] < WORST
    assert is_complete(_run_folder(config), config)
    assert not is_complete(_run_folder(config), tiny("train.rounds=9"))


@pytest.mark.slow
def test_an_unjudged_trial_has_one_result_and_stops_after_its_round(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable], tmp_path: Path
) -> None:
    """A cell of a sweep has the bits of a single run after any number of interruptions."""
    config = tiny("train.rounds=40", "evaluate.every=20", "evaluate.clients=none")
    folder = _run_folder(config)

    def list_statuses() -> list[str]:
        return [result["status"] for result in _train_to_end(create_trial(config, judged=False, keys=()))]

    (tmp_path / "stop").touch()
    assert list_statuses() == ["interrupted"]
    assert not folder.exists()
    (tmp_path / "stop").unlink()

    def stop_soon() -> None:
        while count_rounds(folder) < 2:
            time.sleep(0.005)
        (tmp_path / "stop").touch()

    threading.Thread(target=stop_soon, daemon=True).start()
    assert list_statuses() == ["interrupted"]
    assert 2 <= count_rounds(folder) < 40
    (tmp_path / "stop").unlink()
    assert list_statuses() == ["finished"]
    assert_same_bits(read_tensors(folder), known(tiny("train.rounds=40", "evaluate.clients=none")))
    (folder / "report.html").unlink()  # simulate a kill between the last round and its page
    assert list_statuses() == ["finished"]
    assert (folder / "report.html").exists()


def test_a_diverged_trial_is_finished_and_reported(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable]
) -> None:
    *before, last = _train_to_end(create_trial(tiny("train.rounds=2", "train.optimiser.lr=1e20")))
    assert not any("worthless" in result for result in before)
    assert (last["status"], last["round"]) == ("finished", 2)
    assert last["worthless"].startswith("the training diverged: ")


def test_a_stopped_trial_continues_to_the_same_bits(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable], tmp_path: Path
) -> None:
    config = tiny("train.rounds=4", "run.name=interrupted")
    reference = _train_to_end(create_trial(tiny("train.rounds=4", "run.name=other")))
    trial = create_trial(config)
    first = [trial.train(), trial.train()]
    trial.stop()  # as a scheduler stops a trial
    folder = _run_folder(config)
    assert (folder / "LATEST").read_text().startswith("000002-")
    assert (folder / "report.html").exists()
    assert not (folder / "model.safetensors").exists()
    (tmp_path / "stop").touch()  # as Ctrl-C does
    assert create_trial(config).train()["status"] == "interrupted"
    (tmp_path / "stop").unlink()
    again = _train_to_end(create_trial(config))
    assert _list_scores(again)[:2] == _list_scores(first)
    assert _list_scores(again) == _list_scores(reference)
    assert_same_bits(read_tensors(folder), known(tiny("train.rounds=4")))


def test_trained_rounds_are_reported_again_without_training(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.rounds=4")
    before = _train_to_end(create_trial(config))
    monkeypatch.setattr("raydfl.engine.federation.Federation.round", lambda *_: pytest.fail("it trains again"))
    assert _list_scores(_train_to_end(create_trial(config))) == _list_scores(before)


def test_an_interrupted_trial_ends_after_its_round(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable], tmp_path: Path
) -> None:
    config = tiny("train.rounds=6", "evaluate.every=3")
    trial = create_trial(config)
    assert trial.train()["round"] == 3
    (tmp_path / "stop").touch()
    for _ in range(2):  # Ray Tune may call train again
        last = trial.train()
        assert (last["status"], last["round"]) == ("interrupted", 3)
    assert (_run_folder(config) / "LATEST").read_text().startswith("000003-")


def test_a_failure_is_reported_and_logged(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for log in (tmp_path / "logs" / "trial.log", tmp_path / "file" / "log"):  # the second log cannot be written
        last = create_trial(tiny("evaluate.clients=none"), log).train()  # the score is then not measured
        assert (last["status"], last["done"]) == ("failed", True)
        assert last["failed"].startswith("metric: validation loss is not measured. Measured are ")
        assert "test model/accuracy" in last["failed"]
    assert "Traceback" in (tmp_path / "logs" / "trial.log").read_text()


def test_a_run_without_scores_fails_at_its_first_evaluation(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable]
) -> None:
    """Models of training alone are not shared, so neither the server nor, without evaluate.clients, a client measures them."""
    config = tiny("method=local", "evaluate.clients=none", "evaluate.every=2", "train.rounds=4")
    last = create_trial(config, judged=False, keys=()).train()
    assert (last["status"], last["done"]) == ("failed", True)
    assert last["failed"].startswith(
        "no score was measured until round 2. Set evaluate.server=true, or evaluate.clients=all"
    )
    assert count_rounds(_run_folder(config)) == 2
    phases = "train.phases={first: {local_epochs: 1}, second: {local_epochs: 2}}"
    config = tiny("method=local", "evaluate.clients=none", "train.rounds=4", phases, "run.name=phases")
    last = create_trial(config, judged=False, keys=()).train()  # the second phase could measure a score
    assert last["failed"].startswith("no score was measured until round 4.")
    nothing = ("data.split.validation=0", "data.split.client_test=null", "evaluate.client_test_clips=0")
    config = tiny("method=local", "train.rounds=4", "run.name=nothing", *nothing)
    last = create_trial(config, judged=False, keys=()).train()  # clients without held-out clips
    assert last["failed"].startswith("no score was measured until round 4.")
    config = tiny("method=local", "train.rounds=4", "run.name=measured")
    assert create_trial(config, judged=False, keys=()).train()["status"] == "finished"


def test_a_trial_in_a_process_with_other_software_fails(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = create_trial(tiny())
    monkeypatch.setattr(_backend, "is_compiled", lambda: not ops.is_compiled())
    last = trial.train()
    assert last["status"] == "failed"
    assert re.search(r"different software: operators \w+ here, \w+ on the first machine", last["failed"])


def test_a_copy_continues_from_the_parents_state_with_its_own_settings(
    tiny: Callable[..., Config], create_trial: Callable[..., tune.Trainable]
) -> None:
    """A copy with unchanged settings equals the reference run. A changed rate affects only later rounds."""
    parent = tiny("train.rounds=2", "run.name=parent")
    _train_to_end(create_trial(parent))
    folder = _run_folder(parent)
    parent_tensors = read_tensors(folder)
    unchanged = tiny("train.rounds=4", "run.name=unchanged")
    changed = tiny("train.rounds=4", "train.optimiser.lr=0.3", "run.name=changed")
    for config in (unchanged, changed):
        branch(folder, _run_folder(config), config)
        assert [result["round"] for result in _train_to_end(create_trial(config))] == [1, 2, 3, 4]
    assert_same_bits(read_tensors(_run_folder(unchanged)), known(tiny("train.rounds=4")))
    tensors = read_tensors(_run_folder(changed))
    assert tensors != read_tensors(_run_folder(unchanged))
    assert_same_bits(read_tensors(folder), parent_tensors)  # the parent is unchanged
    manifest = json.loads((_run_folder(changed) / "run.json").read_text())
    assert manifest["branches"] == [{"run": "parent", "digest": parent.digest(), "round": 2}]
    assert manifest["digest"] == changed.digest()
    branch(folder, _run_folder(changed), changed)  # a second call leaves the started copy unchanged
    assert_same_bits(read_tensors(_run_folder(changed)), tensors)
