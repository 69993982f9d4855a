"""Policies for failed and late clients: run.on_error, train.deadline, train.late, run.max_failed.

Oracle for a dropped client: a method that plans the same rounds without this client ends with the same bits.
Deadlines use a fake clock: each optimiser step takes one second.
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


def select_method(name: str) -> str:
    return f"method.name={FAULTY}:{name}"


def read_metrics(config: Config) -> list[MetricRow]:
    return record.to_rows(record.read_rows(Path(config.run.dir) / str(config.run.name)))


def read_notes(config: Config, metric: str) -> list[tuple[int, str, str, str]]:
    """Return round, phase, client and note of each client's row."""
    client_rows = [row for row in read_metrics(config) if row.metric == metric and row.client]
    return [(row.round, row.phase, row.client, row.note or "") for row in client_rows]


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
def test_a_client_that_raises_is_dropped_as_if_not_selected(tiny: Tiny, what: str, after: str) -> None:
    common = ["train.cohort=1.0", "run.on_error=drop"]
    config = tiny(*common, select_method("Fails"), f"method.what={what}", f"method.after={after}", "run.name=dropped")
    dropped = train_federation(config)
    assert_same_bits(train_federation(tiny(*common, select_method("Absent"), "run.name=absent")), dropped)
    assert differ(known(tiny(*common)), dropped)
    kind, text = {
        "value": ("ValueError", "a client's own mistake"),
        "memory": ("MemoryError", "no more"),
        "cuda": ("OutOfMemoryError", "CUDA out of memory (pretended)"),
        "generator": ("GeneratorExit", "closed"),
        "leave": ("SystemExit", "left"),
    }[what]
    ((round_, phase, client, note),) = read_notes(config, "failed")
    assert (round_, phase, client) == (2, "train", "s2")
    assert note.startswith(f"error: {kind}: {text} (at {FAULTY}:")
    pooled = {(row.round, row.value) for row in read_metrics(config) if row.metric == "failed" and not row.client}
    assert pooled == {(1, 0.0), (2, 1.0), (3, 0.0)}


def test_the_private_state_of_a_failed_client_is_unchanged(tiny: Tiny) -> None:
    common = ["train.cohort=1.0", "train.rounds=2", "run.on_error=drop", FEDMLAC]
    config = tiny(*common, select_method("FailsPrivately"), "run.name=dropped")
    dropped = train_federation(config)
    assert len(read_notes(config, "failed")) == 1
    assert_same_bits(train_federation(tiny(*common, select_method("AbsentPrivately"), "run.name=absent")), dropped)
    before = train_federation(tiny(*common, "train.rounds=1", select_method("FailsPrivately"), "run.name=before"))
    own = [name for name in before if name.startswith("client 2 ")]
    assert own
    assert all(before[name] == dropped[name] for name in own)
    assert any(before[name] != dropped[name] for name in before if name.startswith("client 1 "))


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("leave", ["sys.exit(0)", "raise GeneratorExit"])
def test_a_client_that_exits_ends_the_run_like_a_failure(tiny: Tiny, tmp_path: Path, together: int, leave: str) -> None:
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


def test_a_failed_client_does_not_affect_its_group(tiny: Tiny) -> None:
    common = ["train.cohort=1.0", "run.on_error=drop", "train.together=3"]
    config = tiny(*common, select_method("Fails"), "run.name=dropped")
    train_federation(config)
    assert [note[:3] for note in read_notes(config, "failed")] == [(2, "train", "s2")]
    clients = [row.value for row in read_metrics(config) if row.metric == "vectorised"]
    assert clients[0] == 1.0
    assert clients[1] == pytest.approx(5 / 6)
    actual = final_state(Path(config.run.dir) / "dropped").tensors["global"]
    absent = tiny("train.cohort=1.0", select_method("Absent"), "run.name=absent")
    train_federation(absent)
    expected = final_state(Path(absent.run.dir) / "absent").tensors["global"]
    for name, tensor in actual.items():
        assert (tensor - expected[name]).abs().max() < 1e-5, name


def test_a_client_that_sends_private_tensors_is_dropped(tiny: Tiny) -> None:
    extra = Path(__file__).parent.parent / "extra_methods.py"
    config = tiny(f"method.name={extra}:Leaking", "run.on_error=drop", "run.max_failed=1.0", "train.rounds=1")
    train_federation(config)
    failed = read_notes(config, "failed")
    assert len(failed) == 3
    assert all("the update holds tensors that the method's shared() keeps private" in note for *_, note in failed)


def test_a_clients_error_is_recorded_without_control_characters(tiny: Tiny) -> None:
    config = tiny(
        select_method("Fails"), "method.what=steer", "train.cohort=1.0", "train.rounds=2", "run.on_error=drop"
    )
    train_federation(config)
    ((*_, note),) = read_notes(config, "failed")
    assert note.startswith(r"error: ValueError: \x1b]0;owned\x07 \x9b2J\u202e \udcff (at ")


def test_too_many_dropped_clients_stop_the_run(tiny: Tiny) -> None:
    common = [select_method("Fails"), "train.cohort=1.0", "run.on_error=drop"]
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
def test_a_round_with_too_many_failures_is_discarded(tiny: Tiny, method: str, whole: int) -> None:
    """The round is missing from the metrics table too, although an orderly stop writes pending rows."""
    config = tiny(
        select_method(method), "train.cohort=1.0", "run.on_error=drop", "run.max_failed=0", "run.commit_every=9"
    )
    server = start_server(config)
    for _ in range(whole):
        server.round()
    with pytest.raises(ClientError, match="1 of 6 clients were rejected"):
        server.round()
    server.finish()
    server.close()
    assert final_state(Path(config.run.dir) / "tiny").round_index == whole
    assert {row.round for row in read_metrics(config)} == set(range(1, whole + 1))


def test_a_stopped_run_may_resume_without_the_client(tiny: Tiny) -> None:
    """Dropping the client does not change earlier rounds."""
    common = ["train.cohort=1.0"]
    with pytest.raises(ClientError, match="client 's2' failed in round 2, phase 'train': ValueError"):
        run(tiny(*common, select_method("Fails"), "run.name=stopped"))
    outcome = resume(Path(tiny().run.dir) / "stopped", ["run.on_error=drop"])
    assert_same_bits(
        train_federation(tiny(*common, select_method("Absent"), "run.name=absent")), read_tensors(outcome.run_dir)
    )


def test_a_dropped_client_is_replayed_with_its_error(tiny: Tiny) -> None:
    config = tiny("train.cohort=1.0", "run.on_error=drop", "run.keep=9", select_method("Fails"), "run.name=dropped")
    train_federation(config)
    with pytest.raises(ClientError, match="client 's2' failed in round 2") as caught:
        replay(Path(config.run.dir) / "dropped", 2, "s2")
    assert isinstance(caught.value.__cause__, ValueError)
    assert replay(Path(config.run.dir) / "dropped", 2, "s1").update is not None


def test_errors_at_the_server_are_never_dropped(tiny: Tiny) -> None:
    extra = Path(__file__).parent.parent / "extra_methods.py"
    with pytest.raises(ClientError, match="round 1: aggregate.. of method Forgetful failed: KeyError: 'no such entry'"):
        run(tiny(f"method.name={extra}:Forgetful", "run.on_error=drop", "run.name=forgetful"))
    with pytest.raises(ClientError, match=r"the evaluation on the server's data failed in round 1.*ValueError"):
        run(tiny(select_method("CannotEvaluate"), 'method.client=""', "run.on_error=drop", "run.name=server"))


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
def test_a_methods_errors_at_the_server_are_reported_as_for_clients(
    tiny: Tiny, call: str, what: str, when: str
) -> None:
    """This includes the last round. The message names method, file and line, and earlier rounds are kept."""
    config = tiny(select_method("FailsAtServer"), f"method.call={call}", f"method.what={what}", "train.rounds=2")
    place = rf"{when}: {call}\(\) of method FailsAtServer failed: \w+: .* \(at {FAULTY}:\d+\)"
    place += "; the last commit counts" * (call != "init")
    with pytest.raises(ClientError, match=f"(?s){place}"):
        run(config)
    if call != "init":
        assert final_state(Path(config.run.dir) / "tiny").round_index == 1


def test_a_client_with_a_failed_evaluation_is_dropped_from_evaluation(tiny: Tiny) -> None:
    common = ["train.cohort=1.0", "train.rounds=1"]
    config = tiny(*common, select_method("CannotEvaluate"), "run.on_error=drop", "run.name=unmeasured")
    assert_same_bits(known(tiny(*common)), train_federation(config))
    ((round_, phase, client, note),) = read_notes(config, "failed")
    assert (round_, phase, client) == (1, "evaluate", "s2")
    assert note.startswith("error: ValueError")
    measured = {row.client for row in read_metrics(config) if row.split == "validation" and row.client}
    assert measured == {"s0", "s1", "s3", "s4", "s5"}
    with pytest.raises(ClientError, match=r"1 of 6 clients were rejected .*run.max_failed=0 allows. Fix the method"):
        run(tiny(*common, select_method("CannotEvaluate"), "run.on_error=drop", "run.max_failed=0", "run.name=strict"))


def test_on_error_has_two_values(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"run\.on_error: Input should be 'stop' or 'drop'"):
        tiny("run.on_error=ignore")


# -- deadlines ---------------------------------------------------------------------------------------------------------

LONGER = ("data.takes=6",)
"""Clients have clips for two or three steps."""


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Advance a fake clock by one second per optimiser step."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock.now))
    real = Optimiser.advance

    def advance(optimiser: Optimiser) -> None:
        real(optimiser)
        clock.now += 1.0

    monkeypatch.setattr(Optimiser, "advance", advance)
    return clock


@pytest.mark.parametrize(("method", "together"), [("fedavg", 3), ("fedmlac", 1), ("scaffold", 1)])
def test_an_unreached_deadline_changes_nothing(tiny: Tiny, method: str, together: int) -> None:
    common = [f"train.together={together}", *LONGER, "train.cohort=1.0"]
    without = known(tiny(*common, method=method))
    config = tiny(*common, "train.deadline=1e6", "run.name=with", method=method)
    assert_same_bits(without, train_federation(config))
    assert read_notes(config, "late") == []
    assert {row.value for row in read_metrics(config) if row.metric == "late"} == {0.0}


@pytest.mark.usefixtures("step_clock")
def test_partial_work_ends_at_the_deadline(tiny: Tiny) -> None:
    """The clock is checked before each batch, so 3.5 s allow four batches of one second."""
    common = [*LONGER, "train.cohort=1.0", "train.local_epochs=3", "train.rounds=2"]
    config = tiny(*common, "train.deadline=3.5", "run.name=partial")
    partial = train_federation(config)
    assert_same_bits(known(tiny(*common, select_method("FirstBatches"), "method.steps=4")), partial)
    assert differ(
        train_federation(tiny(*common, select_method("FirstBatches"), "method.steps=3", "run.name=less")), partial
    )
    output = read_notes(config, "late")
    assert len(output) == 12
    assert {note for *_, note in output} == {"4 steps until train.deadline"}
    steps = [row.value for row in read_metrics(config) if row.metric == "steps" and row.client]
    assert steps == [4.0] * 12


@pytest.mark.usefixtures("step_clock")
def test_only_clients_with_work_left_are_late(tiny: Tiny) -> None:
    """A deadline of 2 s affects clients with 3 batches, not clients with 2. `drop` excludes the late clients."""
    sizes = {row.client: row.value for row in count_steps_without_deadline(tiny)}
    assert set(sizes.values()) == {2.0, 3.0}
    more = sorted(client for client, steps in sizes.items() if steps == 3)
    for together in (1, 3):
        common = [*LONGER, "train.cohort=1.0", "train.rounds=1", "train.deadline=2", f"train.together={together}"]
        partial = tiny(*common, f"run.name=partial{together}")
        train_federation(partial)
        assert [client for _, _, client, _ in read_notes(partial, "late")] == more
        assert read_notes(partial, "failed") == []
        drop = tiny(*common, "train.late=drop", "run.max_failed=0.9", f"run.name=drop{together}")
        train_federation(drop)
        assert [(client, note) for _, _, client, note in read_notes(drop, "failed")] == [
            (client, "late: 2 steps were done at train.deadline=2 s, and train.late=drop") for client in more
        ]
        assert read_notes(drop, "late") == []


def count_steps_without_deadline(tiny: Tiny) -> list[MetricRow]:
    config = tiny(*LONGER, "train.cohort=1.0", "train.rounds=1", "run.name=sizes")
    train_federation(config)
    return [row for row in read_metrics(config) if row.metric == "steps" and row.client]


@pytest.mark.usefixtures("step_clock")
def test_a_group_stops_like_its_clients_alone(tiny: Tiny) -> None:
    """A batch of a group is one step, and one second, for each of its clients."""
    common = [*LONGER, "train.cohort=1.0", "train.local_epochs=2", "train.rounds=1", "train.deadline=3"]
    states = []
    for together in (1, 3):
        config = tiny(*common, f"train.together={together}", f"run.name=w{together}")
        train_federation(config)
        assert {note for *_, note in read_notes(config, "late")} == {"3 steps until train.deadline"}
        states.append(final_state(Path(config.run.dir) / f"w{together}").tensors["global"])
    shares = [row.value for row in read_metrics(config) if row.metric == "vectorised"]
    assert shares == [1.0]
    for name, tensor in states[0].items():
        assert (tensor - states[1][name]).abs().max() < 1e-5, name


@pytest.mark.usefixtures("step_clock")
def test_a_method_that_trains_twice_has_one_deadline(tiny: Tiny) -> None:
    config = tiny(
        select_method("Twice"), *LONGER, "train.cohort=1.0", "train.rounds=1", "train.deadline=4", "run.name=twice"
    )
    train_federation(config)
    done = {row.client: {} for row in read_metrics(config) if row.client}  # type: dict[str, dict[str, float]]
    for row in read_metrics(config):
        if row.client and row.metric in ("first", "second"):
            done[row.client][row.metric] = row.value
    assert {steps["first"] + steps["second"] for steps in done.values()} == {4.0}
    assert {steps["first"] for steps in done.values()} == {2.0, 3.0}


def test_a_client_without_a_single_step_is_dropped(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, step_clock: SimpleNamespace
) -> None:
    """One client takes 10 s before its training starts, alone or in a group."""
    real = train.fit

    def slow(step: Any, *losses: Any, **options: Any) -> Any:
        if step.client.id == "s2":
            step_clock.now += 10
        return real(step, *losses, **options)

    monkeypatch.setattr("raydfl.methods._method.fit", slow)
    absent = train_to_final_state(
        tiny(select_method("Absent"), "method.round=1", *LONGER, "train.cohort=1.0", "train.rounds=1")
    )
    for together in (1, 6):
        config = tiny(*LONGER, "train.cohort=1.0", "train.rounds=1", "train.deadline=5", f"train.together={together}")
        actual = train_to_final_state(
            config.model_copy(update={"run": config.run.model_copy(update={"name": f"w{together}"})})
        )
        assert max(float((actual[name] - absent[name]).abs().max()) for name in actual) < 1e-5
    failed = read_notes(config.model_copy(update={"run": config.run.model_copy(update={"name": "w6"})}), "failed")
    assert failed == [(1, "train", "s2", "late: 0 steps were done at train.deadline=5 s")]


def train_to_final_state(config: Config) -> Any:
    train_federation(config)
    return final_state(Path(config.run.dir) / str(config.run.name)).tensors["global"]


@pytest.mark.usefixtures("step_clock")
def test_scaffold_counts_completed_steps(tiny: Tiny) -> None:
    """After one step, a client's control variate is the gradient: the change divided by the learning rate."""
    common = [*LONGER, "train.cohort=1.0", "train.rounds=1", "train.optimiser.lr=0.1"]
    config = tiny(*common, "train.deadline=1", "run.name=scaffold", method="scaffold")
    server = start_server(config)
    before = {n: t.clone() for n, t in server._federation.state.tensors["global"].items()}
    server.round()
    after = server._federation.state.tensors["global"]
    server.close()
    assert len(read_notes(config, "late")) == 6
    for name in (name for name in before if f"control/{name}" in before):
        # All clients took part with zero variates, so the server's variate is the mean change divided by -lr.
        change = (before[name] - after[name]) / 0.1
        assert (after[f"control/{name}"] - change).abs().max() < 1e-4, name


def test_too_many_late_clients_stop_the_run(tiny: Tiny, step_clock: SimpleNamespace) -> None:
    with pytest.raises(
        ClientError, match=r"6 of 6 clients were rejected \(client 's0': late: 1 steps .*Raise train.deadline"
    ):
        run(tiny(*LONGER, "train.cohort=1.0", "train.deadline=1", "train.late=drop", "run.name=late"))


@pytest.mark.usefixtures("step_clock")
def test_steps_without_effect_on_the_payload_do_not_count(tiny: Tiny) -> None:
    """FedMLAC's warm-up trains only local models. A deadline within it would return the plug-in unchanged."""
    common = [*LONGER, "train.cohort=1.0", "train.rounds=1", "run.max_failed=1.0", "train.deadline=1.5"]
    warm = tiny("method.warm_epochs=1", *common, "run.name=warm", method="fedmlac")
    run(warm)
    assert {note for *_, note in read_notes(warm, "failed")} == {"late: 0 steps were done at train.deadline=1.5 s"}
    cold = tiny(*common, "run.name=cold", method="fedmlac")
    run(cold)
    assert not read_notes(cold, "failed")


def test_a_deadline_is_in_the_digest(tiny: Tiny) -> None:
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
    assert not clock.expired  # the clock is paused
    clock.start()
    time.now += 2
    with clock.pause():
        time.now += 30  # other clients work
        with clock.run():
            time.now += 1
        time.now += 30
    time.now += 1.5
    assert not clock.expired
    clock.start()  # the clock is running already
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


def test_patience_with_an_actor_follows_the_deadline(tiny: Tiny) -> None:
    patience = StragglerPolicy.from_config(tiny("train.deadline=5", "ray.grace=2", "run.on_error=drop"))
    assert [patience.limit(clients) for clients in (1, 3)] == [7.0, 17.0]
    assert [patience.max_losses(retries) for retries in (0, 1, 3)] == [1, 1, 3]
    usual = StragglerPolicy.from_config(tiny())
    assert usual == StragglerPolicy(grace=30.0)
    assert usual.limit(1) == float("inf")
    assert usual.max_losses(0) == 0


# -- messages ---------------------------------------------------------------------------------------------------------


def test_the_line_of_a_round_names_failed_clients_and_reasons(tiny: Tiny) -> None:
    stream = io.StringIO()
    run(tiny(*LONGER, "train.cohort=1.0", "run.on_error=drop", select_method("Fails")), Progress("lines", stream))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("round ")]
    assert ["failed" in line for line in lines] == [False, True, False]
    assert "5 clients" in lines[1]
    assert "1 failed (s2: error: ValueError: a client's own mistake" in lines[1]
    shown = io.StringIO()
    failed = {"a": "x" * 500, "b": "y"}
    Progress("lines", shown).round(RoundReport(1, clients=6, rejected=failed, cut={"c": 1, "d": 2, "e": 3}))
    assert f"3 late  2 failed (a: {'x' * 80})  " in shown.getvalue()


def test_metrics_tables_of_older_versions_have_no_notes(tmp_path: Path) -> None:
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


def test_the_report_lists_dropped_clients_and_reasons(tiny: Tiny) -> None:
    outcome = run(tiny(*LONGER, "train.cohort=1.0", "run.on_error=drop", select_method("Fails"), "run.name=reported"))
    page = (outcome.run_dir / "report.html").read_text()
    assert "1 incident: a client was excluded from a round, or stopped by the deadline" in page
    assert re.search(r"<td>2</td><td>train</td><td>s2</td><td>failed</td><td[^>]*>error: ValueError: a client", page)
    untouched = run(tiny("run.name=untouched"))
    assert "stopped by the deadline" not in (untouched.run_dir / "report.html").read_text()
