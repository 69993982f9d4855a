from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from raydfl.core.errors import ConfigError
from raydfl.core.registry import build
from raydfl.data.dataset import find_dataset
from raydfl.data.noise import draw_noise
from raydfl.data.sets import _espeak as espeak
from raydfl.data.sets.speech_commands import KEYWORDS, WORDS
from raydfl.data.sets.spoken_words import SpokenWords
from raydfl.engine.config import make_config

pytest.importorskip("espeakng_loader")


def digest_samples(samples: npt.NDArray[np.float32]) -> str:
    return hashlib.blake2b(samples.tobytes(), digest_size=8).hexdigest()


# eSpeak


ARGUMENTS = [
    (word, "en-us", variant, rate, pitch)
    for variant in ("Andrea", "caleb", "Demonic", "f1", "klatt3", "m7", "Mr serious", "Reed", "whisper")
    for word, rate, pitch in (("yes", 175, 50), ("backward", 120, 70))
]
"""Voices with flutter, roughness, echo and breath, and with noise from C's random number generator."""


def test_samples_do_not_depend_on_the_order_or_the_process() -> None:
    forward = [digest_samples(espeak.speak(*arguments)) for arguments in ARGUMENTS]
    backward = [digest_samples(espeak.speak(*arguments)) for arguments in reversed(ARGUMENTS)]
    assert backward[::-1] == forward
    assert len(set(forward)) == len(forward)
    program = (
        "import hashlib, json, sys\n"
        "from raydfl.data.sets import _espeak as espeak\n"
        "for arguments in json.loads(sys.argv[1])[::3]:\n"
        "    print(hashlib.blake2b(espeak.speak(*arguments).tobytes(), digest_size=8).hexdigest())\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, json.dumps(ARGUMENTS)], check=True, capture_output=True, text=True
    ).stdout
    assert output.split() == forward[::3]


def test_the_seed_determines_the_breath_noise() -> None:
    def digest_whisper(seed: int) -> str:
        return digest_samples(espeak.speak("yes", "en-us", "whisper", seed=seed))

    assert digest_whisper(1) == digest_whisper(1) != digest_whisper(2)


def test_samples_are_scaled_and_parameters_have_an_effect() -> None:
    speech = espeak.speak("seven", "en-us", "Andrea")
    assert speech.dtype == np.float32
    assert speech.ndim == 1
    assert 0.1 < np.abs(speech).max() <= 1.0
    slow = espeak.speak("seven", "en-us", "Andrea", rate=100)
    assert len(slow) > 1.4 * len(speech)
    assert not np.array_equal(espeak.speak("seven", "en-us", "Andrea", pitch_range=0), speech)


def test_pitch_changes_the_fundamental_frequency() -> None:
    def measure_fundamental(pitch: int) -> float:
        """Measure the fundamental frequency in Hz, by the autocorrelation of a long vowel."""
        speech = espeak.speak("aaa", "en-us", "m1", pitch=pitch)
        middle = speech[len(speech) // 2 :][:2048] * np.hanning(2048)
        correlation = np.fft.irfft(np.abs(np.fft.rfft(middle, 4096)) ** 2)
        shortest, longest = espeak.SAMPLE_RATE // 400, espeak.SAMPLE_RATE // 40
        return espeak.SAMPLE_RATE / (shortest + int(np.argmax(correlation[shortest:longest])))

    # eSpeak's pitch 0, 50 and 99 is half, once and twice the pitch of the voice. Intonation adds a constant to each.
    low, normal, high = measure_fundamental(0), measure_fundamental(50), measure_fundamental(99)
    assert 0.5 < low / normal < 0.7
    assert 1.6 < high / normal < 2.0


@pytest.mark.parametrize("language", ["en-us", "en-gb-x-rp", "vi-vn-x-central", "de", "eu", "yue-latn-jyutping"])
def test_voices_by_name_and_by_file_are_identical(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(espeak.list_variants(), key=len)
    by_file = digest_samples(espeak.speak("yes", language, longest))
    monkeypatch.setattr(espeak, "_OPENED", "/there/is/none")
    assert digest_samples(espeak.speak("yes", language, longest)) == by_file


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"has no language 'en-uk'. Did you mean 'en-u"):
        espeak.speak("yes", "en-uk", "m1")
    with pytest.raises(ConfigError, match=r"has no voice variant 'Andrew'. Did you mean 'Andrea'\?"):
        espeak.speak("yes", "en-us", "Andrew")
    with pytest.raises(ConfigError, match=r"eSpeak NG has no language 'en-usa'. Did you mean 'en-us'\?"):
        SpokenWords(languages=("de", "en-usa")).manifest()


def test_a_silent_text_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"eSpeak NG returns silence for '\.\.\.' in 'en-us'"):
        espeak.speak("...", "en-us", "m1")


@pytest.fixture
def missing_espeak(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches: list[Callable[..., Any]] = [espeak.list_languages, espeak.list_variants, espeak.get_version]
    for cached in caches:
        cached.cache_clear()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    yield
    for cached in caches:
        cached.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("missing_espeak")
def test_a_missing_package_names_the_extra_to_install() -> None:
    for call in (
        lambda: espeak.speak("yes", "en-us", "m1"),
        espeak.list_languages,
        espeak.list_variants,
        espeak.get_version,
        lambda: SpokenWords().manifest(),
    ):
        with pytest.raises(ConfigError, match=r"needs eSpeak NG\. Run pip install 'raydfl\[speech\]'"):
            call()


def test_another_user_of_the_library_in_the_process_causes_a_warning() -> None:
    espeak.speak("yes", "en-us", "m1")
    import espeakng_loader

    other = ctypes.CDLL(espeakng_loader.get_library_path())
    try:
        with pytest.warns(RuntimeWarning, match="eSpeak NG stays in memory between words"):
            espeak.speak("yes", "en-us", "m1")
    finally:
        espeak._load_c_library().dlclose(other._handle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        espeak.speak("yes", "en-us", "m1")


# The corpus


def test_the_default_corpus_has_the_documented_size() -> None:
    dataset = SpokenWords()
    manifest = dataset.manifest()
    rows = manifest.to_pylist()
    assert manifest.num_rows == 40 * 10 * 5
    assert Counter(row["label"] for row in rows) == dict.fromkeys(KEYWORDS, 200)
    assert Counter(row["group"] for row in rows) == {f"speaker_{index:04d}": 50 for index in range(40)}
    assert len({row["group"] for row in rows if row["split"] == "test"}) == 8
    assert {row["split"] for row in rows} == {"train", "test"}
    assert all(
        len({row["split"] for row in rows if row["group"] == group}) == 1 for group in ("speaker_0000", "speaker_0039")
    )
    assert {(row["path"], row["seconds"], row["language"]) for row in rows} == {(None, 1.0, "en-us")}
    first = rows[0]
    assert (first["clip"], first["label"], first["take"]) == ("speaker_0000/yes/0", "yes", 0)


def test_clips_have_the_chosen_length() -> None:
    dataset = SpokenWords(speakers=3, takes=1, seconds=0.8)
    for row in dataset.manifest().to_pylist():
        samples, rate = dataset.read(row)
        assert (samples.shape, samples.dtype, rate) == ((17640, 1), np.float32, 22050)
        assert 0.03 < np.abs(samples).max() < 1.0
    assert row["seconds"] == pytest.approx(0.8)


def test_long_speech_is_cut_to_the_clip() -> None:
    dataset = SpokenWords(speakers=1, words=("an extraordinarily long sentence about nothing",), takes=1, snr_db=None)
    samples, _ = dataset.read(dataset.manifest().to_pylist()[0])
    assert samples.shape == (22050, 1)
    assert np.abs(samples[-2000:]).max() > 0
    assert np.abs(samples[:2000]).max() > 0


@pytest.fixture(scope="module")
def small() -> tuple[SpokenWords, list[dict[str, Any]], list[str]]:
    dataset = SpokenWords(speakers=6, takes=2, words=("yes", "no", "backward"))
    rows = dataset.manifest().to_pylist()
    return dataset, rows, [digest_samples(dataset.read(row)[0]) for row in rows]


def test_all_clips_differ(small: tuple[SpokenWords, list[dict[str, Any]], list[str]]) -> None:
    dataset, rows, digests = small
    assert len(set(digests)) == len({dataset.identity(row) for row in rows}) == 36


def test_clips_do_not_depend_on_the_reading_order(small: tuple[SpokenWords, list[dict[str, Any]], list[str]]) -> None:
    dataset, rows, digests = small
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    assert [digest_samples(dataset.read(rows[index])[0]) for index in order] == [digests[index] for index in order]


def test_clips_do_not_depend_on_the_rest_of_the_corpus(
    small: tuple[SpokenWords, list[dict[str, Any]], list[str]],
) -> None:
    dataset, rows, digests = small
    larger = SpokenWords(speakers=9, takes=3, words=("up", "yes", "no", "backward"), test_speakers=0.5)
    assert dataset.manifest().column("group")[0] == larger.manifest().column("group")[0]
    larger_rows = {row["clip"]: row for row in larger.manifest().to_pylist()}
    for row, expected in zip(rows, digests, strict=True):
        assert digest_samples(larger.read(larger_rows[row["clip"]])[0]) == expected
        assert larger.identity(larger_rows[row["clip"]]) == dataset.identity(row)


@pytest.mark.parametrize("options", [{"seed": 1}, {"snr_db": (0.0, 5.0)}, {"snr_db": None}, {"seconds": 1.2}])
def test_options_that_change_the_samples_change_the_identity(
    small: tuple[SpokenWords, list[dict[str, Any]], list[str]], options: dict[str, Any]
) -> None:
    dataset, rows, digests = small
    other = SpokenWords(speakers=6, takes=2, words=("yes", "no", "backward"), **options)
    assert digest_samples(other.read(rows[0])[0]) != digests[0]
    assert other.identity(rows[0]) != dataset.identity(rows[0])
    assert espeak.get_version() in dataset.identity(rows[0])


def test_the_label_can_be_the_language() -> None:
    """Clips and samples are unchanged, only the label differs."""
    languages = ("en-us", "de", "fr", "es", "it", "ru")
    words = SpokenWords(speakers=24, words=("computer", "radio"), takes=1, languages=languages)
    spoken = dataclasses.replace(words, label="language")
    rows, others = words.manifest().to_pylist(), spoken.manifest().to_pylist()
    assert {row["label"] for row in others} == set(languages)
    for row, other in zip(rows[:6], others[:6], strict=True):
        assert (other["label"], other["word"], other["clip"]) == (row["language"], row["label"], row["clip"])
        assert np.array_equal(spoken.read(other)[0], words.read(row)[0])
        assert spoken.identity(other) == words.identity(row)


def test_the_default_label_leaves_the_digest_unchanged() -> None:
    def digest_config(**options: str) -> str:
        return make_config({"method": "fedavg", "data": {"name": "spoken_words", **options}}).digest()

    assert digest_config(label="word") == digest_config() != digest_config(label="language")


def test_the_corpus_can_have_the_twelve_classes_of_keyword_spotting() -> None:
    corpus = SpokenWords(speakers=40, words="speech_commands_12", clips=3600)
    rows = corpus.manifest().to_pylist()
    counts = Counter(row["label"] for row in rows)
    assert set(counts) == {*KEYWORDS, "_unknown_", "_silence_"}
    assert counts["_unknown_"] / len(rows) == pytest.approx(25 / 36, abs=0.02)
    assert {row["word"] for row in rows if row["label"] == "_unknown_"} == set(WORDS) - set(KEYWORDS)
    same = SpokenWords(speakers=40, words="speech_commands_35", clips=3600)
    row = next(row for row in rows if row["label"] == "_unknown_")
    assert np.array_equal(corpus.read(row)[0], same.read({**row, "label": row["word"]})[0])
    silence = [row for row in rows if row["label"] == "_silence_"][:6]
    clips = [corpus.read(row)[0][:, 0] for row in silence]
    assert len({digest_samples(clip) for clip in clips}) == len(clips)
    for clip in clips:
        parts = np.sqrt(np.mean(np.square(clip.reshape(10, -1)), axis=1))
        assert 0 < parts.max() < 3 * parts.min(), "silence has no word, so its loudness is nearly constant"
        assert np.abs(clip).max() <= 0.9


@pytest.mark.slow
def test_the_corpus_can_have_the_size_of_speech_commands() -> None:
    dataset = SpokenWords(speakers=2618, words="speech_commands_35", clips=105_829)
    manifest = dataset.manifest()
    assert manifest.num_rows == 105_829
    sizes = np.array(list(Counter(manifest.column("group").to_pylist()).values()))
    assert len(sizes) == 2618
    assert sizes.min() >= 1
    # Uneven: a log-normal of sigma 1 has its mean at exp(0.5) of its median.
    assert sizes.mean() / np.median(sizes) == pytest.approx(np.exp(0.5), rel=0.1)
    words = Counter(manifest.column("label").to_pylist())
    assert words.keys() == set(WORDS)
    assert max(words.values()) / min(words.values()) < 1.2
    splits = dict(zip(manifest.column("group").to_pylist(), manifest.column("split").to_pylist(), strict=True))
    assert Counter(splits.values()) == {"train": 2618 - 524, "test": 524}


@pytest.mark.parametrize("clips", [7, 8, 100, 1001])
def test_the_number_of_clips_is_exact(clips: int) -> None:
    rows = SpokenWords(speakers=7, words=("yes", "no"), clips=clips).manifest().to_pylist()
    assert len(rows) == clips
    clips_by_speaker = Counter(row["group"] for row in rows)
    assert len(clips_by_speaker) == 7
    # A speaker's word counts differ by at most 1.
    for group in clips_by_speaker:
        counts = Counter(row["label"] for row in rows if row["group"] == group)
        assert abs(counts["yes"] - counts["no"]) <= 1


@pytest.mark.parametrize(
    ("speakers", "test", "validation", "expected"),
    [
        (10, 0.2, 0.1, {"train": 7, "test": 2, "validation": 1}),
        (3, 0.01, 0.0, {"train": 2, "test": 1}),
        (2, 0.9, 0.0, {"train": 1, "test": 1}),
        (1, 0.5, 0.0, {"train": 1}),
        (4, 0.0, 0.0, {None: 4}),
    ],
)
def test_the_split_is_by_speaker(
    speakers: int, test: float, validation: float, expected: dict[str | None, int]
) -> None:
    dataset = SpokenWords(
        speakers=speakers, words=("yes",), takes=1, test_speakers=test, validation_speakers=validation
    )
    assert Counter(dataset.manifest().column("split").to_pylist()) == expected


def test_voice_variants_are_distributed_evenly() -> None:
    dataset = SpokenWords(speakers=150)
    variants = Counter(dataset._draw_speaker(index).variant for index in range(len(espeak.list_variants())))
    assert set(variants.values()) == {1}


@pytest.mark.parametrize("snr_db", [0.0, 10.0, 30.0])
def test_noise_has_the_chosen_level(snr_db: float) -> None:
    options: dict[str, Any] = {"speakers": 8, "words": ("seven",), "takes": 1}
    clean, noisy = SpokenWords(**options, snr_db=None), SpokenWords(**options, snr_db=(snr_db, snr_db))
    for row in clean.manifest().to_pylist():
        speech, mixed = clean.read(row)[0][:, 0].astype(np.float64), noisy.read(row)[0][:, 0].astype(np.float64)
        # The mix is the scaled speech plus independent noise. Clips are scaled to a fixed peak.
        scale = speech @ mixed / (speech @ speech)
        noise = mixed - scale * speech
        speech_indices = np.flatnonzero(speech)
        power = np.mean((scale * speech[speech_indices[0] : speech_indices[-1] + 1]) ** 2)
        assert 10 * np.log10(power / np.mean(noise**2)) == pytest.approx(snr_db, abs=1.0)


def test_a_clip_without_noise_is_silent_around_the_word() -> None:
    dataset = SpokenWords(speakers=4, words=("yes",), takes=1, snr_db=None)
    for row in dataset.manifest().to_pylist():
        samples, _ = dataset.read(row)
        assert not samples[:1000].any()
        assert not samples[-1000:].any()


def test_coloured_noise_is_white_noise_through_a_decaying_filter() -> None:
    white = np.random.default_rng(3).standard_normal(531, np.float32)
    noise = draw_noise(500, 0.9, np.random.default_rng(3))
    expected = np.convolve(white.astype(np.float64), 0.9 ** np.arange(32), "valid")
    np.testing.assert_allclose(noise, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(draw_noise(500, 0.0, np.random.default_rng(3)), white[31:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speakers": 0}, "data.speakers: Input should be greater than or equal to 1"),
        ({"words": []}, "words must be a non-empty list"),
        ({"words": ["yes", " "]}, "words must be a non-empty list without empty strings"),
        ({"words": ["yes", "no", "yes"]}, "words names 'yes' more than once"),
        (
            {"words": "ten"},
            "data.words: Input should be 'speech_commands_10', 'speech_commands_12'.* or a valid tuple",
        ),
        ({"languages": []}, r"data.languages: .* should have at least 1 item"),
        ({"speakers": 5, "clips": 4}, "clips is 4 for 5 speakers. Set at least one"),
        ({"snr_db": [30, 10]}, "snr_db must be two numbers from -20 to 100, the lower one first"),
        ({"snr_db": [float("nan"), 10]}, "data.snr_db.0: Input should be a finite number"),
        ({"test_speakers": 0.5, "validation_speakers": 0.5}, "leave no speaker to train on"),
        ({"test_speakers": 1.0}, "data.test_speakers: Input should be less than 1"),
        ({"seed": -1}, "data.seed: Input should be greater than or equal to 0"),
        ({"speaker": 5}, r"unknown key 'speaker' for SpokenWords. Did you mean 'speakers'\?"),
        ({"words": "speech_commands_12", "label": "language"}, "label: language needs spoken words"),
        ({"words": "speech_commands_12", "snr_db": None}, "needs room noise"),
    ],
)
def test_contradictory_and_out_of_range_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(find_dataset("spoken_words"), options, "data")


@pytest.mark.slow
def test_words_can_be_classified_across_speakers() -> None:
    """Least squares on coarse spectrograms of 32 speakers recognises most words of 8 new speakers."""
    dataset = SpokenWords(speakers=40, takes=1)
    rows = dataset.manifest().to_pylist()

    def extract_features(row: dict[str, Any]) -> npt.NDArray[np.float64]:
        """Extract 16 bands up to 5.5 kHz in 12 frames of the half second around the centre of the sound."""
        samples = dataset.read(row)[0][:, 0]
        centre = int(np.average(np.arange(len(samples)), weights=samples**2))
        part = np.pad(samples, 6144)[centre : centre + 12288].reshape(12, 1024) * np.hanning(1024)
        power = np.abs(np.fft.rfft(part, axis=1)[:, :256]) ** 2
        bands: npt.NDArray[np.float64] = np.log(power.reshape(12, 16, 16).sum(axis=2) + 1e-9)
        return (bands - bands.mean()).ravel()

    x = np.stack([extract_features(row) for row in rows])
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    y = np.array([dataset.word_list.index(row["label"]) for row in rows])
    test = np.array([row["split"] == "test" for row in rows])
    gram = x[~test].T @ x[~test] + 100 * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, x[~test].T @ np.eye(10)[y[~test]])
    assert np.mean((x[test] @ weights).argmax(axis=1) == y[test]) > 0.5  # chance is 0.1
