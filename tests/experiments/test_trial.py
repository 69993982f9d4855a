"""One trial: it reports each evaluation, stops, continues to the same bits, and begins as a copy where it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import known
from ray import tune

from raydfl.engine.config import Config
from raydfl.experiments.federation import WORST, TrialOrder, branch, make_trainable, read_scores
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.study import count_rounds, is_complete, list_keys
from raydfl.testing import assert_same_bits, read_tensors

LOSS = MetricSettings(score="loss", split="validation")


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., tune.Trainable]:
    """Makes the trial of a study, which has a file for its end and a log."""

    def make(config: Config, log: Path = tmp_path / "logs" / "trial.log", **changes: Any) -> tune.Trainable:
        keys = tuple(" ".join(key) for key in list_keys(config, LOSS))
        order = TrialOrder(config, **{"keys": keys, "stop": tmp_path / "stop", "log": log, **changes})
        return make_trainable(lambda *_: order, 1.0, copies=False)({})

    return make


def _all(trial: tune.Trainable) -> list[dict[str, Any]]:
    results = [trial.train()]
    while results[-1]["status"] == "running":
        results.append(trial.train())
    return results


def _scores(results: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(each["round"], each["score"]) for each in results]


def _folder(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def test_each_evaluated_round_is_reported_once_with_the_records_score(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable]
) -> None:
    config = tiny("train.rounds=5", "evaluate.every=2")
    results = _all(begin(config))
    name = "validation model/loss_client_mean"
    scores = {
        round_index: values.get(name, values["validation model/loss"])
        for round_index, values in read_scores(_folder(config), 0).items()
    }
    assert [each["round"] for each in results] == [2, 4, 5]
    assert dict(_scores(results)) == scores
    assert [each["status"] for each in results] == ["running", "running", "finished"]


def test_a_trial_that_stops_by_itself_is_finished_and_reports_where(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable]
) -> None:
    # No loss gets better by a thousand: after the first evaluation and one more it is over.
    config = tiny("train.rounds=9", "run.best={}", "run.stop={metric: loss, min_delta: 1000, patience: 1}")
    results = _all(begin(config))
    assert [(each["round"], each["status"]) for each in results] == [(1, "running"), (2, "finished")]
    assert results[-1]["stopped"] == "no better validation model/loss since round 1"
    assert results[-1]["best_round"] in (1, 2)
    assert results[-1]["score"] < WORST
    assert is_complete(_folder(config), config)
    assert not is_complete(_folder(config), tiny("train.rounds=9"))


def test_a_trial_that_is_not_judged_has_one_result_and_stops_after_its_round(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable], tmp_path: Path
) -> None:
    """As a sweep's cell: to the bits of a run alone, however often it was stopped."""
    config = tiny("train.rounds=40", "evaluate.every=20", "evaluate.clients=none")
    folder = _folder(config)

    def results() -> list[str]:
        return [each["status"] for each in _all(begin(config, judged=False, keys=()))]

    (tmp_path / "stop").touch()
    assert results() == ["interrupted"]
    assert not folder.exists()
    (tmp_path / "stop").unlink()

    def stop_soon() -> None:
        while count_rounds(folder) < 2:
            time.sleep(0.005)
        (tmp_path / "stop").touch()

    threading.Thread(target=stop_soon, daemon=True).start()
    assert results() == ["interrupted"]
    assert 2 <= count_rounds(folder) < 40
    (tmp_path / "stop").unlink()
    assert results() == ["finished"]
    assert_same_bits(read_tensors(folder), known(tiny("train.rounds=40", "evaluate.clients=none")))
    (folder / "report.html").unlink()  # killed between the last round and its page
    assert results() == ["finished"]
    assert (folder / "report.html").exists()


def test_a_diverged_trial_is_finished_and_reports_it(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable]
) -> None:
    *before, last = _all(begin(tiny("train.rounds=2", "train.optimiser.lr=1e20")))
    assert not any("worthless" in each for each in before)
    assert (last["status"], last["round"]) == ("finished", 2)
    assert last["worthless"].startswith("the training diverged: ")


def test_a_trial_that_is_stopped_continues_to_the_same_bits(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable], tmp_path: Path
) -> None:
    config = tiny("train.rounds=4", "run.name=interrupted")
    other = _all(begin(tiny("train.rounds=4", "run.name=other")))
    trial = begin(config)
    first = [trial.train(), trial.train()]
    trial.stop()  # what a scheduler's decision does
    folder = _folder(config)
    assert (folder / "LATEST").read_text().startswith("000002-")
    assert (folder / "report.html").exists()
    assert not (folder / "model.safetensors").exists()
    (tmp_path / "stop").touch()  # what Ctrl-C does
    assert begin(config).train()["status"] == "interrupted"
    (tmp_path / "stop").unlink()
    again = _all(begin(config))
    assert _scores(again)[:2] == _scores(first)
    assert _scores(again) == _scores(other)
    assert_same_bits(read_tensors(folder), known(tiny("train.rounds=4")))


def test_what_was_trained_is_reported_again_without_training(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.rounds=4")
    before = _all(begin(config))
    monkeypatch.setattr("raydfl.engine.federation.Federation.round", lambda *_: pytest.fail("it trains again"))
    assert _scores(_all(begin(config))) == _scores(before)


def test_an_interruption_during_a_round_ends_after_it(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable], tmp_path: Path
) -> None:
    config = tiny("train.rounds=6", "evaluate.every=3")
    trial = begin(config)
    assert trial.train()["round"] == 3
    (tmp_path / "stop").touch()
    for _ in range(2):  # Ray Tune may ask again
        last = trial.train()
        assert (last["status"], last["round"]) == ("interrupted", 3)
    assert (_folder(config) / "LATEST").read_text().startswith("000003-")


def test_a_failure_is_reported_and_written_down(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for log in (tmp_path / "logs" / "trial.log", tmp_path / "file" / "log"):  # the second one cannot be written
        last = begin(tiny("evaluate.clients=none"), log).train()  # so the score is not measured
        assert (last["status"], last["done"]) == ("failed", True)
        assert last["failed"].startswith("metric: validation loss is not measured. Measured are ")
        assert "test model/accuracy" in last["failed"]
    assert "Traceback" in (tmp_path / "logs" / "trial.log").read_text()


def test_a_copy_continues_from_anothers_state_with_its_own_settings(
    tiny: Callable[..., Config], begin: Callable[..., tune.Trainable]
) -> None:
    """A copy with unchanged settings is the undisturbed run; with another rate it shares its past, not its future."""
    parent = tiny("train.rounds=2", "run.name=parent")
    _all(begin(parent))
    folder = _folder(parent)
    past = read_tensors(folder)
    unchanged = tiny("train.rounds=4", "run.name=unchanged")
    changed = tiny("train.rounds=4", "train.optimiser.lr=0.3", "run.name=changed")
    for config in (unchanged, changed):
        branch(folder, _folder(config), config)
        assert [each["round"] for each in _all(begin(config))] == [1, 2, 3, 4]
    assert_same_bits(read_tensors(_folder(unchanged)), known(tiny("train.rounds=4")))
    here = read_tensors(_folder(changed))
    assert here != read_tensors(_folder(unchanged))
    assert_same_bits(read_tensors(folder), past)  # the parent is untouched
    about = json.loads((_folder(changed) / "run.json").read_text())
    assert about["branches"] == [{"run": "parent", "digest": parent.digest(), "round": 2}]
    assert about["digest"] == changed.digest()
    branch(folder, _folder(changed), changed)  # again: it has begun, and is left as it is
    assert_same_bits(read_tensors(_folder(changed)), here)
