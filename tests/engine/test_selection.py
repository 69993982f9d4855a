"""Best round and early stopping by a scripted metric, so that the expected rounds can be counted by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import safetensors

from raydfl.cluster.server import Server
from raydfl.core.errors import ConfigError, InputError
from raydfl.engine.best_round import find_best
from raydfl.engine.config import Config
from raydfl.engine.phases import Phases
from raydfl.engine.selection import Selection
from raydfl.engine.settings import BestSettings, RunSettings, StopSettings
from raydfl.engine.storage import RunStore
from raydfl.engine.storage.private import PrivateStore
from raydfl.runs import Result, resume, run
from raydfl.runs.folder import create
from raydfl.runs.inference import load_model
from raydfl.runs.progress import Progress
from raydfl.runs.report import read_run
from raydfl.testing import assert_same_bits, read_tensors, start_server, to_bytes

Tiny = Callable[..., Config]
HERE = Path(__file__).resolve().parents[1]
SCRIPT = "[0, .1, .3, .5, .5, null, .4, .45, .9]"
"""Metric after rounds 0 to 8. Round 3 is the best up to round 7; a tie, a NaN and two worse values follow it."""
EXCLUDED = ("round", "extra")


def make_config(tiny: Tiny, *overrides: str, script: str = SCRIPT, kind: str = "Scripted") -> Config:
    few = ["data.speakers=4", "data.takes=2", "train.cohort=2", "evaluate.client_test_clips=0"]
    rounds = ["train.rounds=8", "run.keep=1", "run.commit_every=4", *few]
    return tiny(f"method={{name: '{HERE / 'scripted.py'}:{kind}', script: {script}}}", *rounds, *overrides)


STOPPING = ["run.best=accuracy", "run.stop={metric: validation model/accuracy, patience: 3}"]


def test_training_ends_with_the_goal_and_continues_without_it(tiny: Tiny) -> None:
    """Any loss is below 99, so the first evaluation reaches the goal. A stopped run does nothing when it is resumed."""
    config = tiny("evaluate.every=2", "train.rounds=5", "run.stop={metric: test model/loss, goal: 99}")
    first = run(config)
    assert (first.round, first.finished) == (2, True)
    assert re.fullmatch(r"test model/loss \S+ reaches the goal 99", first.ended)
    assert resume(first.run_dir).round == 2
    assert resume(first.run_dir, ["run.stop=null"]).round == 5


def read_model(path: Path) -> dict[str, bytes]:
    with safetensors.safe_open(path, "pt") as file:
        return {name: to_bytes(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def select_rounds(values: Sequence[float], metric: str = "test m/loss", **stop: float) -> list[tuple[int, bool]]:
    """Return the best round and the decision to stop after each evaluation."""
    settings = RunSettings(best=BestSettings(metric=metric), stop=StopSettings(metric=metric, **stop))  # type: ignore[arg-type]
    selection = Selection.from_settings(settings, Phases(), "m", "accuracy", "validation", "some")
    results = []
    for round_number, value in enumerate(values, 1):
        selection = selection.update(round_number, "", {metric: value})
        assert selection.best is not None
        results.append((selection.best.round, bool(selection.reason)))
    return results


def test_the_best_round_and_the_stop_agree_with_a_count_by_hand() -> None:
    nan, inf = math.nan, math.inf
    # A loss should fall. Ties, NaN and infinity are no improvement.
    assert [best for best, _ in select_rounds([3, 2, 2, nan, -inf, 1])] == [1, 2, 2, 2, 2, 6]
    assert [best for best, _ in select_rounds([3, 2, 4, 5], "test m/accuracy_client_mean")] == [1, 1, 3, 4]
    assert [best for best, _ in select_rounds([nan, nan])] == [0, 0]
    # Gains below min_delta update the best round without resetting the patience. Only 3 and 1.9 reset it.
    assert select_rounds([3, 2.5, 2.1, 1.9, 1.8], patience=2, min_delta=1.0) == [
        (1, False),
        (2, False),
        (3, True),
        (4, False),
        (5, False),
    ]
    assert [stops for _, stops in select_rounds([nan, nan, nan], patience=2)] == [False, True, True]
    # The first value that reaches the goal ends the training: a loss from above, an accuracy from below.
    assert [stops for _, stops in select_rounds([3, nan, 2, 2.5], goal=2)] == [False, False, True, True]
    assert [stops for _, stops in select_rounds([0.5, 0.8, 0.7], "test m/accuracy", goal=0.75)] == [False, True, True]
    # A phase that ends early moves all later phases forward.
    assert Phases(("a", "b", "c"), (0, 10, 15)).end("a", 4) == Phases(("a", "b", "c"), (0, 4, 9))


@pytest.mark.slow
def test_a_run_stops_early_and_keeps_the_best_round_even_if_killed(tiny: Tiny) -> None:
    config = make_config(tiny, *STOPPING)
    folder = Path(config.run.dir) / "tiny"
    outcome = run(config)
    assert outcome.best is not None
    assert (outcome.round, outcome.best.round, outcome.status) == (6, 3, "finished")
    assert outcome.ended == "no better validation model/accuracy since round 3"

    # The best round equals the end of a three-round run, including private state, although one commit is kept.
    short = make_config(tiny, "train.rounds=3", "run.name=three")
    run(short)
    assert read_model(folder / "model-best.safetensors") == read_model(
        Path(short.run.dir) / "three" / "model.safetensors"
    )
    best = find_best(folder, config)
    assert best is not None
    private = PrivateStore(folder / "private")
    expected_tensors = read_tensors(Path(short.run.dir) / "three")
    assert len(best.commit.private)
    for index, ref in best.commit.private.items():
        assert {
            f"client {index} {name}": to_bytes(t) for name, t in private.read(ref).items()
        }.items() <= expected_tensors.items()
    with safetensors.safe_open(folder / "model-best.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["round"] == "3"
    assert json.loads(metadata["best"])["value"] == pytest.approx(0.5)

    # A killed and resumed run stops in the same round with the same bits.
    for done in (3, 5):
        killed = make_config(tiny, *STOPPING, f"run.name=killed-{done}")
        server = start_server(killed)
        for _ in range(done):
            server.round()
        server.close()
        resumed = resume(Path(killed.run.dir) / f"killed-{done}")
        assert (resumed.round, resumed.ended) == (6, outcome.ended)
        assert_same_bits(read_tensors(folder), read_tensors(resumed.run_dir))
        assert read_model(resumed.run_dir / "model-best.safetensors") == read_model(folder / "model-best.safetensors")

    # A loaded model states its round; the last round is the default.
    client = f"s{next(iter(best.commit.private))}"
    assert load_model(folder, client=client, best=True).round == 3
    assert "chosen by validation" in load_model(folder, client=client, best=True).description
    assert load_model(folder, client=client).round == 6
    with pytest.raises(InputError, match=r"keeps no best round, because run.best was not set"):
        load_model(Path(short.run.dir) / "three", client=client, best=True)
    page = (folder / "report.html").read_text()
    assert "Stopped in round 6 of 8: no better validation model/accuracy since round 3." in page
    assert "not finished" not in page
    assert read_run(folder).incidents == []

    # Resuming the stopped run does nothing. With more patience, a better round replaces the best one.
    before = read_tensors(folder)
    assert resume(folder, ["train.rounds=9"]).round == 6
    assert_same_bits(before, read_tensors(folder))
    longer = resume(folder, ["train.rounds=8", "run.stop.patience=5"])
    assert longer.best is not None
    assert (longer.round, longer.best.round, longer.ended) == (8, 8, "")
    assert RunStore(folder).rounds() == [8]


def test_selecting_by_the_test_set_is_reported(tiny: Tiny) -> None:
    config = tiny("run.best={metric: test model/loss}", "train.rounds=2")
    outcome: Result = run(config)
    assert outcome.best is not None
    assert "chosen by the test" in outcome.best.text
    assert "chosen by the test" in (outcome.run_dir / "report.html").read_text()
    assert outcome.best.value == min(read_run(outcome.run_dir).curves["test", "model/loss"].values)


TWO = ["train.rounds=6", "train.phases.first.rounds=3", "run.best=accuracy"]


def read_phase_state(folder: Path, round_index: int) -> dict[str, bytes]:
    """Return the state of a run after a round, without the round number and the extra state."""
    tensors_by_name = read_tensors(folder)
    assert tensors_by_name["round"] == str(round_index).encode()
    return {name: value for name, value in tensors_by_name.items() if name not in EXCLUDED}


def test_a_phase_may_start_from_the_best_round_of_the_previous_phase(tiny: Tiny) -> None:
    def train_rounds(rounds: int, name: str, *overrides: str) -> Path:
        config = make_config(tiny, *TWO, *overrides, f"run.name={name}", script="[0, .1, .5, .2, .3]", kind="InPhases")
        server = Server(create(config, Progress("quiet")), config)
        while server.round_index < rounds:
            server.round()
        server.finish()
        server.close()
        return Path(config.run.dir) / name

    begin = "train.phases.second.begin=best"
    after_two, after_three = train_rounds(2, "two"), train_rounds(3, "best", begin)
    assert_same_bits(read_phase_state(after_two, 2), read_phase_state(after_three, 3))  # including private state
    train_rounds(6, "best", begin)
    whole = train_rounds(6, "whole", begin)
    assert_same_bits(read_phase_state(after_three, 6), read_phase_state(whole, 6))
    from_last_round = read_phase_state(train_rounds(6, "last"), 6)
    assert from_last_round != read_phase_state(whole, 6)


def test_stopping_a_phase_early_equals_configuring_fewer_rounds(tiny: Tiny) -> None:
    script = "[0, .5, .4, .3, .2, .3, .2]"

    def run_in_phases(name: str, *overrides: str) -> Result:
        settings = ["train.rounds=7", "train.phases.second.optimiser.lr=0.02", f"run.name={name}"]
        return run(make_config(tiny, *settings, *overrides, script=script, kind="InPhases"))

    stopping = ["run.stop={patience: 2}", "train.phases.first.rounds=5"]
    stopped = run_in_phases("stopped", *stopping)  # the phases stop after rounds 3 (best: 1) and 7 (best: 5)
    configured = run_in_phases("configured", "train.phases.first.rounds=3")
    assert stopped.round == 7
    assert stopped.ended == "no better validation model/accuracy since round 5"
    assert_same_bits(read_tensors(configured.run_dir), read_tensors(stopped.run_dir))
    faster = ["train.rounds=7", "train.phases.second.optimiser.lr=0.02", *stopping, "run.name=killed"]
    killed = make_config(tiny, *faster, script=script, kind="InPhases")
    server = start_server(killed)
    for _ in range(5):
        server.round()
    server.close()
    assert_same_bits(read_tensors(configured.run_dir), read_tensors(resume(Path(killed.run.dir) / "killed").run_dir))
    page = (stopped.run_dir / "report.html").read_text()
    assert "phase second from round 4" in page
    # The end of a phase affects results, so patience is in the digest here.
    patient = make_config(tiny, "train.rounds=7", "train.phases.first.rounds=5", kind="InPhases")
    assert killed.digest() != patient.digest()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.stop={patience: 0}"], "run.stop.patience"),
        (["run.stop={min_delta: -1}"], "run.stop.min_delta"),
        (["run.best=acuracy"], r"run.best.mode: the direction of 'validation model/acuracy' is unknown"),
        (["run.best={}", "data.split.validation=0"], r"run.best: 'validation model/accuracy' is not measured, because clients"),
        (["run.stop={}", "evaluate.clients=none"], r"run.stop: .* because evaluate.clients is none"),
        (["run.best=test model/accuracy", "evaluate.server=false", "evaluate.clients=none"], "evaluate.server is false"),
        (["run.best=server_validation model/accuracy"], "because the server has no validation clips"),
        (["run.best={metric: {first: accuracy}}"], "no phase 'first', because it has no phases. Remove run.best.metric"),
        (["run.best={metric: {'': accuracy}}"], "has no phase '', because it has no phases. Remove run.best.metric"),
        (["train.phases={'': {rounds: 1}}"], "'' would be the only phase of method 'fedavg'. Name two or more"),
    ],
)  # fmt: skip
def test_unusable_metrics_are_rejected(tiny: Tiny, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*overrides)


def test_unmeasured_metrics_are_rejected_before_training(tiny: Tiny) -> None:
    config = tiny("run.best={metric: validation model/acuracy, mode: max}")
    with pytest.raises(ConfigError, match=r"model/acuracy' is not measured. Choose one of: .*validation model/loss"):
        run(config)
    assert not (Path(config.run.dir) / "tiny").exists()
    second = "run.best={metric: {second: validation other/accuracy}}"
    with pytest.raises(
        ConfigError, match=r"'validation other/accuracy' is not measured in phase 'second'. Choose one of"
    ):
        run(make_config(tiny, second, kind="InPhases"))
    begin = ["train.phases.second.begin=best", "train.rounds=6"]
    with pytest.raises(ConfigError, match=r"begin: best needs a metric"):
        make_config(tiny, *begin, kind="InPhases")
    with pytest.raises(ConfigError, match=r"no round of phase 'first' \(1 to 3\) is evaluated. Lower evaluate.every"):
        make_config(tiny, *begin, "run.best={}", "evaluate.every=4", kind="InPhases")
    with pytest.raises(ConfigError, match=r"'first' is the first phase"):
        make_config(tiny, "train.phases.first.begin=best", "run.best={}", kind="InPhases")


def test_actors_select_the_same_round_with_the_same_bits(tiny: Tiny, ray_session: None) -> None:
    outcomes = [
        run(make_config(tiny, *STOPPING, f"ray.actors={actors}", f"run.name=a{actors}")) for actors in (0, 1, 2)
    ]
    assert {outcome.round for outcome in outcomes} == {6}
    expected = outcomes[0].run_dir
    for outcome in outcomes[1:]:
        assert_same_bits(read_tensors(expected), read_tensors(outcome.run_dir))
        models = [read_model(folder / "model-best.safetensors") for folder in (expected, outcome.run_dir)]
        assert models[0] == models[1]
