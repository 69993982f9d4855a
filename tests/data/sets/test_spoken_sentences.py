"""Generated sentences. Oracle: GRID's grammar, written out, and the texts that eSpeak receives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from raydfl.core.errors import ConfigError
from raydfl.core.registry import build
from raydfl.data.dataset import find_dataset
from raydfl.data.sets import _espeak as espeak
from raydfl.data.sets.spoken_sentences import SpokenSentences
from raydfl.data.sets.spoken_words import SpokenWords
from raydfl.data.steps.label_sequences import LabelSequenceSettings, split_sequences

pytest.importorskip("espeakng_loader")

WORDS = [
    "bin lay place set",
    "blue green red white",
    "at by in with",
    "a b c d e f g h i j k l m n o p q r s t u v x y z",
    "zero one two three four five six seven eight nine",
    "again now please soon",
]
LONGEST = "place white with x seven again"


def test_a_speaker_says_all_words_in_25_sentences() -> None:
    rows = SpokenSentences(speakers=5, sentences=25).manifest().to_pylist()
    assert Counter(row["group"] for row in rows) == {f"speaker_{index:04d}": 25 for index in range(5)}
    assert Counter(row["split"] for row in rows) == {"train": 100, "test": 25}
    for speaker in {row["group"] for row in rows}:
        sentences = [row["label"].split(" ") for row in rows if row["group"] == speaker]
        for spoken, words in zip(zip(*sentences, strict=True), WORDS, strict=True):
            counts = Counter(spoken)
            assert sorted(counts) == sorted(words.split())
            assert max(counts.values()) - min(counts.values()) <= 1
    labels = sorted({row["label"] for row in rows})
    words_of_all = {word for words in WORDS for word in words.split()}
    assert len(words_of_all) == 51
    assert set(split_sequences(labels, LabelSequenceSettings(units="words"))[0]) == words_of_all
    assert set(split_sequences(labels, LabelSequenceSettings(units="characters"))[0]) == {
        *"abcdefghijklmnopqrstuvwxyz "
    }


def test_sentences_depend_on_seed_speaker_and_number_alone() -> None:
    def list_sentences(**options: Any) -> dict[str, str]:
        rows = SpokenSentences(**options).manifest().to_pylist()
        return {row["clip"]: row["label"] for row in rows}

    small = list_sentences(speakers=3, sentences=30)
    assert small == list_sentences(speakers=3, sentences=30)
    assert small.items() <= list_sentences(speakers=6, sentences=40, test_speakers=0.5).items()
    other = list_sentences(speakers=3, sentences=30, seed=1)
    assert small.keys() == other.keys()
    assert len(set(small.values()) & set(other.values())) < 5
    assert len(set(small.values())) > 85  # of 90


def test_speakers_are_those_of_spoken_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """eSpeak receives the labels, with the voices of the words. The letter a is spelled as its name."""
    asked: list[tuple[str, str]] = []

    def record(text: str, language: str, variant: str, **_options: Any) -> np.ndarray:
        asked.append((text, variant))
        return np.ones(1000, np.float32)

    monkeypatch.setattr(espeak, "speak", record)
    sentences, words = SpokenSentences(speakers=4, sentences=25), SpokenWords(speakers=4, words=("yes",), takes=25)
    rows, others = sentences.manifest().to_pylist(), words.manifest().to_pylist()
    assert [(row["group"], row["split"], row["take"]) for row in rows] == [
        (row["group"], row["split"], row["take"]) for row in others
    ]
    for row in rows:
        sentences.read(row)
    assert [text.replace(" eigh ", " a ") for text, _ in asked] == [row["label"] for row in rows]
    assert sum("eigh" in text.split() for text, _ in asked) == 4
    variants = [variant for _, variant in asked]
    asked.clear()
    for row in others:
        words.read(row)
    assert variants == [variant for _, variant in asked]


def test_the_slowest_voice_fits_into_a_clip() -> None:
    slowest = round(110 * 0.92)
    for variant in espeak.list_variants():
        speech = espeak.speak(LONGEST, "en-us", variant, rate=slowest)
        loud = np.flatnonzero(np.abs(speech) > 0.01 * np.abs(speech).max())
        assert loud[-1] - loud[0] < 4.9 * espeak.SAMPLE_RATE, variant


def test_clips_have_five_seconds_and_their_own_samples() -> None:
    dataset = SpokenSentences(speakers=2, sentences=2)
    rows = dataset.manifest().to_pylist()
    clips = [dataset.read(row) for row in rows]
    assert {(samples.shape, samples.dtype, rate) for samples, rate in clips} == {
        ((110250, 1), np.dtype("float32"), 22050)
    }
    assert np.array_equal(clips[0][0], dataset.read(rows[0])[0])
    assert len({samples.tobytes() for samples, _ in clips}) == len({dataset.identity(row) for row in rows}) == 4
    for options in ({"seed": 1}, {"snr_db": None}):
        other = SpokenSentences(speakers=2, sentences=2, **options)  # type: ignore[arg-type]
        assert not np.array_equal(other.read(rows[0])[0], clips[0][0])
        assert other.identity(rows[0]) != dataset.identity(rows[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speakers": 0}, "data.speakers: Input should be greater than or equal to 1"),
        ({"sentences": 0}, "data.sentences: Input should be greater than or equal to 1"),
        ({"snr_db": [30, 10]}, "snr_db must be two numbers, the lower one first"),
        ({"snr_db": [-30, 10]}, "data.snr_db.0: Input should be greater than or equal to -20"),
        ({"test_speakers": 1.0}, "data.test_speakers: Input should be less than 1"),
        ({"words": ["yes"]}, "unknown key 'words' for SpokenSentences"),
    ],
)
def test_options_out_of_range_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(find_dataset("spoken_sentences"), options, "data")
