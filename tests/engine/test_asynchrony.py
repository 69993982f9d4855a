"""Asynchronous training in virtual time (``train.fleet``), in this process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import final_state, finish_in, known, known_run, stop_after

from raydfl.cluster.server import Server
from raydfl.core.errors import ConfigError
from raydfl.data import Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.fleet import Fleet
from raydfl.engine.forecast import forecast_steps
from raydfl.engine.storage import record
from raydfl.engine.storage.store import RunStore
from raydfl.experiments.federation import VIRTUAL, read_scores
from raydfl.runs._replay import replay
from raydfl.runs.reference import configure_references
from raydfl.testing import assert_same_bits, start_server

Tiny = Callable[..., Config]
EXTRA = Path(__file__).parent.parent / "extra_methods.py"

ASYNCHRONOUS = (
    "data.speakers=8",
    "train.rounds=6",
    "evaluate.every=3",
    "train.fleet.buffer=2",
    "train.fleet.concurrency=5",
    "train.fleet.seconds.spread=1.5",
)

PACES = "data.profile={{pace: {{values: [{}]}}}}"
THIRDS = "data.profile={hours: {values: ['0-40', '40-80', '80-120']}}"
HOURS = (THIRDS, "train.fleet.hours={column: hours, period: 120}", "train.fleet.seconds={start: 9, example: 0}")
HASTE = ("train.deadline=14", "train.batch_size=4", "train.local_epochs=2")
PRIVATE = ("method.rule={name: gaussian, clip: 1.0, noise: 1.0}", "evaluate.clients=none")


def read_rows(run_dir: Path, metric: str) -> list[float]:
    """Read the server's values of a metric, by round."""
    rows = record.to_rows(record.read_rows(run_dir))
    return [row.value for row in rows if row.metric == metric and not row.client]


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedprox", "fedadam", "fedmlac"])
def test_equal_clients_without_refill_give_the_bits_of_synchronous_training(
    tiny: Tiny, method: str, together: int
) -> None:
    settings = (f"train.together={together}", "train.rounds=3")
    fleet = known(tiny(*settings, "train.fleet.buffer=null", method=method))
    assert_same_bits(known(tiny(*settings, method=method)), fleet)


def test_the_virtual_time_of_synchronous_training_is_that_of_the_slowest_clients(tiny: Tiny) -> None:
    settings = ("train.rounds=2", "train.cohort=1.0", "train.local_epochs=2", "train.fleet.seconds.start=3")
    config = tiny(*settings, "train.fleet.seconds.example=0.25", "train.fleet.seconds.down=1000")
    run_dir = known_run(config)
    largest = int(Population.load(run_dir / "population").sizes().max())
    state = final_state(run_dir)
    size = 4 * sum(tensor.numel() for tensor in state.tensors["global"].values())
    duration = 3 + 0.25 * largest * 2 + size / 1000
    assert read_rows(run_dir, "virtual_seconds") == pytest.approx([duration, 2 * duration], rel=1e-12)
    assert read_rows(run_dir, "staleness") == [0, 0]


def test_a_column_of_the_profile_gives_each_client_its_pace(tiny: Tiny) -> None:
    settings = ("data.speakers=8", PACES.format("1, 10, 100"), "train.fleet.seconds={start: pace, example: 0}")
    config = tiny(*settings, "train.fleet.buffer=8", "train.rounds=1", "train.cohort=1.0")
    assert read_rows(known_run(config), "virtual_seconds") == [100]


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [(), HASTE])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_run_resumes_after_any_step_with_clients_in_flight(tiny: Tiny, method: str, deadline: Sequence[str]) -> None:
    whole_config = tiny(*ASYNCHRONOUS, *deadline, method=method)
    whole = known(whole_config)
    assert max(read_rows(known_run(whole_config), "staleness")) > 0
    for stopped in (1, 3, 5):
        config = tiny(*ASYNCHRONOUS, *deadline, f"run.name=stopped-{stopped}", method=method)
        stop_after(config, stopped)
        run_dir = Path(config.run.dir) / config.run.name
        commit = RunStore(run_dir).newest()
        assert commit is not None
        assert commit.in_flight.fleet.flights
        assert_same_bits(whole, finish_in(run_dir, config))


def test_a_longer_run_continues_a_shorter_one_and_keeps_only_needed_versions(tiny: Tiny) -> None:
    whole = known(tiny(*ASYNCHRONOUS))
    run_dir = Path(known_run(tiny(*ASYNCHRONOUS)))
    store = RunStore(run_dir)
    needed = {file for name in store.commits() for file in store.load(name).version_files}
    assert {path.name for path in (run_dir / "private").glob("*.version")} == needed
    short = tiny(*ASYNCHRONOUS, "train.rounds=4", "run.name=short")
    stop_after(short, 4)
    config = tiny(*ASYNCHRONOUS, "run.name=short")
    assert_same_bits(whole, finish_in(Path(config.run.dir) / "short", config))


@pytest.mark.parametrize("deadline", [(), HASTE])
def test_the_replay_of_a_stale_client_is_its_update(tiny: Tiny, deadline: Sequence[str]) -> None:
    """A step with one stale client moves the model by the scaled change of its replayed update."""
    settings = (*ASYNCHRONOUS, *deadline, "train.fleet.buffer=1", "run.keep=20", "run.name=one")
    config = tiny(*settings)
    stop_after(config, 6)
    run_dir = Path(config.run.dir) / "one"
    store, stale = RunStore(run_dir), 0
    states = {name: store.load(name) for name in store.commits()}
    by_round = {commit.state.round_index: commit for commit in states.values()}
    for number in range(1, 6):
        later = {flight.number for flight in by_round[number + 1].in_flight.fleet.flights}
        before = by_round[number].in_flight.fleet.flights
        arrived = [f for f in before if f.number not in later and not f.start.lost]
        if not arrived:
            continue  # a fast client started and arrived in this step
        (flight,) = arrived
        client, staleness = flight.start.task.client_id, number - flight.version
        found = replay(run_dir, number + 1, client)
        assert found.update is not None
        factor = (1 + staleness) ** -0.5
        stale += staleness
        for name, value in found.update.tensors.items():
            base, before = (by_round[v].state.tensors["global"][name].double() for v in (flight.version, number))
            expected = before + factor * (value.double() - base)
            after = by_round[number + 1].state.tensors["global"][name]
            torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)
    assert stale > 0


@pytest.mark.slow
def test_clients_in_flight_at_the_end_of_a_phase_are_discarded(tiny: Tiny) -> None:
    """The queue keeps its time. A run resumed at the change of the phase gives the same bits."""
    settings = (
        *ASYNCHRONOUS,
        "models={audio: crnn_tiny, video: crnn_tiny}",
        "train.phases={multimodal: {rounds: 3}}",
    )
    whole_config = tiny(*settings, method="modality_mirror")
    whole = known(whole_config)
    seconds = read_rows(known_run(whole_config), "virtual_seconds")
    assert seconds == sorted(seconds)
    config = tiny(*settings, "run.name=stopped", method="modality_mirror")
    stop_after(config, 3)
    run_dir = Path(config.run.dir) / "stopped"
    commit = RunStore(run_dir).newest()
    assert commit is not None
    assert commit.in_flight.fleet == Fleet(seconds[2], commit.in_flight.fleet.started)
    assert_same_bits(whole, finish_in(run_dir, config))


def test_the_arrivals_do_not_depend_on_the_training(tiny: Tiny) -> None:
    runs = [known_run(tiny(*ASYNCHRONOUS, f"train.optimiser.lr={lr}")) for lr in (0.1, 0.01)]
    for metric in ("virtual_seconds", "staleness", "in_flight"):
        first, second = (read_rows(run_dir, metric) for run_dir in runs)
        assert first == second
        assert len(first) == 6


@pytest.mark.parametrize(
    "settings", [(), HOURS, ("train.fleet.lost=0.3", "train.fleet.seconds.down=1000"), (*HASTE, "train.late=drop")]
)
def test_a_forecast_equals_the_run(tiny: Tiny, settings: Sequence[str]) -> None:
    config = tiny(*ASYNCHRONOUS, *settings, "train.rounds=7")
    run_dir = known_run(config)
    forecast = forecast_steps(config, Population.load(run_dir / "population"))
    assert forecast.steps.tolist() == read_rows(run_dir, "virtual_seconds")
    assert (forecast.staleness.reshape(7, 2).mean(axis=1)).tolist() == read_rows(run_dir, "staleness")
    assert sum(forecast.dropped.values()) == sum(read_rows(run_dir, "dropped"))
    assert forecast.clients == 8
    # Five places are always taken, except while the hours of too few clients have begun.
    # A client that missed the deadline rests until the next step.
    always = settings != HOURS and "train.late=drop" not in settings
    assert forecast.busy == pytest.approx(5) if always else 0 < forecast.busy < 5


def test_the_share_of_slow_clients_in_a_forecast(tiny: Tiny) -> None:
    """In 36 s, three clients with 3 s arrive 12 times each, and one with 9 s four times: 4 of 40 updates."""
    settings = ("data.speakers=4", PACES.format("3, 3, 3, 9"))
    fleet = "train.fleet={buffer: 1, concurrency: 4, seconds: {start: pace, example: 0}}"
    config = tiny(*settings, fleet, "train.rounds=500", "run.stop.seconds=38")
    forecast = forecast_steps(config, Population.load(known_run(tiny(*settings)) / "population"))
    arrived = forecast.arrivals <= 36
    counts = sorted(np.bincount(forecast.arrived[arrived]).tolist())
    assert counts == [4, 12, 12, 12]
    assert forecast.share_of_slowest == pytest.approx(0.1, abs=0.01)


@pytest.mark.slow
def test_training_ends_at_a_virtual_time_and_continues_without_it(tiny: Tiny) -> None:
    """The limit is the end of the second round. This round is evaluated, although no evaluation is due."""
    settings = (*ASYNCHRONOUS, "train.rounds=12", "evaluate.every=5")
    limit = read_rows(known_run(tiny(*settings)), "virtual_seconds")[1]
    config = tiny(*settings, "run.name=limited", f"run.stop.seconds={limit}")
    server = start_server(config)
    try:
        reports = [server.round(), server.round()]
        server.finish()
    finally:
        server.close()
    assert [report.stopped for report in reports] == [
        "",
        f"the virtual time ({limit:g} s) has reached run.stop.seconds",
    ]
    assert not reports[0].scores
    assert reports[1].scores
    run_dir = Path(config.run.dir) / "limited"
    again = Server(run_dir, config)
    try:
        assert again.open()[2] == reports[1].stopped
    finally:
        again.close()
    assert_same_bits(known(tiny(*settings)), finish_in(run_dir, tiny(*settings)))


def test_neutral_options_change_no_bit(tiny: Tiny) -> None:
    neutral = ("train.fleet.lost=0.0", "train.fleet.over=1.0", "train.fleet.stale.most=1000000")
    assert_same_bits(known(tiny(*ASYNCHRONOUS)), known(tiny(*ASYNCHRONOUS, *neutral)))


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedmlac"])
def test_a_deadline_after_half_of_the_batches_gives_the_bits_of_half_of_the_epochs(
    tiny: Tiny, method: str, together: int
) -> None:
    """With one batch an epoch, every client finishes the first of two epochs in the seconds of the largest client's epoch."""
    settings = (f"train.together={together}", "train.rounds=3", "train.batch_size=64", "train.fleet.buffer=null")
    half = tiny(*settings, "train.local_epochs=1", method=method)
    expected = known(half)
    sizes = Population.load(known_run(half) / "population").sizes()
    assert sizes.max() < 2 * sizes.min()
    config = tiny(*settings, "train.local_epochs=2", f"train.deadline={sizes.max()}", method=method)
    assert_same_bits(expected, known(config))
    assert read_rows(known_run(config), "virtual_seconds") == [sizes.max() * number for number in (1, 2, 3)]


@pytest.mark.parametrize("together", [1, 3])
def test_late_clients_train_the_batches_before_the_deadline(tiny: Tiny, together: int) -> None:
    """Three clients with 1, 2 and 4 s for an example: in 30 s the slower two finish a part of their equal steps."""
    paces = (PACES.format("1, 2, 4"), "train.fleet.seconds={start: 0, example: pace}", "train.fleet.buffer=3")
    rounds = ("data.speakers=3", "train.rounds=1", "train.cohort=1.0", "train.local_epochs=2", "train.batch_size=4")
    config = tiny(*rounds, *paces, f"train.together={together}", "train.deadline=30")
    run_dir = known_run(config)
    clients = Clients(Population.load(run_dir / "population"), config)
    notes = {r.client: r.note for r in record.to_rows(record.read_rows(run_dir)) if r.metric == "late" and r.client}
    expected = {}
    for client in clients:
        size = client.num_examples
        whole, steps = 2 * size * client.profile["pace"], 2 * math.ceil(size / 4)
        if whole > 30:
            expected[client.id] = f"{math.floor(30 * steps / whole)} steps until train.deadline"
    assert notes == expected
    assert len(set(expected.values())) == 2
    assert read_rows(run_dir, "virtual_seconds") == [30]


def test_clients_are_dropped_at_a_deadline_and_not_tried_again_in_the_step(tiny: Tiny) -> None:
    """One client of three is fast enough. The two others are dropped, so a buffer of two has one update."""
    paces = (PACES.format("1, 50, 50"), "train.fleet.seconds={start: pace, example: pace}")
    settings = ("data.speakers=3", *paces, "train.rounds=2", "train.late=drop", "train.deadline=99")
    run_dir = known_run(tiny(*settings, "train.fleet.buffer=2", "train.fleet.concurrency=3"))
    reasons = [row.note for row in record.to_rows(record.read_rows(run_dir)) if row.metric == "dropped" and row.client]
    assert reasons == ["late"] * 4
    assert read_rows(run_dir, "virtual_seconds")[0] == 99 + 50
    with pytest.raises(ConfigError, match=r"in round 1 no client finishes within 0.5 virtual seconds"):
        known_run(tiny(*settings, "train.deadline=0.5", "train.fleet.buffer=2", "run.name=hopeless"))


def test_a_deadline_that_no_client_misses_changes_no_bit(tiny: Tiny) -> None:
    assert_same_bits(known(tiny(*ASYNCHRONOUS)), known(tiny(*ASYNCHRONOUS, "train.deadline=1e9")))


def test_the_first_step_after_an_interval_of_virtual_time_is_evaluated(tiny: Tiny) -> None:
    """Each of five clients takes 7 s, and a step has one. All start together, so steps end at 7 s (five), 14 s (five), 21 s."""
    settings = ("data.speakers=5", "train.fleet={buffer: 1, concurrency: 5, seconds: {start: 7, example: 0}}")
    config = tiny(*settings, "train.rounds=12", "evaluate.every={seconds: 10}")
    rows = record.to_rows(record.read_rows(known_run(config)))
    evaluated = sorted({row.round for row in rows if row.split == "test"})
    assert evaluated == [6, 11, 12]  # the first at 14 s, the first at 21 s, the last


def test_a_trial_reports_the_virtual_time_of_its_evaluations(tiny: Tiny) -> None:
    run_dir = known_run(tiny(*ASYNCHRONOUS))
    seconds = read_rows(run_dir, "virtual_seconds")
    found = {number: scores[VIRTUAL] for number, scores in read_scores(run_dir, 0).items()}
    assert found == {3: seconds[2], 6: seconds[5]}


def test_reference_runs_have_no_virtual_time(tiny: Tiny) -> None:
    settings = ("train.rounds=4", "run.reference={pooled: true, local: true}", "evaluate.every={seconds: 10}")
    config = tiny(*settings, "train.fleet.buffer=2", "train.deadline=1e6")
    for name, reference in configure_references(config, Path(config.run.dir), 6):
        assert reference.train.fleet is None, name
        assert reference.train.deadline is None
        assert reference.evaluate.every == 1


def test_clients_train_only_in_their_hours(tiny: Tiny) -> None:
    """Each client works 9 s, in its third of 120 s. So four of the 9 s fit into each third, and a fifth start is lost."""
    config = tiny("data.speakers=3", *HOURS, "train.rounds=13", "train.fleet.buffer=1", "train.fleet.concurrency=3")
    run_dir = known_run(config)
    assert read_rows(run_dir, "virtual_seconds") == [
        *(9, 18, 27, 36),
        *(49, 58, 67, 76),
        *(89, 98, 107, 116),
        129,
    ]
    reasons = [row.note for row in record.to_rows(record.read_rows(run_dir)) if row.metric == "dropped" and row.client]
    assert reasons == ["lost"] * 3


def test_permanent_hours_change_no_bit(tiny: Tiny) -> None:
    always = ("data.profile={hours: {values: ['0-50 50-120']}}", "train.fleet.hours={column: hours, period: 120}")
    assert_same_bits(known(tiny(*ASYNCHRONOUS)), known(tiny(*ASYNCHRONOUS, *always)))


@pytest.mark.parametrize("concurrency", [2, 5])
def test_a_run_with_hours_resumes_after_any_step(tiny: Tiny, concurrency: int) -> None:
    settings = (*ASYNCHRONOUS, *HOURS, f"train.fleet.concurrency={concurrency}", "train.rounds=5")
    whole = known(tiny(*settings))
    for rounds in (1, 3):
        config = tiny(*settings, f"run.name=hours{rounds}")
        stop_after(config, rounds)
        assert_same_bits(whole, finish_in(Path(config.run.dir) / f"hours{rounds}", config))


def test_hours_that_nobody_can_keep_end_the_run(tiny: Tiny) -> None:
    short = ("data.profile={hours: {values: ['0-5']}}", "train.fleet.hours={column: hours, period: 60, most: 3}")
    config = tiny(*HOURS, *short, "data.speakers=2", "train.fleet.buffer=1", "train.fleet.concurrency=2")
    with pytest.raises(ConfigError, match=r"in round 1, from second 0 to 180; lost: 's[01]', 's[01]'. Lower"):
        known_run(config)


REFERENCE = (
    "data.speakers=8",
    "train.rounds=30",
    "train.fleet.concurrency=6",
    "train.fleet.seconds.spread=1.5",
    "train.together=1",
    "method.rule=uniform_mean",
    "method.momentum=0",
)


def train_quadratic(
    config: Config,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[list[tuple[float, int]]]]:
    """Train the closed form of ``Quadratic``.

    Returns:
        The initial and the final model in float64, and the target and the staleness of each arrival of each step.
    """
    schedule = []
    with contextlib.closing(start_server(config)) as server:
        federation = server._federation
        first = {name: value.double().numpy().copy() for name, value in federation.state.tensors["global"].items()}
        for _ in range(config.train.rounds):
            orders = federation.plan()
            schedule.append([(0.1 * (1 + int(o.task.client_id.lstrip("s"))), o.staleness) for o in orders])
            federation.round()
        last = {name: value.double().numpy().copy() for name, value in federation.state.tensors["global"].items()}
    assert max(staleness for step in schedule for _, staleness in step) > 3
    return first, last, schedule


def descend(start: np.ndarray, target: float) -> np.ndarray:
    """Return the result of three steps of gradient descent, in float64."""
    model = start
    for _ in range(3):
        model = model - 0.2 * (model - target)
    return model


@pytest.mark.slow
def test_thirty_steps_equal_fedbuff(tiny: Tiny) -> None:
    """Algorithm 1 of FedBuff: w <- w + eta / K sum_k s(tau_k) (y_k - w_(t - tau_k))."""
    config = tiny(*REFERENCE, "train.fleet.buffer=3", "method.server_lr=0.7", method=f"{EXTRA}:Quadratic")
    first, last, schedule = train_quadratic(config)
    for name, start in first.items():
        states = [start]
        for number, step in enumerate(schedule):
            total = np.zeros_like(start)
            for target, staleness in step:
                base = states[number - staleness]
                total += (descend(base, target) - base) / math.sqrt(1 + staleness)
            states.append(states[-1] + 0.7 * total / len(step))
        np.testing.assert_allclose(last[name], states[-1], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_thirty_steps_equal_fedasync(tiny: Tiny) -> None:
    """Algorithm 1 of FedAsync with the polynomial staleness function: w <- (1 - a_t) w + a_t y, a_t = a (1 + tau)^-0.7."""
    settings = ("train.fleet.buffer=1", "train.fleet.mix=model", "train.fleet.stale.power=0.7", "method.server_lr=0.6")
    first, last, schedule = train_quadratic(tiny(*REFERENCE, *settings, method=f"{EXTRA}:Quadratic"))
    for name, start in first.items():
        states = [start]
        for number, ((target, staleness),) in enumerate(schedule):
            share = 0.6 * (1 + staleness) ** -0.7
            states.append((1 - share) * states[-1] + share * descend(states[number - staleness], target))
        np.testing.assert_allclose(last[name], states[-1], rtol=0, atol=1e-6)


def test_lost_and_stale_clients_are_recorded(tiny: Tiny) -> None:
    settings = ("train.fleet.lost=0.4", "train.fleet.stale.most=1", "train.fleet.buffer=1", "train.rounds=12")
    run_dir = known_run(tiny(*ASYNCHRONOUS, *settings))
    assert max(read_rows(run_dir, "staleness")) <= 1
    reasons = {row.note for row in record.to_rows(record.read_rows(run_dir)) if row.metric == "dropped" and row.client}
    assert reasons == {"lost", "stale"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.fleet.buffer=4", "train.fleet.concurrency=3"], "Raise concurrency, or lower train.fleet.buffer"),
        (["train.fleet.buffer=2", "train.fleet.concurrency=99"], "only 8 can take part"),
        (["train.fleet.buffer=2", "train.fleet.concurrency=4", "train.fleet.over=1.3"], "Remove over"),
        (["evaluate.every={seconds: 60}"], "evaluate.every.seconds is a virtual time, but train.fleet is off"),
        (["train.fleet.buffer=2", "evaluate.every={seconds: 0}"], "evaluate.every"),
        (["train.fleet.buffer=2", "train.clients.draw=poisson"], "Set train.clients.draw=fixed"),
        (["train.fleet.buffer=2", *PRIVATE], "rule gaussian cannot account"),
        (["train.fleet.buffer=2", "ray.actors=per_client"], "Set ray.actors to a number"),
        (["train.fleet.buffer=2", "train.groups=hdbscan"], "Set train.groups to none"),
        (["train.fleet.buffer=2", "train.block=2"], "train.fleet scales single updates"),
        (["train.fleet.seconds.example=0"], "Set one of them above 0"),
        (["train.fleet.lost=1.0"], "less than 1"),
        (["train.fleet.seconds.example=pace"], "train.fleet.seconds.example needs"),
        (["train.fleet.seconds.example=-1"], "greater than or equal to 0"),
        (["train.fleet.seconds.down=0"], "greater than 0"),
        (["train.fleet.seconds.down=pace", PACES.format("0, 2")], "'s[0-7]' has pace = 0. Give each client .* above 0"),
        (["train.fleet.seconds.example=pace", PACES.format("fast")], "'s0' has pace = fast. Give each .* at least 0"),
        (["train.fleet.seconds.start=pace", PACES.format("-1")], "'s0' has pace = -1"),
        (["run.stop.seconds=5"], "Set train.fleet.buffer, or remove run.stop.seconds"),
        (["train.fleet.mix=model", "method.rule=median"], "rule Median is no mean"),
        (["train.fleet.hours.column=hours"], "train.fleet.hours needs"),
        (
            ["train.fleet.hours.column=pace", PACES.format("0-9 5-12")],
            "'s0' has pace = 0-9 5-12: the spans overlap at 5",
        ),
        (["train.fleet.hours.column=pace", PACES.format("9-5")], "the span 9-5 is empty or leaves the period"),
        (["train.fleet.hours.column=pace", PACES.format("0-86401")], "the span 0-86401 is empty or leaves"),
        (["train.fleet.hours.column=pace", PACES.format("night")], "not a list of spans BEGIN-END. Give each client"),
        (["train.fleet.hours.column=pace", PACES.format("5")], "'s0' has pace = 5: it is not a list of spans"),
    ],
)
def test_bad_settings_are_rejected(tiny: Tiny, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start_server(tiny("data.speakers=8", *settings))
