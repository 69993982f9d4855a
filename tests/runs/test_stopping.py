"""Signals that stop long work: the first after the current step, the second at once."""

from __future__ import annotations

import io
import json
import signal
import threading
from typing import Any

import pytest

from raydfl.runs.progress import Mode, Progress
from raydfl.runs.stopping import StopSignals


class RecordingProgress(Progress):
    """Progress that records its messages."""

    def __init__(self) -> None:
        super().__init__("quiet")
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.mark.parametrize(
    ("number", "messages"),
    [
        (signal.SIGINT, "stopping (press Ctrl-C again to stop at once)"),
        (signal.SIGTERM, "stopping"),  # a job's log is no keyboard
    ],
)
def test_first_signal_requests_a_stop_and_second_interrupts(number: signal.Signals, messages: str) -> None:
    before, recorder = signal.getsignal(number), RecordingProgress()
    with StopSignals(recorder, "stopping") as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert recorder.messages == [messages]
    assert signal.getsignal(number) is before


class Pipe(io.RawIOBase):
    """Stream that raises SIGINT during the first write."""

    def __init__(self) -> None:
        self.text = ""
        self.interrupted = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.interrupted:
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        self.text += bytes(data).decode()
        return len(bytes(data))


@pytest.mark.parametrize("mode", ["json", "lines", "bar"])
def test_signal_during_a_line_prints_after_it(mode: Mode) -> None:
    pipe = Pipe()
    with io.TextIOWrapper(io.BufferedWriter(pipe)) as stream, Progress(mode, stream) as progress:
        with StopSignals(progress, "stopping") as stop:
            progress.message("one")
            assert stop.asked
            progress.message("two")
        recorder = pipe.text.splitlines()
    if mode == "json":
        recorder = [json.loads(line)["text"] for line in recorder]
    assert recorder == ["one", "stopping (press Ctrl-C again to stop at once)", "two"]


def test_the_action_of_the_first_signal_is_configurable_and_the_second_interrupts() -> None:
    done: list[str] = []
    recorder = RecordingProgress()
    with StopSignals(recorder, "runs stop", "them", lambda: done.append("file")) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert done == ["file"]
    assert recorder.messages == ["runs stop (press Ctrl-C again to stop them at once)"]


def test_other_threads_do_not_handle_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with StopSignals(RecordingProgress(), "stopping"):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    assert signal.getsignal(signal.SIGINT) is before
