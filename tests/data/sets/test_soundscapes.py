"""Soundscapes, on small files of ESC-10's layout: times, levels and recordings of the mixed events."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from raydfl.core.errors import ConfigError, DataError
from raydfl.data.sets.soundscapes import Soundscapes
from raydfl.data.steps.events import parse_events

RATE = 44_100
CLASSES = {"Bell": 500.0, "Dog": 1500.0, "Rain": 5000.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write recordings of 2 s with a tone from 0.5 s to 1.5 s, two for each class and fold."""
    folder, time = tmp_path_factory.mktemp("esc"), np.arange(2 * RATE) / RATE
    for number, (name, pitch) in enumerate(CLASSES.items(), start=1):
        (folder / f"{number:03} - {name}").mkdir()
        for fold in (1, 2):
            for take in "AB":
                wave = 0.4 * np.sin(2 * np.pi * pitch * time) * ((time >= 0.5) & (time < 1.5))
                soundfile.write(folder / f"{number:03} - {name}/{fold}-{fold}{number}-{take}.wav", wave, RATE)
    return folder


@pytest.fixture
def draw(root: Path) -> Callable[..., tuple[Soundscapes, list[dict[str, Any]]]]:
    def make(**options: Any) -> tuple[Soundscapes, list[dict[str, Any]]]:
        small = {"test_folds": (2,), "clients": 2, "clips": 8, "test_clips": 3, "polyphony": (1, 3), "seconds": 5.0}
        sounds = Soundscapes(**{"root": root, **small, **options})
        return sounds, sounds.manifest().to_pylist()

    return make


def measure(wave: np.ndarray, pitch: float) -> np.ndarray:
    """Return the amplitude of a pitch in blocks of 20 ms."""
    time = np.arange(len(wave)) / RATE
    product = wave * np.exp(-2j * np.pi * pitch * time)
    return 2 * np.abs(product[: len(product) // 882 * 882].reshape(-1, 882).mean(axis=1))


def test_events_sound_at_their_times_and_levels(draw: Any) -> None:
    sounds, rows = draw(snr_db=(10.0, 20.0))
    numbers = set()
    for row in rows:
        samples, rate = sounds.read(row)
        events = {label: (onset, offset) for onset, offset, label in parse_events(row["label"])}
        numbers.add(len(events))
        assert (samples.shape, rate) == ((5 * RATE, 1), RATE)
        assert np.abs(samples).max() <= 1
        levels = {path.split(" - ")[1].split("/")[0]: snr for path, *_, snr in json.loads(row["mix"])}
        assert levels.keys() == events.keys()
        for label, pitch in CLASSES.items():
            amplitude, time = measure(samples[:, 0], pitch), (np.arange(250) + 0.5) * 0.02
            if label not in events:
                assert amplitude.max() < 0.02
                continue
            onset, offset = events[label]
            assert 0 <= onset < offset <= 5
            assert 0.4 < offset - onset < 1.05  # at most the second of sound
            inside = (time > onset + 0.04) & (time < offset - 0.04)
            outside = (time < onset - 0.04) | (time > offset + 0.04)
            expected = np.sqrt(2) * 0.01 * 10 ** (levels[label] / 20)
            assert np.median(amplitude[inside]) == pytest.approx(expected, rel=0.15)
            assert amplitude[outside].max() < 0.02
    assert numbers == {1, 2, 3}


def test_test_and_training_share_no_recording(draw: Any) -> None:
    _, rows = draw()
    folds = {
        split: {Path(path).name[0] for row in rows if row["split"] == split for path, *_ in json.loads(row["mix"])}
        for split in ("train", "test")
    }
    assert folds == {"train": {"1"}, "test": {"2"}}
    assert [row["group"] for row in rows] == ["client-0"] * 11 + ["client-1"] * 11
    assert [row["split"] for row in rows] == (["train"] * 8 + ["test"] * 3) * 2
    assert {row["seconds"] for row in rows} == {5.0}


def test_clients_may_have_few_classes(draw: Any) -> None:
    _, rows = draw(client_classes=1, polyphony=(1, 1), clients=6)
    owned = [{row["label"].split(" ")[1] for row in rows if row["group"] == f"client-{n}"} for n in range(6)]
    assert {len(names) for names in owned} == {1}
    assert len(set.union(*owned)) > 1


def test_the_seed_decides_everything(draw: Any) -> None:
    sounds, rows = draw()
    again, same = draw()
    other, changed = draw(seed=1)
    assert same == rows
    assert [row["label"] for row in changed] != [row["label"] for row in rows]
    np.testing.assert_array_equal(sounds.read(rows[0])[0], again.read(same[0])[0])
    assert sounds.identity(rows[0]) == again.identity(same[0]) != other.identity(rows[0])
    path = Path(json.loads(rows[0]["mix"])[0][0])
    content, before = path.read_bytes(), sounds.identity(rows[0])
    try:
        path.write_bytes(content[:-2] + b"\x01\x00")
        assert sounds.identity(rows[0]) != before
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"polyphony": (2, 1)}, ConfigError, "data.polyphony: the largest value, 1, is below the least, 2"),
        ({"snr_db": (5.0, 0.0)}, ConfigError, "data.snr_db: the largest value, 0, is below the least, 5"),
        ({"polyphony": (1, 4)}, ConfigError, "need 4 classes, but a client has only 3"),
        ({"client_classes": 2}, ConfigError, "need 3 classes, but a client has only 2"),
        ({"client_classes": 5}, ConfigError, "need 5 classes, but a client has only 3"),
        ({"test_folds": (5,)}, DataError, "fold 5 of the test set has no clips"),
    ],
)
def test_contradictory_options_are_rejected(draw: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(**options)


def test_unusable_recordings_are_named(root: Path, draw: Any, tmp_path: Path) -> None:
    for name in CLASSES:
        folder = tmp_path / f"001 - {name}"
        folder.mkdir()
        for fold in (1, 2):
            soundfile.write(folder / f"{fold}-1-A.wav", np.zeros(RATE), RATE)
    with pytest.raises(DataError, match=r"-A.wav is silent"):
        draw(root=tmp_path)
    soundfile.write(tmp_path / "001 - Dog/2-1-A.wav", np.ones(8000) / 2, 8000)
    with pytest.raises(DataError, match=r"is silent|2-1-A.wav has 8000 Hz, but recordings of ESC have 44100 Hz"):
        draw(root=tmp_path)
    for path in (tmp_path / "001 - Dog").iterdir():
        path.unlink()
    soundfile.write(tmp_path / "001 - Dog/1-1-A.wav", np.ones(RATE) / 2, RATE)
    with pytest.raises(DataError, match=r"class 'Dog' has recordings in the training folds or in the test folds only"):
        draw(root=tmp_path)
