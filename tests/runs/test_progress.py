"""Progress output of commands: one line per round, JSON, bars, or nothing."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from raydfl.core.words import format_duration, format_size
from raydfl.engine.telemetry import RoundReport
from raydfl.runs.progress import Mode, Progress, format_scores
from raydfl.runs.result import Result


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_report(index: int, **values: Any) -> RoundReport:
    given: dict[str, Any] = {"clients": 12, "bytes_down": 1_700_000, "bytes_up": 800_000} | values
    return RoundReport(index, loss=0.5, seconds={"train_and_aggregate": 3.0}, **given)


def make_result(folder: Path, **values: Any) -> Result:
    given: dict[str, Any] = {"finished": False, "scores": {"test m/accuracy": 0.75}} | values
    return Result(folder, 7, **given)


def print_run(mode: Mode, stream: io.StringIO) -> str:
    """Return the complete output of a run of two rounds."""
    clock = Clock()
    with Progress(mode, stream, clock) as progress:
        with progress.steps("features [red]", 30) as advance:
            for _ in range(30):
                advance()
        progress.start(20, 5, "fedmlac on fsdd")
        clock.now = 4.0
        progress.round(make_report(6))
        progress.message("client [bold]anna[/bold] was slow")
        clock.now = 10.0
        failed = {"s1": "lost: its actor", "s2": "late"}
        progress.round(
            make_report(7, clients=14, scores={"test m/accuracy": 0.75, "test m/loss": 0.4}, rejected=failed)
        )
        progress.finish(make_result(Path("runs/x")), 200.0, "raydfl resume x")
    return stream.getvalue()


def test_log_has_one_line_per_round() -> None:
    assert print_run("auto", io.StringIO()).splitlines() == [
        "features [red]: 30 of 30",
        "fedmlac on fsdd: 20 rounds, 5 of them done",
        "round  6/20  loss 0.5000  12 clients  4.0 clients/s  1.7 MB down  800.0 kB up  56 s left",
        "client [bold]anna[/bold] was slow",
        "round  7/20  loss 0.5000  test m/accuracy 0.750  12 clients  4.0 clients/s  2 failed (s1: lost: its actor)"
        "  1.7 MB down  800.0 kB up  1 min 5 s left",
        "stopped after 7 of 20 rounds, 3 min 20 s: test m/accuracy 0.750",
        "run directory: runs/x",
        "next: raydfl resume x",
    ]


def test_quiet_prints_nothing() -> None:
    assert print_run("quiet", io.StringIO()) == ""
    assert print_run("quiet", Terminal()) == ""


KEYS_OF_A_ROUND = [
    *("event", "round", "total", "loss", "scores", "clients", "seconds", "failed", "reasons", "late", "bytes_down"),
    *("bytes_up", "retried", "times", "clients_per_second", "seconds_left"),
]
"""Programs read them."""


def test_json_is_one_valid_object_per_line() -> None:
    lines = [json.loads(line) for line in print_run("json", io.StringIO()).splitlines()]
    assert [line["event"] for line in lines] == ["steps", "start", "round", "message", "round", "finish"]
    assert lines[0] == {"event": "steps", "description": "features [red]", "done": 30, "total": 30}
    assert lines[1]["total_rounds"] == 20
    assert lines[1]["done_rounds"] == 5
    assert lines[4]["round"] == 7
    assert lines[4]["scores"] == {"test m/accuracy": 0.75}
    assert lines[4]["clients_per_second"] == 4.0
    assert lines[4]["seconds_left"] == pytest.approx(5 * 13)  # 10 seconds for two rounds, 13 to go
    assert lines[4]["clients"] == 12
    assert lines[4]["failed"] == 2
    assert lines[4]["reasons"] == {"s1": "lost: its actor", "s2": "late"}
    assert lines[4]["seconds"] == lines[4]["times"]["train_and_aggregate"] == 3.0
    assert list(lines[4]) == KEYS_OF_A_ROUND
    assert list(lines[5]) == [
        "event",
        *["status", "round", "total", "seconds", "run_dir", "scores", "next_step", "problems"],
    ]
    assert lines[5]["run_dir"] == "runs/x"
    assert (lines[5]["round"], lines[5]["total"], lines[5]["seconds"]) == (7, 20, 200.0)
    assert lines[5]["status"] == "stopped"


def test_json_replaces_nan_by_null() -> None:
    stream = io.StringIO()
    progress = Progress("json", stream)
    progress.round(RoundReport(1, scores={"m/accuracy": math.inf}))  # not started: no time left is known either

    def refuse(name: str) -> None:
        raise AssertionError(name)

    event = json.loads(stream.getvalue(), parse_constant=refuse)
    assert event["loss"] is None
    assert event["scores"] == {"m/accuracy": None}
    assert event["seconds"] is None
    assert event["seconds_left"] is None
    assert event["clients_per_second"] is None


def test_json_on_a_terminal_is_json() -> None:
    for line in print_run("json", Terminal()).splitlines():
        json.loads(line)


def test_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    text = print_run("auto", stream)
    assert "\x1b[?25l" in text  # the cursor is hidden while the bar lives
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # and given back
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "features [red]" in plain
    assert "round 7/20  1 min 5 s left" in plain
    assert "loss 0.5000  test m/accuracy 0.750  4.0 clients/s  2 failed (s1: lost:" in plain
    assert "client [bold]anna[/bold] was slow" in plain
    assert plain.endswith("run directory: runs/x\nnext: raydfl resume x\n")


@pytest.mark.parametrize("mode", ["lines", "bar", "json"])
def test_control_characters_of_clients_are_escaped(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes characters that reverse the text direction or cannot be encoded. JSON keeps the original text."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    evil = "\x1b]0;owned\x07 \x9b2J \u202eabc \udcff \x7f\r"
    stream = Terminal() if mode == "bar" else io.StringIO()
    with Progress(mode, stream) as progress:
        progress.start(20, 0, "x")
        progress.message(evil)
        progress.round(make_report(1, rejected={"anna": evil}))
        progress.finish(make_result(Path("x"), scores={f"{evil} accuracy": 0.5}), 200.0)
    text = stream.getvalue()
    text.encode()
    assert not set(text) & set("\x07\x9b\u202e")
    assert "\x1b]" not in text
    if mode == "json":
        assert [json.loads(line) for line in text.splitlines()][1] == {"event": "message", "text": evil}
    else:
        assert text.count(r"\x1b]0;owned\x07 \x9b2J \u202eabc \udcff \x7f\r") >= 2


def test_terminal_is_restored_after_an_error() -> None:
    stream = Terminal()
    with contextlib.suppress(KeyboardInterrupt), Progress("bar", stream) as progress:
        progress.start(20, 0, "x")
        raise KeyboardInterrupt
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_steps_within_rounds_share_the_bar() -> None:
    with Progress("bar", Terminal()) as progress:
        progress.start(2, 0, "x")
        with contextlib.suppress(ValueError), progress.steps("report", None) as advance:
            advance(3)
            raise ValueError("inside")
        progress.round(RoundReport(1))
        assert progress._bar is not None
        assert [task.description for task in progress._bar.tasks] == ["x"]


def test_long_steps_are_shown_at_intervals() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress("lines", stream, clock).steps("features", 100) as advance:
        for _ in range(100):
            clock.now += 0.3
            advance()
    assert stream.getvalue().splitlines() == [
        "features: 34 of 100",
        "features: 68 of 100",
        "features: 100 of 100",
    ]


def test_steps_with_unknown_total() -> None:
    stream = io.StringIO()
    with Progress("lines", stream).steps("clips", None) as advance:
        advance(5)
        advance(2)
    assert stream.getvalue() == "clips: 7\n"


def test_first_round_without_elapsed_time() -> None:
    stream = io.StringIO()
    progress = Progress("lines", stream)
    progress.start(20, 0, "x")
    progress.round(RoundReport(1))
    progress.finish(make_result(Path("r"), finished=True, scores={}), 200.0)
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("round  1/20  loss nan  0 clients  0 B down")
    assert lines[2:] == ["finished after 7 of 20 rounds, 3 min 20 s", "run directory: r"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (90_000, "25 h 0 min"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (1.5e9, "1.5 GB"), (2e13, "20.0 TB")]
)
def test_sizes(count: float, words: str) -> None:
    assert format_size(count) == words


def test_first_scores_are_shown_without_an_accuracy() -> None:
    assert format_scores({"a/loss": 1.0, "b/own": 0.5}) == "a/loss 1.000  b/own 0.500"
    assert format_scores({}) == ""
    measured = {"a/loss_client_mean": 1.0, "a/loss": 2.0, "a/dice": 3.0, "a/loss_worst_decile": 4.0}
    assert format_scores(measured, "dice") == "a/dice 3.000"
    assert format_scores(measured, "loss") == "a/loss 2.000"
    assert format_scores(measured) == "a/loss 2.000  a/dice 3.000"
