"""What becomes of a client whose code fails or that is late: run.on_error, train.deadline, train.late, run.max_failed.

The oracle of a client that is left out is a method that plans the same rounds without it: the federation ends with the same bits.
The time of deadlines is counted in optimiser steps here: each takes a second of a clock that nothing else moves.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers import differ, known

from raydfl.cluster.faults import StragglerPolicy
from raydfl.core.errors import ClientError, ConfigError
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.record import MetricRow
from raydfl.engine.telemetry import RoundReport
from raydfl.runs._replay import replay
from raydfl.runs._run import resume, run
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation
from raydfl.training import _fit as train
from raydfl.training import clock as deadline
from raydfl.training.clock import Clock, DeadlineExceededError
from raydfl.training.optimiser import Optimiser

Tiny = Callable[..., Config]
FAULTY = Path(__file__).parent / "faulty_methods.py"
FEDMLAC = (
    "models={plugin: {name: crnn_tiny, hidden: 8, filters: [4]}, local: {name: crnn_tiny, hidden: 4, filters: [4]}}"
)


def faulty(name: str) -> str:
    return f"method.name={FAULTY}:{name}"


def rows_of(config: Config) -> list[MetricRow]:
    return record.to_rows(record.read_rows(Path(config.run.dir) / str(config.run.name)))


def notes(config: Config, metric: str) -> list[tuple[int, str, str, str]]:
    """Round, phase, client and note of the single clients' rows."""
    found = [row for row in rows_of(config) if row.metric == metric and row.client]
    return [(row.round, row.phase, row.client, row.note or "") for row in found]


# -- a client's code fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "after"),
    [
        ("value", "true"),
        ("value", "false"),
        ("memory", "true"),
        ("cuda", "true"),
        ("generator", "true"),
        ("leave", "true"),
    ],
)
def test_a_client_that_raises_is_dropped_as_if_it_had_not_been_asked(tiny: Tiny, what: str, after: str) -> None:
    common = ["train.cohort=1.0", "run.on_error=drop"]
    config = tiny(*common, faulty("Fails"), f"method.what={what}", f"method.after={after}", "run.name=dropped")
    dropped = train_federation(config)
    assert_same_bits(train_federation(tiny(*common, faulty("Absent"), "run.name=absent")), dropped)
    assert differ(known(tiny(*common)), dropped)
    kind, text = {
        "value": ("ValueError", "a client's own mistake"),
        "memory": ("MemoryError", "no more"),
        "cuda": ("OutOfMemoryError", "CUDA out of memory (pretended)"),
        "generator": ("GeneratorExit", "closed"),
        "leave": ("SystemExit", "left"),
    }[what]
    ((round_, phase, client, note),) = notes(config, "failed")
    assert (round_, phase, client) == (2, "train", "s2")
    assert note.startswith(f"error: {kind}: {text} (at {FAULTY}:")
    pooled = {(row.round, row.value) for row in rows_of(config) if row.metric == "failed" and not row.client}
    assert pooled == {(1, 0.0), (2, 1.0), (3, 0.0)}


def test_its_private_state_stays_as_it_was(tiny: Tiny) -> None:
    common = ["train.cohort=1.0", "train.rounds=2", "run.on_error=drop", FEDMLAC]
    config = tiny(*common, faulty("FailsPrivately"), "run.name=dropped")
    dropped = train_federation(config)
    assert len(notes(config, "failed")) == 1
    assert_same_bits(train_federation(tiny(*common, faulty("AbsentPrivately"), "run.name=absent")), dropped)
    before = train_federation(tiny(*common, "train.rounds=1", faulty("FailsPrivately"), "run.name=before"))
    own = [name for name in before if name.startswith("client 2 ")]
    assert own
    assert all(before[name] == dropped[name] for name in own)
    assert any(before[name] != dropped[name] for name in before if name.startswith("client 1 "))


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("leave", ["sys.exit(0)", "raise GeneratorExit"])
def test_a_client_that_exits_ends_the_run_as_any_failure_does(
    tiny: Tiny, tmp_path: Path, together: int, leave: str
) -> None:
    source = tmp_path / "leaving.py"
    source.write_text(
        "import sys\n\nfrom raydfl import Method\n\n\nclass Leaving(Method):\n    def loss(self, step, batch):\n"
        f"        if step.client.id == 's2':\n            {leave}\n        return super().loss(step, batch)\n"
    )
    method = f"method.name={source}:Leaving"
    with pytest.raises(
        ClientError, match=r"'s2' failed in round 1, phase 'train': .*Exit: 0? ?\(at .*leaving.py:9\)\nInspect it with"
    ):
        train_federation(tiny(method, "train.cohort=1.0", f"train.together={together}"))


def test_one_of_a_group_that_is_trained_together_does_not_take_the_others(tiny: Tiny) -> None:
    common = ["train.cohort=1.0", "run.on_error=drop", "train.together=3"]
    config = tiny(*common, faulty("Fails"), "run.name=dropped")
    train_federation(config)
    assert [note[:3] for note in notes(config, "failed")] == [(2, "train", "s2")]
    clients = [row.value for row in rows_of(config) if row.metric == "vectorised"]
    assert clients[0] == 1.0
    assert clients[1] == pytest.approx(5 / 6)
    ours = final_state(Path(config.run.dir) / "dropped").tensors["global"]
    absent = tiny("train.cohort=1.0", faulty("Absent"), "run.name=absent")
    train_federation(absent)
    theirs = final_state(Path(absent.run.dir) / "absent").tensors["global"]
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() < 1e-5, name


def test_sending_what_is_private_drops_the_client_and_nothing_is_sent(tiny: Tiny) -> None:
    extra = Path(__file__).parent.parent / "extra_methods.py"
    config = tiny(f"method.name={extra}:Leaking", "run.on_error=drop", "run.max_failed=1.0", "train.rounds=1")
    train_federation(config)
    failed = notes(config, "failed")
    assert len(failed) == 3
    assert all("the update holds tensors that the method's shared() keeps private" in note for *_, note in failed)


def test_a_clients_error_is_recorded_without_what_steers_terminals(tiny: Tiny) -> None:
    config = tiny(faulty("Fails"), "method.what=steer", "train.cohort=1.0", "train.rounds=2", "run.on_error=drop")
    train_federation(config)
    ((*_, note),) = notes(config, "failed")
    assert note.startswith(r"error: ValueError: \x1b]0;owned\x07 \x9b2J\u202e \udcff (at ")


def test_too_many_dropped_clients_stop_the_run(tiny: Tiny) -> None:
    common = [faulty("Fails"), "train.cohort=1.0", "run.on_error=drop"]
    config = tiny(*common, "run.max_failed=0.16", "run.name=many")
    message = (
        r"(?s)round 2: 1 of 6 clients were rejected \(client 's2': error: ValueError: a client's own mistake .*run.max_failed=0.16 "
        r"allows. Fix the method, or raise run.max_failed, then resume the run. Inspect a client with: raydfl replay .* --round 2"
    )
    with pytest.raises(ClientError, match=message):
        run(config)
    assert final_state(Path(config.run.dir) / "many").round_index == 1
    assert resume(Path(config.run.dir) / "many", ["run.max_failed=0.17"]).finished


@pytest.mark.parametrize(("method", "whole"), [("Fails", 1), ("CannotEvaluate", 0)])
def test_of_a_round_with_too_many_failures_nothing_counts(tiny: Tiny, method: str, whole: int) -> None:
    """Not in the record either, when a commit follows: a run that stops in order still writes what it has."""
    config = tiny(faulty(method), "train.cohort=1.0", "run.on_error=drop", "run.max_failed=0", "run.commit_every=9")
    server = start_server(config)
    for _ in range(whole):
        server.round()
    with pytest.raises(ClientError, match="1 of 6 clients were rejected"):
        server.round()
    server.finish()
    server.close()
    assert final_state(Path(config.run.dir) / "tiny").round_index == whole
    assert {row.round for row in rows_of(config)} == set(range(1, whole + 1))


def test_a_stopped_run_may_go_on_without_the_client(tiny: Tiny) -> None:
    """Who is dropped where the run else stops changes no number of what was done before."""
    common = ["train.cohort=1.0"]
    with pytest.raises(ClientError, match="client 's2' failed in round 2, phase 'train': ValueError"):
        run(tiny(*common, faulty("Fails"), "run.name=stopped"))
    outcome = resume(Path(tiny().run.dir) / "stopped", ["run.on_error=drop"])
    assert_same_bits(
        train_federation(tiny(*common, faulty("Absent"), "run.name=absent")), read_tensors(outcome.run_dir)
    )


def test_a_dropped_client_is_replayed_with_its_error(tiny: Tiny) -> None:
    config = tiny("train.cohort=1.0", "run.on_error=drop", "run.keep=9", faulty("Fails"), "run.name=dropped")
    train_federation(config)
    with pytest.raises(ClientError, match="client 's2' failed in round 2") as caught:
        replay(Path(config.run.dir) / "dropped", 2, "s2")
    assert isinstance(caught.value.__cause__, ValueError)
    assert replay(Path(config.run.dir) / "dropped", 2, "s1").update is not None


def test_the_servers_own_mistakes_are_never_dropped(tiny: Tiny) -> None:
    extra = Path(__file__).parent.parent / "extra_methods.py"
    with pytest.raises(ClientError, match="round 1: aggregate.. of method Forgetful failed: KeyError: 'no such entry'"):
        run(tiny(f"method.name={extra}:Forgetful", "run.on_error=drop", "run.name=forgetful"))
    with pytest.raises(ClientError, match=r"the evaluation on the server's data failed in round 1.*ValueError"):
        run(tiny(faulty("CannotEvaluate"), 'method.client=""', "run.on_error=drop", "run.name=server"))


@pytest.mark.parametrize(
    ("call", "what", "when"),
    [
        ("init", "value", "before the first round"),
        ("plan", "value", "round 2"),
        ("aggregate", "value", "round 2"),
        ("aggregate", "generator", "round 2"),
        ("aggregate", "leave", "round 2"),
        ("plan_evaluation", "value", "the evaluation after round 2"),
    ],
)
def test_what_the_method_raises_at_the_server_is_said_as_for_clients(
    tiny: Tiny, call: str, what: str, when: str
) -> None:
    """In the last round too. The message names method, file and line, and the rounds before count."""
    config = tiny(faulty("FailsAtServer"), f"method.call={call}", f"method.what={what}", "train.rounds=2")
    place = rf"{when}: {call}\(\) of method FailsAtServer failed: \w+: .* \(at {FAULTY}:\d+\)"
    place += "; the last commit counts" * (call != "init")
    with pytest.raises(ClientError, match=f"(?s){place}"):
        run(config)
    if call != "init":
        assert final_state(Path(config.run.dir) / "tiny").round_index == 1


def test_a_client_that_cannot_be_evaluated_is_left_out_there(tiny: Tiny) -> None:
    common = ["train.cohort=1.0", "train.rounds=1"]
    config = tiny(*common, faulty("CannotEvaluate"), "run.on_error=drop", "run.name=unmeasured")
    assert_same_bits(known(tiny(*common)), train_federation(config))
    ((round_, phase, client, note),) = notes(config, "failed")
    assert (round_, phase, client) == (1, "evaluate", "s2")
    assert note.startswith("error: ValueError")
    measured = {row.client for row in rows_of(config) if row.split == "validation" and row.client}
    assert measured == {"s0", "s1", "s3", "s4", "s5"}
    with pytest.raises(ClientError, match=r"1 of 6 clients were rejected .*run.max_failed=0 allows. Fix the method"):
        run(tiny(*common, faulty("CannotEvaluate"), "run.on_error=drop", "run.max_failed=0", "run.name=strict"))


def test_on_error_has_two_values(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"run\.on_error: Input should be 'stop' or 'drop'"):
        tiny("run.on_error=ignore")


# -- deadlines ---------------------------------------------------------------------------------------------------------

LONGER = ("data.takes=6",)
"""Clients have clips for two or three steps."""


@pytest.fixture
def seconds_of_steps(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that an optimiser step moves by a second."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock.now))
    real = Optimiser.advance

    def advance(optimiser: Optimiser) -> None:
        real(optimiser)
        clock.now += 1.0

    monkeypatch.setattr(Optimiser, "advance", advance)
    return clock


@pytest.mark.parametrize(("method", "together"), [("fedavg", 3), ("fedmlac", 1), ("scaffold", 1)])
def test_a_deadline_that_touches_nobody_changes_nothing(tiny: Tiny, method: str, together: int) -> None:
    common = [f"train.together={together}", *LONGER, "train.cohort=1.0"]
    without = known(tiny(*common, method=method))
    config = tiny(*common, "train.deadline=1e6", "run.name=with", method=method)
    assert_same_bits(without, train_federation(config))
    assert notes(config, "late") == []
    assert {row.value for row in rows_of(config) if row.metric == "late"} == {0.0}


@pytest.mark.usefixtures("seconds_of_steps")
def test_partial_work_is_the_work_up_to_the_deadline(tiny: Tiny) -> None:
    """3.5 s: the clock is looked at before each batch, so there are four of one second each."""
    common = [*LONGER, "train.cohort=1.0", "train.local_epochs=3", "train.rounds=2"]
    config = tiny(*common, "train.deadline=3.5", "run.name=partial")
    partial = train_federation(config)
    assert_same_bits(known(tiny(*common, faulty("FirstBatches"), "method.steps=4")), partial)
    assert differ(train_federation(tiny(*common, faulty("FirstBatches"), "method.steps=3", "run.name=less")), partial)
    said = notes(config, "late")
    assert len(said) == 12
    assert {note for *_, note in said} == {"4 steps until train.deadline"}
    steps = [row.value for row in rows_of(config) if row.metric == "steps" and row.client]
    assert steps == [4.0] * 12


@pytest.mark.usefixtures("seconds_of_steps")
def test_only_clients_with_work_left_are_late(tiny: Tiny) -> None:
    """Of clients with 2 or 3 batches, a deadline of 2 s touches those with 3; drop leaves them out."""
    sizes = {row.client: row.value for row in steps_without_deadline(tiny)}
    assert set(sizes.values()) == {2.0, 3.0}
    more = sorted(client for client, steps in sizes.items() if steps == 3)
    for together in (1, 3):
        common = [*LONGER, "train.cohort=1.0", "train.rounds=1", "train.deadline=2", f"train.together={together}"]
        partial = tiny(*common, f"run.name=partial{together}")
        train_federation(partial)
        assert [client for _, _, client, _ in notes(partial, "late")] == more
        assert notes(partial, "failed") == []
        drop = tiny(*common, "train.late=drop", "run.max_failed=0.9", f"run.name=drop{together}")
        train_federation(drop)
        assert [(client, note) for _, _, client, note in notes(drop, "failed")] == [
            (client, "late: 2 steps were done at train.deadline=2 s, and train.late=drop") for client in more
        ]
        assert notes(drop, "late") == []


def steps_without_deadline(tiny: Tiny) -> list[MetricRow]:
    config = tiny(*LONGER, "train.cohort=1.0", "train.rounds=1", "run.name=sizes")
    train_federation(config)
    return [row for row in rows_of(config) if row.metric == "steps" and row.client]


@pytest.mark.usefixtures("seconds_of_steps")
def test_a_group_stops_when_it_would_have_alone(tiny: Tiny) -> None:
    """A batch of all clients of a group is a step of each, and here a second of each."""
    common = [*LONGER, "train.cohort=1.0", "train.local_epochs=2", "train.rounds=1", "train.deadline=3"]
    states = []
    for together in (1, 3):
        config = tiny(*common, f"train.together={together}", f"run.name=w{together}")
        train_federation(config)
        assert {note for *_, note in notes(config, "late")} == {"3 steps until train.deadline"}
        states.append(final_state(Path(config.run.dir) / f"w{together}").tensors["global"])
    shares = [row.value for row in rows_of(config) if row.metric == "vectorised"]
    assert shares == [1.0]
    for name, tensor in states[0].items():
        assert (tensor - states[1][name]).abs().max() < 1e-5, name


@pytest.mark.usefixtures("seconds_of_steps")
def test_a_method_that_trains_twice_has_one_deadline(tiny: Tiny) -> None:
    config = tiny(faulty("Twice"), *LONGER, "train.cohort=1.0", "train.rounds=1", "train.deadline=4", "run.name=twice")
    train_federation(config)
    done = {row.client: {} for row in rows_of(config) if row.client}  # type: dict[str, dict[str, float]]
    for row in rows_of(config):
        if row.client and row.metric in ("first", "second"):
            done[row.client][row.metric] = row.value
    assert {steps["first"] + steps["second"] for steps in done.values()} == {4.0}
    assert {steps["first"] for steps in done.values()} == {2.0, 3.0}


def test_without_a_single_step_a_client_is_left_out(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, seconds_of_steps: SimpleNamespace
) -> None:
    """Whether it is alone or in a group: one client's code takes 10 s before it begins to train."""
    real = train.fit

    def slow(step: Any, *losses: Any, **options: Any) -> Any:
        if step.client.id == "s2":
            seconds_of_steps.now += 10
        return real(step, *losses, **options)

    monkeypatch.setattr("raydfl.methods._method.fit", slow)
    absent = final_state_of(tiny(faulty("Absent"), "method.round=1", *LONGER, "train.cohort=1.0", "train.rounds=1"))
    for together in (1, 6):
        config = tiny(*LONGER, "train.cohort=1.0", "train.rounds=1", "train.deadline=5", f"train.together={together}")
        ours = final_state_of(config.model_copy(update={"run": config.run.model_copy(update={"name": f"w{together}"})}))
        assert max(float((ours[name] - absent[name]).abs().max()) for name in ours) < 1e-5
    failed = notes(config.model_copy(update={"run": config.run.model_copy(update={"name": "w6"})}), "failed")
    assert failed == [(1, "train", "s2", "late: 0 steps were done at train.deadline=5 s")]


def final_state_of(config: Config) -> Any:
    train_federation(config)
    return final_state(Path(config.run.dir) / str(config.run.name)).tensors["global"]


@pytest.mark.usefixtures("seconds_of_steps")
def test_scaffold_counts_the_steps_that_were_done(tiny: Tiny) -> None:
    """With one step each, the client's control variate is that step's gradient: the change over the learning rate."""
    common = [*LONGER, "train.cohort=1.0", "train.rounds=1", "train.optimiser.lr=0.1"]
    config = tiny(*common, "train.deadline=1", "run.name=scaffold", method="scaffold")
    server = start_server(config)
    before = {n: t.clone() for n, t in server._federation.state.tensors["global"].items()}
    server.round()
    after = server._federation.state.tensors["global"]
    server.close()
    assert len(notes(config, "late")) == 6
    for name in (name for name in before if f"control/{name}" in before):
        # The server's variate is the mean of the clients' (all took part, all were zero): the mean change by -lr.
        change = (before[name] - after[name]) / 0.1
        assert (after[f"control/{name}"] - change).abs().max() < 1e-4, name


def test_too_many_late_clients_stop_the_run(tiny: Tiny, seconds_of_steps: SimpleNamespace) -> None:
    with pytest.raises(
        ClientError, match=r"6 of 6 clients were rejected \(client 's0': late: 1 steps .*Raise train.deadline"
    ):
        run(tiny(*LONGER, "train.cohort=1.0", "train.deadline=1", "train.late=drop", "run.name=late"))


@pytest.mark.usefixtures("seconds_of_steps")
def test_steps_that_train_nothing_of_what_is_sent_do_not_count(tiny: Tiny) -> None:
    """FedMLAC's warm-up trains the local models alone: when the deadline ends it, the plug-in would be sent as it came."""
    common = [*LONGER, "train.cohort=1.0", "train.rounds=1", "run.max_failed=1.0", "train.deadline=1.5"]
    warm = tiny("method.warm_epochs=1", *common, "run.name=warm", method="fedmlac")
    run(warm)
    assert {note for *_, note in notes(warm, "failed")} == {"late: 0 steps were done at train.deadline=1.5 s"}
    cold = tiny(*common, "run.name=cold", method="fedmlac")
    run(cold)
    assert not notes(cold, "failed")


def test_a_deadline_is_part_of_what_a_run_is(tiny: Tiny) -> None:
    digests = [tiny(*o).digest() for o in ([], ["train.late=drop"], ["run.on_error=drop"], ["ray.grace=1"])]
    assert len(set(digests)) == 1
    limited = [tiny(*o).digest() for o in (["train.deadline=5"], ["train.deadline=6"])]
    limited.append(tiny("train.deadline=5", "train.late=drop").digest())
    assert len({*digests, *limited}) == 4
    for value in ("0", "-1"):
        with pytest.raises(ConfigError, match=r"train\.deadline: Input should be greater than 0"):
            tiny(f"train.deadline={value}")
    with pytest.raises(ConfigError, match=r"train\.late: Input should be 'partial' or 'drop'"):
        tiny("train.late=never")


def test_a_clock_counts_a_clients_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: time.now))
    clock = Clock(5.0)
    time.now += 50
    assert not clock.expired  # it stands
    clock.start()
    time.now += 2
    with clock.pause():
        time.now += 30  # others' turn
        with clock.run():
            time.now += 1
        time.now += 30
    time.now += 1.5
    assert not clock.expired
    clock.start()  # it goes already
    time.now += 0.5
    assert clock.expired
    with clock.pause():
        clock.cut, clock.steps = True, 1
    with pytest.raises(DeadlineExceededError, match="late: 0 steps were done at train.deadline=5 s$"), clock.pause():
        clock.steps = 0
    endless = Clock()
    endless.start()
    time.now += 1e9
    assert not endless.expired


def test_how_long_an_actor_has(tiny: Tiny) -> None:
    patience = StragglerPolicy.from_config(tiny("train.deadline=5", "ray.grace=2", "run.on_error=drop"))
    assert [patience.limit(clients) for clients in (1, 3)] == [7.0, 17.0]
    assert [patience.max_losses(retries) for retries in (0, 1, 3)] == [1, 1, 3]
    usual = StragglerPolicy.from_config(tiny())
    assert usual == StragglerPolicy(grace=30.0)
    assert usual.limit(1) == float("inf")
    assert usual.max_losses(0) == 0


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_line_of_a_round_says_who_failed_and_why(tiny: Tiny) -> None:
    stream = io.StringIO()
    run(tiny(*LONGER, "train.cohort=1.0", "run.on_error=drop", faulty("Fails")), Progress("lines", stream))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("round ")]
    assert ["failed" in line for line in lines] == [False, True, False]
    assert "5 clients" in lines[1]
    assert "1 failed (s2: error: ValueError: a client's own mistake" in lines[1]
    shown = io.StringIO()
    failed = {"a": "x" * 500, "b": "y"}
    Progress("lines", shown).round(RoundReport(1, clients=6, rejected=failed, cut={"c": 1, "d": 2, "e": 3}))
    assert f"3 late  2 failed (a: {'x' * 80})  " in shown.getvalue()


def test_records_of_older_versions_have_no_notes(tmp_path: Path) -> None:
    path = record.rows_path(tmp_path, 1)
    record.write_rows(path, [MetricRow(1, "train", "s1", "server", "failed", 1.0, 1.0, note="why")])
    assert [row.note for row in record.to_rows(record.read_rows(tmp_path))] == ["why"]
    pq.write_table(pq.read_table(path).drop_columns(["note"]).replace_schema_metadata(None), path)
    record.write_rows(record.rows_path(tmp_path, 2), [MetricRow(2, "train", "", "server", "failed", 0.0, 1.0)])
    assert [(row.round, row.note) for row in record.to_rows(record.read_rows(tmp_path))] == [(1, None), (2, None)]
    record.compact(tmp_path)
    read = record.to_rows(record.read_rows(tmp_path))
    assert [dataclasses.replace(row, array=None) for row in read] == [
        MetricRow(1, "train", "s1", "server", "failed", 1.0, 1.0),
        MetricRow(2, "train", "", "server", "failed", 0.0, 1.0),
    ]


def test_the_report_lists_who_was_left_out_and_why(tiny: Tiny) -> None:
    outcome = run(tiny(*LONGER, "train.cohort=1.0", "run.on_error=drop", faulty("Fails"), "run.name=reported"))
    page = (outcome.run_dir / "report.html").read_text()
    assert "1 incident: a client was excluded from a round, or stopped by the deadline" in page
    assert re.search(r"<td>2</td><td>train</td><td>s2</td><td>failed</td><td[^>]*>error: ValueError: a client", page)
    untouched = run(tiny("run.name=untouched"))
    assert "stopped by the deadline" not in (untouched.run_dir / "report.html").read_text()
