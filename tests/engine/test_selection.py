"""The best round and early stopping. Scripted metrics give expected results by hand."""

from __future__ import annotations

import json
import math
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
"""After rounds 0 to 8: round 3 is the best up to round 7; after it come a tie, a NaN and two that are worse."""
LEFT_OUT = ("round", "extra")


def make_scripted_config(tiny: Tiny, *overrides: str, script: str = SCRIPT, kind: str = "Scripted") -> Config:
    few = ["data.speakers=4", "data.takes=2", "train.cohort=2", "evaluate.client_test_clips=0"]
    rounds = ["train.rounds=8", "run.keep=1", "run.commit_every=4", *few]
    return tiny(f"method={{name: '{HERE / 'scripted.py'}:{kind}', script: {script}}}", *rounds, *overrides)


STOPPING = ["run.best=accuracy", "run.stop={metric: validation model/accuracy, patience: 3}"]


def load_tensors(path: Path) -> dict[str, bytes]:
    with safetensors.safe_open(path, "pt") as file:
        return {name: to_bytes(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def track_metrics(values: Sequence[float], metric: str = "test m/loss", **stop: float) -> list[tuple[int, bool]]:
    """Return the best round and the stop decision after each evaluation."""
    settings = RunSettings(best=BestSettings(metric=metric), stop=StopSettings(metric=metric, **stop))  # type: ignore[arg-type]
    selection = Selection.from_settings(settings, Phases(), "m", "accuracy", "validation", "some")
    found = []
    for place, value in enumerate(values, 1):
        selection = selection.update(place, "", {metric: value})
        assert selection.best is not None
        found.append((selection.best.round, bool(selection.reason)))
    return found


def test_best_round_and_stop_match_results_by_hand() -> None:
    nan, inf = math.nan, math.inf
    # Lower losses are better; ties, NaN and infinity are not.
    assert [best for best, _ in track_metrics([3, 2, 2, nan, -inf, 1])] == [1, 2, 2, 2, 2, 6]
    assert [best for best, _ in track_metrics([3, 2, 4, 5], "test m/accuracy_client_mean")] == [1, 1, 3, 4]
    assert [best for best, _ in track_metrics([nan, nan])] == [0, 0]
    # Improvements below min_delta update the best round without counting as progress: 3 does not count, 1.9 does.
    assert track_metrics([3, 2.5, 2.1, 1.9, 1.8], patience=2, min_delta=1.0) == [
        (1, False),
        (2, False),
        (3, True),
        (4, False),
        (5, False),
    ]
    assert [stops for _, stops in track_metrics([nan, nan, nan], patience=2)] == [False, True, True]
    # A phase that ends early moves all later phases forward.
    assert Phases(("a", "b", "c"), (0, 10, 15)).end("a", 4) == Phases(("a", "b", "c"), (0, 4, 9))


def test_a_run_stops_and_keeps_the_best_round_despite_kills(tiny: Tiny) -> None:
    config = make_scripted_config(tiny, *STOPPING)
    folder = Path(config.run.dir) / "tiny"
    outcome = run(config)
    assert outcome.best is not None
    assert (outcome.round, outcome.best.round, outcome.status) == (6, 3, "finished")
    assert outcome.ended == "no better validation model/accuracy since round 3"

    # The best round equals the end of a run of three rounds, with private state, although only one commit is kept.
    three = make_scripted_config(tiny, "train.rounds=3", "run.name=three")
    run(three)
    assert load_tensors(folder / "model-best.safetensors") == load_tensors(
        Path(three.run.dir) / "three" / "model.safetensors"
    )
    best = find_best(folder, config)
    assert best is not None
    private = PrivateStore(folder / "private")
    of_three = read_tensors(Path(three.run.dir) / "three")
    assert len(best.commit.private)
    for index, ref in best.commit.private.items():
        assert {
            f"client {index} {name}": to_bytes(t) for name, t in private.read(ref).items()
        }.items() <= of_three.items()
    with safetensors.safe_open(folder / "model-best.safetensors", "pt") as file:
        about = file.metadata()
    assert about["round"] == "3"
    assert json.loads(about["best"])["value"] == pytest.approx(0.5)

    # After a kill in any round, the resumed run stops in the same round with the same bits.
    for rounds_done in (3, 5):
        again = make_scripted_config(tiny, *STOPPING, f"run.name=killed-{rounds_done}")
        server = start_server(again)
        for _ in range(rounds_done):
            server.round()
        server.close()
        resumed = resume(Path(again.run.dir) / f"killed-{rounds_done}")
        assert (resumed.round, resumed.ended) == (6, outcome.ended)
        assert_same_bits(read_tensors(folder), read_tensors(resumed.run_dir))
        assert load_tensors(resumed.run_dir / "model-best.safetensors") == load_tensors(
            folder / "model-best.safetensors"
        )

    # Commands on the best round name the round; the default is the last round.
    who = f"s{next(iter(best.commit.private))}"
    assert load_model(folder, client=who, best=True).round == 3
    assert "chosen by validation" in load_model(folder, client=who, best=True).description
    assert load_model(folder, client=who).round == 6
    with pytest.raises(InputError, match=r"keeps no best round, because run.best was not set"):
        load_model(Path(three.run.dir) / "three", client=who, best=True)
    page = (folder / "report.html").read_text()
    assert "Stopped in round 6 of 8: no better validation model/accuracy since round 3." in page
    assert "not finished" not in page
    assert read_run(folder).incidents == []

    # The run is complete: resuming does nothing without more patience. With it, a better round becomes the best.
    before = read_tensors(folder)
    assert resume(folder, ["train.rounds=9"]).round == 6
    assert_same_bits(before, read_tensors(folder))
    longer = resume(folder, ["train.rounds=8", "run.stop.patience=5"])
    assert longer.best is not None
    assert (longer.round, longer.best.round, longer.ended) == (8, 8, "")
    assert RunStore(folder).rounds() == [8]


def test_selection_on_test_clips_is_reported(tiny: Tiny) -> None:
    config = tiny("run.best={metric: test model/loss}", "train.rounds=2")
    outcome: Result = run(config)
    assert outcome.best is not None
    assert "chosen by the test" in outcome.best.text
    assert "chosen by the test" in (outcome.run_dir / "report.html").read_text()
    assert outcome.best.value == min(read_run(outcome.run_dir).curves["test", "model/loss"].values)


TWO = ["train.rounds=6", "train.phases.first.rounds=3", "run.best=accuracy"]


def read_phase_state(folder: Path, round_index: int) -> dict[str, bytes]:
    """Return the state of a run after a round, without the round's number."""
    found = read_tensors(folder)
    assert found["round"] == str(round_index).encode()
    return {name: value for name, value in found.items() if name not in LEFT_OUT}


def test_a_phase_starts_from_the_best_round_of_the_previous_phase(tiny: Tiny) -> None:
    def train_rounds(rounds: int, name: str, *overrides: str) -> Path:
        config = make_scripted_config(
            tiny, *TWO, *overrides, f"run.name={name}", script="[0, .1, .5, .2, .3]", kind="InPhases"
        )
        server = Server(create(config, Progress("quiet")), config)
        while server.round_index < rounds:
            server.round()
        server.finish()
        server.close()
        return Path(config.run.dir) / name

    begin = "train.phases.second.begin=best"
    two, three = train_rounds(2, "two"), train_rounds(3, "best", begin)
    assert_same_bits(read_phase_state(two, 2), read_phase_state(three, 3))  # with the private state of the same round
    train_rounds(6, "best", begin)
    reference = train_rounds(6, "whole", begin)
    assert_same_bits(read_phase_state(three, 6), read_phase_state(reference, 6))
    others = read_phase_state(train_rounds(6, "last"), 6)
    assert others != read_phase_state(reference, 6)


def test_an_early_stop_equals_a_shorter_configured_phase(tiny: Tiny) -> None:
    script = "[0, .5, .4, .3, .2, .3, .2]"

    def run_to_end(name: str, *overrides: str) -> Result:
        own = ["train.rounds=7", "train.phases.second.optimiser.lr=0.02", f"run.name={name}"]
        return run(make_scripted_config(tiny, *own, *overrides, script=script, kind="InPhases"))

    stopping = ["run.stop={patience: 2}", "train.phases.first.rounds=5"]
    stopped = run_to_end("stopped", *stopping)  # stops after round 3 (best: round 1) and round 7 (best: round 5)
    configured = run_to_end("configured", "train.phases.first.rounds=3")
    assert stopped.round == 7
    assert stopped.ended == "no better validation model/accuracy since round 5"
    assert_same_bits(read_tensors(configured.run_dir), read_tensors(stopped.run_dir))
    faster = ["train.rounds=7", "train.phases.second.optimiser.lr=0.02", *stopping, "run.name=killed"]
    killed = make_scripted_config(tiny, *faster, script=script, kind="InPhases")
    server = start_server(killed)
    for _ in range(5):
        server.round()
    server.close()
    assert_same_bits(read_tensors(configured.run_dir), read_tensors(resume(Path(killed.run.dir) / "killed").run_dir))
    page = (stopped.run_dir / "report.html").read_text()
    assert "phase second from round 4" in page
    # The end of a phase affects results, so patience does as well.
    assert (
        killed.digest()
        != make_scripted_config(tiny, "train.rounds=7", "train.phases.first.rounds=5", kind="InPhases").digest()
    )


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
        (["train.phases={'': {rounds: 1}}"], "has no phase '', because it has no phases. Remove train.phases"),
    ],
)  # fmt: skip
def test_invalid_selection_metrics_are_rejected(tiny: Tiny, overrides: list[str], message: str) -> None:
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
        run(make_scripted_config(tiny, second, kind="InPhases"))
    begin = ["train.phases.second.begin=best", "train.rounds=6"]
    with pytest.raises(ConfigError, match=r"begin: best needs a metric"):
        make_scripted_config(tiny, *begin, kind="InPhases")
    with pytest.raises(ConfigError, match=r"no round of phase 'first' \(1 to 3\) is evaluated. Lower evaluate.every"):
        make_scripted_config(tiny, *begin, "run.best={}", "evaluate.every=4", kind="InPhases")
    with pytest.raises(ConfigError, match=r"'first' is the first phase"):
        make_scripted_config(tiny, "train.phases.first.begin=best", "run.best={}", kind="InPhases")


def test_selection_with_actors_gives_the_same_result(tiny: Tiny, ray_session: None) -> None:
    outcomes = [
        run(make_scripted_config(tiny, *STOPPING, f"ray.actors={actors}", f"run.name=a{actors}"))
        for actors in (0, 1, 2)
    ]
    assert {outcome.round for outcome in outcomes} == {6}
    for other in outcomes[1:]:
        assert_same_bits(read_tensors(outcomes[0].run_dir), read_tensors(other.run_dir))
        first, there = (outcome.run_dir / "model-best.safetensors" for outcome in (outcomes[0], other))
        assert load_tensors(first) == load_tensors(there)
