"""``raydfl listen``. Oracle: ``raydfl predict`` on files that have the samples of each window."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from commands import Raydfl
from used_runs import LABELS, RATE, Finished, make_wave


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Write 1.5 s of sound."""
    wave = np.concatenate([make_wave(0, label, 0, 0.5) for label in LABELS]).astype(np.float32)
    soundfile.write(tmp_path / "long.wav", wave, RATE, subtype="FLOAT")
    return tmp_path / "long.wav", wave


def predict_windows(raydfl: Raydfl, run: Path, wave: np.ndarray, ends: list[float], window: float) -> list[Any]:
    folder = run.parent / "windows"
    folder.mkdir(exist_ok=True)
    files = []
    for end in ends:
        stop = round(end * RATE)
        files.append(folder / f"{end}.wav")
        soundfile.write(files[-1], wave[max(0, stop - round(window * RATE)) : stop], RATE, subtype="FLOAT")
    events = raydfl("predict", run, *files, "--json").events
    return [
        (end, event["label"], pytest.approx(event["probability"], abs=1e-9))
        for end, event in zip(ends, events, strict=True)
    ]


def get_answers(events: list[dict[str, Any]]) -> list[tuple[float, str, float]]:
    return [(event["seconds"], event["label"], event["probability"]) for event in events]


def test_every_window_has_the_prediction_of_predict(
    raydfl: Raydfl, mutual: Finished, recording: tuple[Path, np.ndarray]
) -> None:
    path, wave = recording
    heard = raydfl("listen", mutual.folder, "--source", path, "--step", 0.25, "--window", 0.5, "--json")
    ends = [0.5, 0.75, 1.0, 1.25, 1.5]
    assert get_answers(heard.events) == predict_windows(raydfl, mutual.folder, wave, ends, 0.5)
    lines = raydfl("listen", mutual.folder, "--source", path, "--step", 0.25, "--window", 0.5).out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        [f"{event['seconds']:.2f}", "s", event["label"]] for event in heard.events
    ]


def test_windows_end_at_multiples_of_a_step_at_any_rate(raydfl: Raydfl, mutual: Finished, tmp_path: Path) -> None:
    """At 22,050 Hz a quarter of a second has 5512.5 samples."""
    soundfile.write(tmp_path / "odd.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 22050), 22050)
    options = ("--step", 0.25, "--window", 0.5, "--json")
    events = raydfl("listen", mutual.folder, "--source", tmp_path / "odd.wav", *options).events
    assert [event["seconds"] for event in events] == [0.5, 0.75, 1.0]


def test_a_recording_below_the_window_gets_one_prediction(
    raydfl: Raydfl, mutual: Finished, recording: tuple[Path, np.ndarray]
) -> None:
    path, wave = recording
    heard = raydfl("listen", mutual.folder, "--source", path, "--window", 60, "--json")
    assert get_answers(heard.events) == predict_windows(raydfl, mutual.folder, wave, [1.5], 60)


class Stream:
    """A microphone with the samples of a wave. Ctrl-C follows the last sample."""

    def __init__(self, wave: np.ndarray) -> None:
        self.wave = wave

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read(self, size: int) -> tuple[np.ndarray, bool]:
        if not len(self.wave):
            raise KeyboardInterrupt
        chunk, self.wave = self.wave[:size, None], self.wave[size:]
        return chunk, False


@pytest.fixture
def microphone(monkeypatch: pytest.MonkeyPatch, recording: tuple[Path, np.ndarray]) -> SimpleNamespace:
    """Replace the library of the microphone."""
    library = SimpleNamespace(
        PortAudioError=type("PortAudioError", (Exception,), {}),
        query_devices=lambda kind: {"default_samplerate": float(RATE)},
        InputStream=lambda samplerate, channels, dtype: Stream(recording[1]),
    )
    monkeypatch.setitem(sys.modules, "sounddevice", library)
    return library


def test_the_microphone_has_the_predictions_of_its_recording(
    raydfl: Raydfl, mutual: Finished, recording: tuple[Path, np.ndarray], microphone: SimpleNamespace
) -> None:
    options = ("--step", 0.25, "--window", 0.5, "--json")
    heard = raydfl("listen", mutual.folder, *options)
    assert heard.code == 0
    assert heard.events == raydfl("listen", mutual.folder, "--source", recording[0], *options).events


def test_a_missing_microphone_is_reported(raydfl: Raydfl, mutual: Finished, microphone: SimpleNamespace) -> None:
    def fail(kind: str) -> dict[str, float]:
        raise microphone.PortAudioError("Error querying device -1")

    microphone.query_devices = fail
    raydfl("listen", mutual.folder).refuses("cannot be used: Error querying device -1", "--source FILE")


def test_a_missing_library_is_reported(raydfl: Raydfl, mutual: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    raydfl("listen", mutual.folder).refuses(r"pip install 'raydfl\[microphone\]'", "--source FILE")


def test_a_missing_recording_is_reported(raydfl: Raydfl, mutual: Finished, tmp_path: Path) -> None:
    raydfl("listen", mutual.folder, "--source", tmp_path / "gone.wav").refuses("gone.wav: there is no such file")
