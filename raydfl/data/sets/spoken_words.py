"""The built-in corpus: words that eSpeak NG says on the spot, in as many voices as wanted. No download, no files.

A speaker is a voice variant x pitch x liveliness x speaking rate x loudness x room (level and colour of its noise), and for
several languages one of these; each take varies pitch, rate, loudness, place in the clip and noise a little. Everything is
drawn from the seed, the speaker's number, the word and the take, so a clip has the same samples whichever process makes it
and whatever else is in the corpus.

``speakers=2618, words="speech_commands_35", clips=105829`` has the shape of Speech Commands v0.02: speakers of very uneven size.
``words="speech_commands_12"`` has that of keyword spotting: ten commands, ``_unknown_`` for the 25 other words, and ``_silence_``,
which is a speaker's room without speech. ``label="language"`` makes the language the class, whatever word is said.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.seeds import generator
from raydfl.data.dataset import Card, Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.noise import draw_noise, rms
from raydfl.data.sets import _espeak as espeak
from raydfl.data.sets.speech_commands import KEYWORDS, SILENCE, UNKNOWN, WORDS

_WORD_LISTS = {
    "speech_commands_10": KEYWORDS,
    "speech_commands_12": (*WORDS, SILENCE),
    "speech_commands_35": WORDS,
}

# Goes into the identity of each clip; raised when the same options would give other samples.
_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Speaker:
    """Properties of a speaker, the same in all its clips."""

    language: str
    variant: str
    pitch: float
    pitch_range: int
    rate: float
    level_db: float
    snr_db: float
    rumble: float


@dataclass(frozen=True, kw_only=True)
class SpokenWords(Dataset):
    """Words spoken by eSpeak NG (``pip install 'raydfl[speech]'``)."""

    card: ClassVar[Card] = Card(
        title="Spoken words, made on the spot by eSpeak NG",
        layout="nothing: the clips are generated",
        licence="eSpeak NG is GPL-3; the package espeakng-loader brings it",
        url="https://github.com/espeak-ng/espeak-ng",
        classes=len(KEYWORDS),
    )

    speakers: Annotated[int, Field(ge=1, description="number of speakers; each is a group")] = 40
    words: Annotated[
        Literal["speech_commands_10", "speech_commands_12", "speech_commands_35"] | tuple[str, ...],
        Field(
            description="the classes: a list of words, or the ten commands or all 35 words of Speech Commands; "
            "speech_commands_12: the ten commands, _unknown_ (the other 25 words) and _silence_"
        ),
    ] = "speech_commands_10"
    label: Annotated[
        Literal["word", "language"], Field(description="what the classes are: the words, or the languages")
    ] = "word"
    languages: Annotated[
        tuple[str, ...],
        Field(
            min_length=1, description="eSpeak's languages or accents (en-us, en-gb-scotland, de ...); a speaker has one"
        ),
    ] = ("en-us",)
    takes: Annotated[int, Field(ge=1, description="clips of each speaker and word; not used when clips is given")] = 5
    clips: Annotated[
        int | None,
        Field(
            ge=1, description="clips in all, spread unevenly over the speakers (log-normal sizes, at least one each)"
        ),
    ] = None
    seconds: Annotated[float, Field(gt=0.1, le=60, description="length of a clip, s; longer speech is cut")] = 1.0
    snr_db: Annotated[
        tuple[float, float] | None,
        Field(
            description="speech to room noise, dB: the noisiest and the quietest of the speakers' rooms; null: no noise"
        ),
    ] = (5.0, 25.0)
    test_speakers: Annotated[
        float, Field(ge=0, lt=1, description="share of the speakers whose clips are the test set")
    ] = 0.2
    validation_speakers: Annotated[
        float, Field(ge=0, lt=1, description="share of the speakers whose clips are the validation set")
    ] = 0.0
    seed: Annotated[int, Field(ge=0, description="another seed is another corpus: other voices, takes and noise")] = 0

    @model_validator(mode="after")
    def _check(self) -> SpokenWords:
        for name, values in (("words", self.word_list), ("languages", self.languages)):
            if not values or not all(value.strip() for value in values):
                raise ValueError(f"{name} must name at least one, and none may be empty")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names {next(v for v in values if values.count(v) > 1)!r} more than once")
        if self.clips is not None and self.clips < self.speakers:
            raise ValueError(f"clips is {self.clips} for {self.speakers} speakers; each needs at least one")
        if self.snr_db is not None and not -20 <= self.snr_db[0] <= self.snr_db[1] <= 100:
            raise ValueError(f"snr_db must be two numbers from -20 to 100, the lower one first, not {self.snr_db}")
        if self.test_speakers + self.validation_speakers >= 1:
            raise ValueError("test_speakers and validation_speakers leave no speaker to train on")
        if self.label == "language" and SILENCE in self.word_list:
            raise ValueError(
                "label: language goes with words that are said, not with the silence of speech_commands_12"
            )
        if SILENCE in self.word_list and self.snr_db is None:
            raise ValueError("speech_commands_12 has clips of a room without speech: snr_db null leaves no room noise")
        return self

    @property
    def word_list(self) -> tuple[str, ...]:
        """The words that are said: the classes, but for ``speech_commands_12`` and ``label: language``."""
        return _WORD_LISTS[self.words] if isinstance(self.words, str) else self.words

    def manifest(self) -> pa.Table:
        """List one row for each speaker, word and take. Extra columns: ``take``, ``language``, and ``word`` where that is no label.

        Raises:
            ConfigError: eSpeak NG is not installed, or has no such language.
        """
        for language in self.languages:
            if language not in espeak.languages():
                raise ConfigError(f"eSpeak NG has no language {language!r}; {nearest(language, espeak.languages())}")
        splits, seconds = self._splits(), self._samples / espeak.SAMPLE_RATE
        rows: list[dict[str, Any]] = []
        for index, counts in enumerate(self._counts()):
            name, language = _speaker_name(index), self._speaker(index).language
            speaker = {"path": None, "group": name, "split": splits[index], "seconds": seconds}
            for word, count in zip(self.word_list, counts, strict=True):
                said = {"language": language, **({"word": word} if self._named_otherwise else {})}
                label = self._label(word, language)
                rows += [
                    {"clip": f"{name}/{word}/{take}", "label": label, **speaker, "take": take, **said}
                    for take in range(count)
                ]
        return make_manifest(rows, self.card.title)

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Say the word of one row of the manifest: float32 [samples, 1], -1..1, at 22,050 Hz."""
        speaker = self._speaker(int(row["group"].removeprefix("speaker_")))
        word = row["word"] if self._named_otherwise else row["label"]
        random = generator(self.seed, row["take"], f"{row['group']}/{word}", "take")
        if word == SILENCE:
            return self._silence(speaker, random), espeak.SAMPLE_RATE
        speech = espeak.speak(
            word,
            speaker.language,
            speaker.variant,
            rate=round(speaker.rate * random.uniform(0.92, 1.08)),
            pitch=round(float(np.clip(speaker.pitch + random.normal(0, 3), 0, 99))),
            pitch_range=speaker.pitch_range,
            seed=int(random.integers(2**31)),
        )
        speech = _trim(speech)[: self._samples]
        clip = np.zeros(self._samples, np.float32)
        free = self._samples - len(speech)
        start = round(free * random.uniform(0.2, 0.8))
        clip[start : start + len(speech)] = speech
        level_db = min(speaker.level_db + random.normal(0, 1.5), -0.5)
        if self.snr_db is not None:
            noise = draw_noise(self._samples, speaker.rumble, random)
            clip += noise * np.float32(rms(speech) / rms(noise) * 10 ** (-speaker.snr_db / 20))
        clip *= np.float32(10 ** (level_db / 20) / np.abs(clip).max())
        return clip[:, None], espeak.SAMPLE_RATE

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return all that decides the samples of a clip; not how many other speakers, words or takes there are."""
        options = (self.seed, self.languages, self.snr_db, self._samples)
        return f"spoken words {_VERSION}, espeakng-loader {espeak.version()}, {options}, {row['clip']}"

    @property
    def _named_otherwise(self) -> bool:
        """True where the label is not what is said."""
        return self.label == "language" or self.words == "speech_commands_12"

    def _label(self, word: str, language: str) -> str:
        if self.label == "language":
            return language
        return UNKNOWN if self.words == "speech_commands_12" and word not in (*KEYWORDS, SILENCE) else word

    def _silence(self, speaker: _Speaker, random: np.random.Generator) -> npt.NDArray[np.float32]:
        """Return the speaker's room without speech, as loud as it is beside speech: float32 [samples, 1]."""
        noise = draw_noise(self._samples, speaker.rumble, random)
        level_db = speaker.level_db - speaker.snr_db + random.normal(0, 1.5)
        noise *= np.float32(min(10 ** (level_db / 20), 0.9) / np.abs(noise).max())
        return noise[:, None]

    @property
    def _samples(self) -> int:
        return round(self.seconds * espeak.SAMPLE_RATE)

    def _speaker(self, index: int) -> _Speaker:
        return _draw_speaker(self.seed, self.languages, self.snr_db, index)

    def _counts(self) -> list[list[int]]:
        """Clips by speaker and word."""
        size = len(self.word_list)
        if self.clips is None:
            return [[self.takes] * size] * self.speakers
        weights = generator(self.seed, 0, "", "sizes").lognormal(0.0, 1.0, self.speakers)
        # Everybody has one clip; the rest goes out in proportion, what rounding leaves to the largest remainders.
        shares = weights / weights.sum() * (self.clips - self.speakers)
        totals = 1 + np.floor(shares).astype(np.int64)
        short = self.clips - int(totals.sum())
        totals[np.argsort(np.floor(shares) - shares, kind="stable")[:short]] += 1
        counts = []
        for index, total in enumerate(totals.tolist()):
            extra = generator(self.seed, 0, _speaker_name(index), "words").permutation(size)[: total % size]
            of_word = np.full(size, total // size)
            of_word[extra] += 1
            counts.append(of_word.tolist())
        return counts

    def _splits(self) -> list[str | None]:
        """Return the split of each speaker."""
        if not self.test_speakers and not self.validation_speakers:
            return [None] * self.speakers
        sizes = {"test": self.test_speakers, "validation": self.validation_speakers}
        order = generator(self.seed, 0, "", "splits").permutation(self.speakers).tolist()
        splits: list[str | None] = ["train"] * self.speakers
        for name, share in sizes.items():
            # A share above nothing is at least one speaker, and one is always left to train on.
            count = min(max(round(share * self.speakers), 1 if share else 0), len(order) - 1)
            for index in order[:count]:
                splits[index] = name
            del order[:count]
        return splits


def _speaker_name(index: int) -> str:
    return f"speaker_{index:04d}"


@functools.lru_cache(maxsize=4096)
def _draw_speaker(seed: int, languages: tuple[str, ...], snr_db: tuple[float, float] | None, index: int) -> _Speaker:
    variants = espeak.variants()
    random = generator(seed, 0, _speaker_name(index), "voice")
    # A shuffled list of all variants, then the next: as few speakers as possible share one.
    order = generator(seed, index // len(variants), "", "variants").permutation(len(variants))
    return _Speaker(
        language=languages[int(random.integers(len(languages)))],
        variant=variants[int(order[index % len(variants)])],
        pitch=random.uniform(30, 70),
        pitch_range=int(random.integers(30, 71)),
        rate=random.uniform(110, 180),
        level_db=random.uniform(-18, -2),
        snr_db=random.uniform(*snr_db) if snr_db is not None else 0.0,
        rumble=random.uniform(0.0, 0.95),
    )


def _trim(speech: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Without what is quieter than 1 % of the peak before and after."""
    loud = np.flatnonzero(np.abs(speech) > 0.01 * np.abs(speech).max())
    return speech[loud[0] : loud[-1] + 1]
