"""Round times: arithmetic on artificial clocks, times recorded by a run, and their display in the report."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydfl.core.types import Ratio
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.orders import Reply, Span
from raydfl.engine.storage.record import MetricRow, read_rows, rows_path, to_rows, write_rows
from raydfl.engine.telemetry import TIMELINE, WALL, ReplyTimer, add_spans
from raydfl.runs._run import run
from raydfl.runs.progress import Progress
from raydfl.runs.report import read_run, split_round_times, write_report

Tiny = Callable[..., Config]


def make_reply(client: str = "a", waited: float = 0.0, seconds: float = 0.0, **more: Any) -> Reply:
    return Reply(0, client, waited=waited, seconds=seconds, **more)


def make_timer(*values: tuple[int, float, float, float, float]) -> ReplyTimer:
    """Return a timer with a reply of a different client for each span (fields as in ``Span``)."""
    return time_replies(make_reply(f"c{number}", span=Span(*span)) for number, span in enumerate(values))


def time_replies(replies: Iterable[Reply]) -> ReplyTimer:
    timer = ReplyTimer()
    for reply in replies:
        timer.note(reply)
    return timer


def test_transfer_time_is_split_equally_before_and_after_the_work() -> None:
    replies = add_spans([make_reply("a", 0.5, 1.0), make_reply("b", 1.5, 2.0)], actor=3, sent=100.0, answered=104.5)
    # The actor took 3.5 s of 4.5 s. The transfer took the remaining 1 s, half of it each way.
    assert [(r.span.begin, r.span.end) for r in replies if r.span] == [(101.0, 102.0), (102.0, 104.0)]
    assert {(r.span.actor, r.span.sent, r.span.answered) for r in replies if r.span} == {(3, 100.0, 104.5)}


def test_a_fast_actor_clock_gives_no_negative_times() -> None:
    replies = add_spans([make_reply("a", 0.0, 3.0), make_reply("b", 3.0, 3.0)], actor=0, sent=10.0, answered=14.0)
    for reply in replies:
        assert reply.span is not None
        assert 10.0 <= reply.span.begin <= reply.span.end <= 14.0
    timer = time_replies(replies)
    assert all(ratio.total >= 0 for ratio in timer.work(2).values())


def test_actor_time_is_the_sum_of_work_transfer_and_wait() -> None:
    # Actor 0 has two overlapping calls in 0..10 and works for 7 s; actor 1 has one in 1..5 and works for 3 s; actor 2 has none.
    timer = make_timer((0, 0.0, 1.0, 4.0, 5.0), (0, 3.0, 5.0, 9.0, 10.0), (1, 1.0, 1.5, 4.5, 5.0))
    work = timer.work(actors=3)
    assert work["transfer"] == Ratio(pytest.approx((10 - 7) + (4 - 3)), 3)  # type: ignore[arg-type]
    assert work["wait"] == Ratio(pytest.approx((10 - 4) + 10), 3)  # type: ignore[arg-type]
    computed = sum(span.end - span.begin for _, span in timer.spans)
    assert computed + work["transfer"].total + work["wait"].total == pytest.approx(3 * 10)
    # With one actor for each client, only the actors of the round count.
    assert timer.work(actors=0)["wait"] == Ratio(pytest.approx(10 - 4), 2)  # type: ignore[arg-type]


def test_a_round_without_spans_has_no_work_times() -> None:
    timer = time_replies([make_reply()])
    assert timer.work(2) == {}
    assert timer.timeline(0.0, {}).shape == (0, 4)


def test_queues_and_retries_are_counted() -> None:
    retried_replies = add_spans([make_reply("b", waited=0.25)], actor=0, sent=0.0, answered=1.0, retried={0: 2})
    timer = time_replies([make_reply("a", waited=0.25), *retried_replies])
    assert timer.queued == 0.5
    assert timer.retried == {"b": 2}


def test_the_timeline_is_sorted_by_start_and_relative_to_the_round() -> None:
    timer = make_timer((1, 0.0, 12.0, 13.0, 14.0), (0, 0.0, 11.0, 15.0, 16.0))
    np.testing.assert_array_equal(timer.timeline(10.0, {"c0": 7, "c1": 9}), [[9, 0, 1, 5], [7, 1, 2, 3]])


def read_server_rows(run_dir: Path, round_index: int) -> dict[str, MetricRow]:
    rows = to_rows(read_rows(run_dir))
    return {row.metric: row for row in rows if row.round == round_index and not row.client and row.split == "server"}


@pytest.fixture(scope="module")
def run_with_events(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], tuple[Path, list[dict[str, Any]]]]:
    def execute(config: Config) -> tuple[Path, list[dict[str, Any]]]:
        stream = io.StringIO()
        with Progress("json", stream) as progress:
            folder = run(config, progress).run_dir
        return folder, [json.loads(line) for line in stream.getvalue().splitlines()]

    return execute


def test_a_run_records_its_times(tiny: Tiny, run_with_events: Any) -> None:
    folder, events = run_with_events(tiny("train.rounds=3", "evaluate.every=2"))
    ids, shares = list(Population.load(folder / "population").ids), []
    for round_index in (1, 2, 3):
        rows = read_server_rows(folder, round_index)
        seconds = {name: rows[f"seconds/{name}"] for name in (*WALL, "round", "train_and_aggregate", "fit", "transfer")}
        parts = {name: row.value for name, row in seconds.items()}
        assert all(value >= 0 for value in parts.values())
        assert parts["plan"] + parts["clients"] + parts["aggregate"] == pytest.approx(parts["train_and_aggregate"])
        assert sum(parts[name] for name in WALL) <= parts["round"] + 1e-9
        shares.append(parts["fit"] * seconds["fit"].count / parts["clients"])
        assert rows["retried"].value == 0
        timeline = rows[TIMELINE].array
        assert timeline is not None
        assert timeline.shape == (rows["clients"].value, 4)
        trained = {
            row.client for row in to_rows(read_rows(folder)) if row.round == round_index and row.phase == "train"
        }
        assert {ids[int(index)] for index in timeline[:, 0]} == trained - {""}
        assert set(timeline[:, 1]) == {0.0}
        assert (np.diff(timeline[:, 2:].ravel()) >= 0).all()  # one after another
        assert timeline[-1, 3] <= parts["train_and_aggregate"]
    # In one process the server waits while the client works; nothing is transferred. On a busy machine a round may be interrupted.
    assert max(shares) <= 1
    assert max(shares) >= 0.5
    round_events = [event for event in events if event["event"] == "round"]
    assert [event["retried"] for event in round_events] == [0, 0, 0]
    assert round_events[1]["times"] == {
        name.removeprefix("seconds/"): row.value
        for name, row in read_server_rows(folder, 2).items()
        if name.startswith("seconds/")
    }
    # Evaluated after rounds 2 and 3.
    assert round_events[0]["times"]["evaluate"] < 0.2 * round_events[1]["times"]["evaluate"]


def test_batched_clients_appear_one_after_another_in_the_timeline(tiny: Tiny, run_with_events: Any) -> None:
    folder, _ = run_with_events(tiny("train.rounds=1", "train.together=3", "run.name=together"))
    timeline = read_server_rows(folder, 1)[TIMELINE].array
    assert timeline is not None
    assert (np.diff(timeline[:, 2:].ravel()) >= -1e-9).all()


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_the_times_in_the_report_add_up_to_the_round(tiny: Tiny, run_with_events: Any, tmp_path: Path) -> None:
    folder, _ = run_with_events(tiny("train.rounds=5", "run.name=page"))
    report = read_run(folder)
    assert sorted(report.timelines) == [3, 4, 5]
    parts = split_round_times(report)
    assert parts is not None
    rounds, seconds = parts
    np.testing.assert_array_equal(rounds, [1, 2, 3, 4, 5])
    whole = report.curves["server", "seconds/round"].values
    np.testing.assert_allclose(sum(seconds.values()), whole, rtol=1e-9)
    assert (seconds["fit"] > seconds["transfer"]).all()
    text = write_report([folder], tmp_path / "page.html").read_text()
    for shown in (
        "where the time goes",
        "who worked when",
        "round 5",
        "seconds since the start of the round",
        "other times per round",
    ):
        assert shown in text
    ids = list(Population.load(folder / "population").ids)
    assert any(f">{name}<" in text for name in ids)


@pytest.mark.usefixtures("pictures")
def test_the_report_numbers_the_clients_of_a_run_without_data(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    array = np.array([[4.0, 0.0, 0.0, 1.0]])
    write_rows(rows_path(tmp_path, 1), [MetricRow(1, "train", "", "server", TIMELINE, float("nan"), 5.0, array)])
    assert "client 4" in write_report([tmp_path], tmp_path / "page.html").read_text()


def test_earlier_metrics_tables_show_total_times(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    write_rows(rows_path(tmp_path, 1), [MetricRow(1, "train", "", "server", "seconds/round", 2.0, 1.0)])
    assert split_round_times(read_run(tmp_path)) is None
    text = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert "time per round" in text
    assert "where the time goes" not in text
