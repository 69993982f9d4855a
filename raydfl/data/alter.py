"""What an attacker does to its recordings before their features are computed: a trigger sound mixed in, or damage."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from raydfl.data.clips import read_audio
from raydfl.data.corrupt import add_noise
from raydfl.errors import DataError

if TYPE_CHECKING:
    from raydfl.data.features import FeatureExtractor

UNALTERED = -1
"""In place of a clip's seed: the clip stays as it is."""
_FADE_S = 0.005
"""Seconds over which a built-in sound swells and fades: without, it would begin and end with a click."""


@dataclass(frozen=True)
class Alteration(ABC):
    """One way to alter waves. The ``repr`` of a subclass names all that decides the result: it goes into the cache's key."""

    @abstractmethod
    def __call__(self, wave: np.ndarray, extractor: FeatureExtractor, seed: int) -> np.ndarray:
        """The altered wave, as long as it was.

        Args:
            wave: float32 [samples] at the extractor's rate, cut to the length that features are made of.
            seed: of the clip; the same clip and seed give the same wave.
        """


@dataclass(frozen=True)
class Alterations:
    """What is done to the waves of some clips."""

    what: Alteration
    seeds: tuple[int, ...]
    """One for each clip, at least 0; :data:`UNALTERED` leaves the clip as it is."""

    def part(self, start: int, stop: int) -> Alterations:
        """What is done to clips ``start`` to ``stop - 1``."""
        return Alterations(self.what, self.seeds[start:stop])


@dataclass(frozen=True)
class Trigger(Alteration):
    """A short sound mixed into the wave, the same in every clip."""

    sound: Literal["tone", "chirp"]
    """A sine of ``hz``, or one that rises from ``hz`` to twice that. Not used with ``file``."""
    hz: float
    seconds: float
    """Length of the sound; a file's is cut to it."""
    loudness_db: float
    """Root mean square of the sound over that of the whole clip, in decibels; over 1 where the clip is silent."""
    position: float | None
    """Where it lies: 0.0: at the beginning, 1.0: at the end; ``None``: somewhere else in each clip."""
    file: str | None = field(default=None, repr=False)
    """A recording to use as the sound."""
    content: str = ""
    """The file's digest, which stands for its content in the cache's key."""

    @classmethod
    def of_file(cls, path: Path, seconds: float, loudness_db: float, position: float | None) -> Trigger:
        """A trigger whose sound is a recording.

        Raises:
            DataError: the file cannot be read, or is silent as far as it is used.
        """
        try:
            samples, rate = read_audio(path)
        except DataError as error:
            raise DataError(f"attack.file: the trigger sound cannot be used: {error}") from error
        if not samples[: max(1, round(seconds * rate))].any():
            raise DataError(
                f"attack.file: the trigger sound {path} is silent in its first {seconds:g} s; choose another"
            )
        content = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        return cls("tone", 0.0, seconds, loudness_db, position, str(path), content)

    def __call__(self, wave: np.ndarray, extractor: FeatureExtractor, seed: int) -> np.ndarray:
        """See :class:`Alteration`. A sound longer than the wave is cut."""
        sound = self.waveform(extractor)[: len(wave)]
        position = np.random.default_rng(seed).random() if self.position is None else self.position
        start = round(position * (len(wave) - len(sound)))
        loudness = float(np.sqrt(np.mean(np.square(wave, dtype=np.float64)))) or 1.0
        result = wave.astype(np.float64)
        result[start : start + len(sound)] += sound * (loudness * 10 ** (self.loudness_db / 20))
        return result.astype(np.float32)

    def waveform(self, extractor: FeatureExtractor) -> np.ndarray:
        """The sound alone: float64 [samples] at the extractor's rate, with a root mean square of 1."""
        rate = extractor.settings.sample_rate
        samples = max(1, round(self.seconds * rate))
        if self.file is not None:
            wave = extractor.wave(*_read(self.file))[:samples].astype(np.float64)
        else:
            time = np.arange(samples) / rate
            # The frequency of a chirp is the derivative of its phase: hz (1 + t / seconds).
            cycles = time if self.sound == "tone" else time + np.square(time) / (2 * self.seconds)
            edge = np.minimum(np.arange(samples) + 1, samples - np.arange(samples)) / (_FADE_S * rate)
            wave = np.sin(2 * np.pi * self.hz * cycles) * np.minimum(edge, 1.0)
        sound: np.ndarray = wave / (np.sqrt(np.mean(np.square(wave))) or 1.0)
        return sound


@lru_cache(maxsize=4)
def _read(file: str) -> tuple[np.ndarray, int]:
    return read_audio(file)


@dataclass(frozen=True)
class Damage(Alteration):
    """Recordings that are of little use."""

    kind: Literal["noise", "silence", "clipping"]
    snr_db: float
    """noise: power of the clip over the power of white noise, in decibels."""
    silent: float
    """silence: share of the clip, in one piece that lies somewhere else in each clip, that is silent. 0 to 1."""
    ceiling: float
    """clipping: share of the clip's largest amplitude beyond which it is cut off. 0 to 1."""

    def __call__(self, wave: np.ndarray, extractor: FeatureExtractor, seed: int) -> np.ndarray:
        """See :class:`Alteration`."""
        if self.kind == "noise":
            return add_noise(wave, self.snr_db, seed)
        if self.kind == "clipping":
            limit = self.ceiling * float(np.abs(wave).max(initial=0.0))
            clipped: np.ndarray = np.clip(wave, -limit, limit).astype(np.float32)
            return clipped
        result = wave.copy()
        samples = round(self.silent * len(wave))
        start = int(np.random.default_rng(seed).integers(len(wave) - samples + 1))
        result[start : start + samples] = 0.0
        return result
