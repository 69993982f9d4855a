"""One trial in its thread: it waits, stops, goes on to the same bits, and begins as a copy where it is told to."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import known

from raydfl.engine.config import Config
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.study import is_complete, keys_of, rounds_done
from raydfl.experiments.trial import RunThread, TrialOrder, TrialReport, branch, read_scores
from raydfl.testing import assert_same_bits, read_tensors


def _order(config: Config, tmp_path: Path, reported: int = 0, **changes: Any) -> TrialOrder:
    keys = tuple(keys_of(config, MetricSettings(score="loss", split="validation")))
    values: dict[str, Any] = {
        "config": config,
        "keys": keys,
        "stop": tmp_path / "stop",
        "log": tmp_path / "logs" / "trial.log",
        "reported": reported,
    }
    return TrialOrder(**{**values, **changes})


def _all(run: RunThread) -> list[TrialReport]:
    said = [run.next()]
    while said[-1].status == "running":
        said.append(run.next())
    return said


def _rounds(said: Sequence[TrialReport]) -> list[tuple[int, float]]:
    return [(each.round, each.score) for each in said]


def test_each_evaluated_round_is_told_once_with_the_records_score(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny("train.rounds=5", "evaluate.every=2")
    said = _all(RunThread(_order(config, tmp_path)))
    folder = Path(config.run.dir) / "tiny"
    scores = {
        round_index: values["validation", "model/loss_client_mean"] if ("validation", "model/loss_client_mean") in values
        else values["validation", "model/loss"]
        for round_index, values in read_scores(folder, 0).items()
    }  # fmt: skip
    assert [each.round for each in said] == [2, 4, 5]
    assert dict(_rounds(said)) == scores
    assert said[-1].status == "finished"


def test_a_trial_that_stops_by_itself_is_finished_and_says_where(tiny: Callable[..., Config], tmp_path: Path) -> None:
    # No loss gets better by a thousand: after the first evaluation and one more it is over.
    config = tiny("train.rounds=9", "run.best={}", "run.stop={metric: loss, min_delta: 1000, patience: 1}")
    said = _all(RunThread(_order(config, tmp_path)))
    assert [(each.round, each.status) for each in said] == [(1, "running"), (2, "finished")]
    assert said[-1].ended == "no better validation model/loss since round 1"
    assert said[-1].best in (1, 2)
    assert not math.isnan(said[-1].score)
    folder = Path(config.run.dir) / "tiny"
    assert is_complete(folder, config)
    assert not is_complete(folder, tiny("train.rounds=9"))


def test_a_trial_that_is_not_judged_has_one_result_and_stops_after_its_round(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """As a sweep's cell: to the bits of a run alone, however often it was stopped."""
    config = tiny("train.rounds=40", "evaluate.every=20", "evaluate.clients=none")
    order = _order(config, tmp_path, judged=False, keys=())
    (tmp_path / "stop").touch()
    assert RunThread(order).next().status == "interrupted"
    assert not order.folder.exists()
    (tmp_path / "stop").unlink()

    def stop_soon() -> None:
        while rounds_done(order.folder) < 2:
            time.sleep(0.005)
        (tmp_path / "stop").touch()

    threading.Thread(target=stop_soon, daemon=True).start()
    assert RunThread(order).next().status == "interrupted"
    assert 2 <= rounds_done(order.folder) < 40
    (tmp_path / "stop").unlink()
    assert [said.status for said in _all(RunThread(order))] == ["finished"]
    assert_same_bits(read_tensors(order.folder), known(tiny("train.rounds=40", "evaluate.clients=none")))
    (order.folder / "report.html").unlink()  # killed between the last round and its page
    assert [said.status for said in _all(RunThread(order))] == ["finished"]
    assert (order.folder / "report.html").exists()


@pytest.mark.timeout(60)
def test_a_failure_that_cannot_be_logged_is_told_all_the_same(tiny: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = tiny("evaluate.clients=none")  # so the score is not measured
    order = dataclasses.replace(_order(config, tmp_path), log=tmp_path / "file" / "log")
    assert RunThread(order).next().status == "failed"


def test_a_diverged_trial_is_finished_and_says_so(tiny: Callable[..., Config], tmp_path: Path) -> None:
    *before, last = _all(RunThread(_order(tiny("train.rounds=2", "train.optimiser.lr=1e20"), tmp_path)))
    assert [each.reason for each in before] == [""]
    assert (last.status, last.round) == ("finished", 2)
    assert last.reason.startswith("the training diverged: ")


def test_a_trial_that_is_stopped_goes_on_to_the_same_bits(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny("train.rounds=4", "run.name=interrupted")
    expected = known(tiny("train.rounds=4"))
    other = _all(RunThread(_order(tiny("train.rounds=4", "run.name=other"), tmp_path)))
    run = RunThread(_order(config, tmp_path))
    first = [run.next(), run.next()]
    run.stop()  # what a scheduler's decision does
    folder = Path(config.run.dir) / "interrupted"
    assert (folder / "LATEST").read_text().startswith("000002-")
    assert (folder / "report.html").exists()
    assert not (folder / "model.safetensors").exists()
    (tmp_path / "stop").touch()  # what Ctrl-C does
    said = RunThread(_order(config, tmp_path, reported=2)).next()
    assert said.status == "interrupted"
    (tmp_path / "stop").unlink()
    rest = _all(RunThread(_order(config, tmp_path, reported=2)))
    assert _rounds([*first, *rest]) == _rounds(other)
    assert_same_bits(read_tensors(folder), expected)


def test_what_was_trained_but_not_told_is_told_without_training(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.rounds=4")
    before = _all(RunThread(_order(config, tmp_path)))
    monkeypatch.setattr("raydfl.engine.federation.Federation.round", lambda *_: pytest.fail("it trains again"))
    again = _all(RunThread(_order(config, tmp_path, reported=1)))
    assert _rounds(again) == _rounds(before)[1:]


def test_an_interruption_during_a_round_ends_after_it(tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny("train.rounds=6", "evaluate.every=3")
    run = RunThread(_order(config, tmp_path))
    assert run.next().round == 3
    (tmp_path / "stop").touch()
    said = run.next()
    assert (said.status, said.round) == ("interrupted", 3)
    assert (Path(config.run.dir) / "tiny" / "LATEST").read_text().startswith("000003-")


def test_a_failure_is_told_and_written_down(tiny: Callable[..., Config], tmp_path: Path) -> None:
    order = _order(tiny("evaluate.clients=none"), tmp_path)
    said = RunThread(order).next()
    assert said.status == "failed"
    assert said.reason.startswith("metric: validation loss is not measured; what is: ")
    assert "test model/accuracy" in said.reason
    assert "Traceback" in order.log.read_text()


def test_a_copy_goes_on_from_anothers_state_with_its_own_settings(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """A copy with unchanged settings is the undisturbed run; with another rate it shares its past, not its future."""
    parent = tiny("train.rounds=2", "run.name=parent")
    _all(RunThread(_order(parent, tmp_path)))
    past = read_tensors(Path(parent.run.dir) / "parent")
    folder = Path(parent.run.dir) / "parent"
    unchanged = tiny("train.rounds=4", "run.name=unchanged")
    branch(folder, Path(parent.run.dir) / "unchanged", unchanged)
    _all(RunThread(_order(unchanged, tmp_path)))
    assert_same_bits(read_tensors(Path(parent.run.dir) / "unchanged"), known(tiny("train.rounds=4")))
    changed = tiny("train.rounds=4", "train.optimiser.lr=0.3", "run.name=changed")
    branch(folder, Path(parent.run.dir) / "changed", changed)
    said = _all(RunThread(_order(changed, tmp_path)))
    assert said[-1].status == "finished"
    assert [each.round for each in said] == [1, 2, 3, 4]
    here = read_tensors(Path(parent.run.dir) / "changed")
    assert here != read_tensors(Path(parent.run.dir) / "unchanged")
    assert_same_bits(read_tensors(folder), past)  # the parent is untouched
    about = json.loads((Path(parent.run.dir) / "changed" / "run.json").read_text())
    assert about["branches"] == [{"run": "parent", "digest": parent.digest(), "round": 2}]
    assert about["digest"] == changed.digest()
    branch(folder, Path(parent.run.dir) / "changed", changed)  # again: it has begun, and is left as it is
    assert_same_bits(read_tensors(Path(parent.run.dir) / "changed"), here)
