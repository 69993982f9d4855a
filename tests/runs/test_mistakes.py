"""Predictions of the test clips and the players in the report. Oracles: the run's accuracy, and the data set's samples."""

from __future__ import annotations

import base64
import csv
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from commands import Raydfl
from PIL import Image

from raydfl.core.errors import RaydflError
from raydfl.engine.config import Config
from raydfl.runs._run import run
from raydfl.runs.inference import mistakes
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.mistakes import show_mistakes

Tiny = Callable[..., Config]


def test_the_report_plays_the_worst_mistakes(raydfl: Raydfl, tiny: Tiny) -> None:
    config = tiny("data.test_takes=5", "train.rounds=2", method="fedavg")
    result = run(config)
    assert "<audio" not in (result.run_dir / "report.html").read_text()
    assert raydfl("predict", result.run_dir, "--test").code == 0
    with (result.run_dir / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    wrong = [row for row in rows if row["label"] != row["predicted"]]
    assert len(rows) == 6 * 3 * 5
    assert (len(rows) - len(wrong)) / len(rows) == result.scores["test model/accuracy"]
    assert len(wrong) > 12
    assert rows[: len(wrong)] == wrong, "mistakes come first"
    probabilities = [float(row["probability"]) for row in wrong]
    assert probabilities == sorted(probabilities, reverse=True)
    page = (result.run_dir / "report.html").read_text()
    sounds = re.findall(r'<audio controls preload="none" src="data:audio/wav;base64,([^"]+)">', page)
    assert len(sounds) == 12
    images = re.findall(
        r'<img width="160" height="48" alt="spectrogram, 0 to [^"]+ kHz, [^"]+ s" src="data:image/png;base64,([^"]+)">',
        page,
    )
    assert len(images) == 12
    assert all(Image.open(io.BytesIO(base64.b64decode(image))).size == (160, 48) for image in images)
    assert f"{len(wrong)} of 90 test clips have a wrong prediction" in page
    assert "Speakers with the lowest accuracy: " in page
    dataset = config.data.source.open()
    clips = {row["clip"]: row for row in dataset.manifest().to_pylist()}
    for row, sound in zip(wrong, sounds, strict=False):
        samples, rate = dataset.read(clips[row["clip"]])
        heard, heard_rate = soundfile.read(io.BytesIO(base64.b64decode(sound)))
        assert heard_rate == rate
        np.testing.assert_allclose(heard, samples.reshape(len(samples), -1)[:, 0].clip(-1, 1), atol=1e-4)


def test_names_in_the_table_are_escaped_and_large_recordings_are_links(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path
) -> None:
    folder = run(tiny("train.rounds=1", method="fedavg")).run_dir
    (folder / "mistakes").mkdir()
    (folder / "mistakes" / "00.wav").write_bytes(bytes(3 << 20))
    (folder / "predictions.csv").write_text(
        "clip,group,label,predicted,probability,recording\n<b>.wav,<i>,yes,no,0.9,00.wav\nb.wav,anna,no,no,0.9,\n"
    )
    assert raydfl("report", folder, "--out", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert '<a href="mistakes/00.wav">00.wav</a>' in page
    assert "&lt;b&gt;.wav" in page
    assert "Speakers with the lowest accuracy: &lt;i&gt; 0 % of 1, anna 100 % of 1." in page
    assert "<b>.wav" not in page


def test_a_spectrogram_shows_a_tone_at_its_time_and_frequency(tmp_path: Path) -> None:
    """A tone at half of the highest frequency in the first half of the recording: bright pixels in the middle row, left."""
    (tmp_path / "mistakes").mkdir()
    time = np.arange(8000) / 8000
    soundfile.write(tmp_path / "mistakes/00.wav", np.sin(2 * np.pi * 2000 * time) * (time < 0.5), 8000)
    (tmp_path / "predictions.csv").write_text(
        "clip,group,label,predicted,probability,recording\na.wav,,yes,no,0.9,00.wav\n"
    )
    section = show_mistakes(RunRecord(tmp_path, {}, {}, {}, {}, {}))
    (cell,) = [cell for cell in section.rows[0] if "<img" in cell]
    assert 'alt="spectrogram, 0 to 4 kHz, 1.00 s"' in cell
    image = Image.open(io.BytesIO(base64.b64decode(re.findall(r"base64,([^\"]+)", cell)[0]))).convert("RGB")
    brightness = np.asarray(image).astype(int).sum(axis=2)
    assert abs(int(brightness[:, :70].sum(axis=1).argmax()) - 24) <= 1
    assert brightness[:, 90:].max() == brightness.min()


def test_a_run_without_test_clips_is_reported(raydfl: Raydfl, tiny: Tiny) -> None:
    folder = run(tiny("train.rounds=1", "data.split.test=null", method="fedavg")).run_dir
    raydfl("predict", folder, "--test").refuses("has no test clips at the server")


def decide_trials(monkeypatch: pytest.MonkeyPatch, cosines: list[float], same: str) -> tuple[Any, ...]:
    """Decide trials of clip 0 with each other clip. ``same`` has a letter for each trial: s or d."""
    unit = np.array([[1.0, 0.0], *([cosine, math.sqrt(1 - cosine**2)] for cosine in cosines)])
    others = np.arange(1, len(unit))
    truth = np.array([letter == "s" for letter in same])
    monkeypatch.setattr(mistakes, "answer_clips", lambda model, test: (np.arange(len(unit)), unit))
    trials = SimpleNamespace(list_trials=lambda test, first: (np.zeros_like(others), others, truth))
    model = SimpleNamespace(objective=trials, description="model of runs/a")
    return mistakes._verify(model, SimpleNamespace(clips=np.arange(len(unit))))  # type: ignore[arg-type]


def test_trials_are_decided_at_the_threshold_of_equal_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the threshold 0.5, one of five trials of each kind is wrong: that with 0.5, and that with 0.3."""
    cosines = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    _, truth, predicted, probabilities, errors = decide_trials(monkeypatch, cosines, "ssssddsddd")
    wrong = [index for index in range(10) if truth[index] != predicted[index]]
    assert wrong == [4, 6]
    np.testing.assert_allclose(probabilities, cosines)
    np.testing.assert_allclose(errors, [0, 0, 0, 0, 0, 0, 0.2, 0, 0, 0], atol=1e-9)


def test_a_diverged_verification_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RaydflError, match="^model of runs/a: .* not finite, because its training diverged. Lower"):
        decide_trials(monkeypatch, [0.5, math.nan], "sd")


def test_clips_of_a_trial_keep_their_duration_at_different_rates() -> None:
    """A tone of 500 Hz for 1 s at 8 kHz, and again at 16 kHz, with 0.5 s between them."""
    tones = [(np.sin(2 * np.pi * 500 * np.arange(rate) / rate)[:, None], rate) for rate in (8000, 16000)]
    samples, rate = mistakes._join_sounds(tones)
    assert (len(samples), rate) == (20000, 8000)
    np.testing.assert_allclose(samples[12500:19500], tones[0][0][500:7500, 0], atol=0.01)


def test_a_table_of_trials_has_a_heading_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunRecord, "headline", "eer")
    trial = "a.wav and b.wav,,same speaker,different speakers,0.1234,"
    (tmp_path / "predictions.csv").write_text(f"clip,group,label,predicted,probability,recording\n{trial}\n")
    section = show_mistakes(RunRecord(tmp_path, {}, {}, {}, {}, {}))
    assert section.headings == ("listen", "spectrogram", "trial", "truth", "prediction", "cosine")
    assert section.rows == [("", "", "a.wav and b.wav", "same speaker", "different speakers", "0.123")]
    assert section.hint.startswith("1 of the 1 trials in predictions.csv has a wrong decision")
