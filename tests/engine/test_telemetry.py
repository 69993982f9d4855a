"""Times of rounds: arithmetic on fake clocks, metrics of a real run, and the report."""

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


def make_spans(*observed: tuple[int, float, float, float, float]) -> ReplyTimer:
    """Make observed replies with a client each and spans (actor, sent, begin, end, answered)."""
    return observe(make_reply(f"c{number}", span=Span(*span)) for number, span in enumerate(observed))


def observe(replies: Iterable[Reply]) -> ReplyTimer:
    watch = ReplyTimer()
    for item in replies:
        watch.note(item)
    return watch


def test_work_is_centred_between_order_and_answer() -> None:
    observed = add_spans([make_reply("a", 0.5, 1.0), make_reply("b", 1.5, 2.0)], actor=3, sent=100.0, answered=104.5)
    # The actor answered 3.5 s after the call arrived. Of 1 s in transfer, half is before the work.
    assert [(r.span.begin, r.span.end) for r in observed if r.span] == [(101.0, 102.0), (102.0, 104.0)]
    assert {(r.span.actor, r.span.sent, r.span.answered) for r in observed if r.span} == {(3, 100.0, 104.5)}


def test_a_fast_clock_of_an_actor_gives_no_negative_times() -> None:
    observed = add_spans([make_reply("a", 0.0, 3.0), make_reply("b", 3.0, 3.0)], actor=0, sent=10.0, answered=14.0)
    for item in observed:
        assert item.span is not None
        assert 10.0 <= item.span.begin <= item.span.end <= 14.0
    watch = observe(observed)
    assert all(ratio.total >= 0 for ratio in watch.work(2).values())


def test_an_actors_time_is_work_transfer_and_wait() -> None:
    # Actor 0 has two overlapping calls in 0..10 and works 7 s; actor 1 has calls in 1..5 and works 3 s; actor 2 has no calls.
    watch = make_spans((0, 0.0, 1.0, 4.0, 5.0), (0, 3.0, 5.0, 9.0, 10.0), (1, 1.0, 1.5, 4.5, 5.0))
    work = watch.work(actors=3)
    assert work["transfer"] == Ratio(pytest.approx((10 - 7) + (4 - 3)), 3)  # type: ignore[arg-type]
    assert work["wait"] == Ratio(pytest.approx((10 - 4) + 10), 3)  # type: ignore[arg-type]
    computed = sum(span.end - span.begin for _, span in watch.spans)
    assert computed + work["transfer"].total + work["wait"].total == pytest.approx(3 * 10)
    # With an actor per client, only actors of the round count.
    assert watch.work(actors=0)["wait"] == Ratio(pytest.approx(10 - 4), 2)  # type: ignore[arg-type]


def test_a_round_without_spans_has_no_times() -> None:
    watch = observe([make_reply()])
    assert watch.work(2) == {}
    assert watch.timeline(0.0, {}).shape == (0, 4)


def test_queues_and_retries_are_counted() -> None:
    again = add_spans([make_reply("b", waited=0.25)], actor=0, sent=0.0, answered=1.0, retried={0: 2})
    watch = observe([make_reply("a", waited=0.25), *again])
    assert watch.queued == 0.5
    assert watch.retried == {"b": 2}


def test_the_timeline_is_in_order_of_work_and_starts_with_the_round() -> None:
    watch = make_spans((1, 0.0, 12.0, 13.0, 14.0), (0, 0.0, 11.0, 15.0, 16.0))
    np.testing.assert_array_equal(watch.timeline(10.0, {"c0": 7, "c1": 9}), [[9, 0, 1, 5], [7, 1, 2, 3]])


def read_server_rows(run_dir: Path, round_index: int) -> dict[str, MetricRow]:
    rows = to_rows(read_rows(run_dir))
    return {row.metric: row for row in rows if row.round == round_index and not row.client and row.split == "server"}


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], tuple[Path, list[dict[str, Any]]]]:
    def execute(config: Config) -> tuple[Path, list[dict[str, Any]]]:
        stream = io.StringIO()
        with Progress("json", stream) as progress:
            folder = run(config, progress).run_dir
        return folder, [json.loads(line) for line in stream.getvalue().splitlines()]

    return execute


def test_a_run_records_its_times(tiny: Tiny, run_once: Any) -> None:
    folder, events = run_once(tiny("train.rounds=3", "evaluate.every=2"))
    ids = list(Population.load(folder / "population").ids)
    for round_index in (1, 2, 3):
        rows = read_server_rows(folder, round_index)
        seconds = {name: rows[f"seconds/{name}"] for name in (*WALL, "round", "train_and_aggregate", "fit", "transfer")}
        parts = {name: row.value for name, row in seconds.items()}
        assert all(value >= 0 for value in parts.values())
        assert parts["plan"] + parts["clients"] + parts["aggregate"] == pytest.approx(parts["train_and_aggregate"])
        assert sum(parts[name] for name in WALL) <= parts["round"] + 1e-9
        # In one process the server waits while the client works, without transfers.
        assert parts["fit"] * seconds["fit"].count <= parts["clients"]
        assert parts["fit"] * seconds["fit"].count >= 0.5 * parts["clients"]
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
    output = [event for event in events if event["event"] == "round"]
    assert [event["retried"] for event in output] == [0, 0, 0]
    assert output[1]["times"] == {
        name.removeprefix("seconds/"): row.value
        for name, row in read_server_rows(folder, 2).items()
        if name.startswith("seconds/")
    }
    # Evaluated after rounds 2 and 3.
    assert output[0]["times"]["evaluate"] < 0.2 * output[1]["times"]["evaluate"]


def test_the_timeline_shows_batched_clients_in_sequence(tiny: Tiny, run_once: Any) -> None:
    folder, _ = run_once(tiny("train.rounds=1", "train.together=3", "run.name=together"))
    timeline = read_server_rows(folder, 1)[TIMELINE].array
    assert timeline is not None
    assert (np.diff(timeline[:, 2:].ravel()) >= -1e-9).all()


@pytest.mark.usefixtures("pictures")
def test_the_parts_in_the_report_sum_to_the_round(tiny: Tiny, run_once: Any, tmp_path: Path) -> None:
    folder, _ = run_once(tiny("train.rounds=5", "run.name=page"))
    observed = read_run(folder)
    assert sorted(observed.timelines) == [3, 4, 5]
    parts = split_round_times(observed)
    assert parts is not None
    rounds, seconds = parts
    np.testing.assert_array_equal(rounds, [1, 2, 3, 4, 5])
    whole = observed.curves["server", "seconds/round"].values
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
def test_the_report_of_a_run_without_data_numbers_its_clients(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    array = np.array([[4.0, 0.0, 0.0, 1.0]])
    write_rows(rows_path(tmp_path, 1), [MetricRow(1, "train", "", "server", TIMELINE, float("nan"), 5.0, array)])
    assert "client 4" in write_report([tmp_path], tmp_path / "page.html").read_text()


def test_older_metrics_tables_without_parts_show_totals(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    write_rows(rows_path(tmp_path, 1), [MetricRow(1, "train", "", "server", "seconds/round", 2.0, 1.0)])
    assert split_round_times(read_run(tmp_path)) is None
    text = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert "time per round" in text
    assert "where the time goes" not in text
