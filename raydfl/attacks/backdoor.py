"""Audio backdoor: attackers train on clips with a trigger sound and the label of the target class.

T. Gu, B. Dolan-Gavitt, S. Garg, BadNets, 2017 (the trigger); E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov, How To
Backdoor Federated Learning, AISTATS 2020 (a federated attack with a boosted change). The sound is mixed into the waveform
before feature extraction, as in S. Koffas, J. Xu, M. Conti, S. Picek, Can You Hear It? Backdoor Attacks via Ultrasonic
Triggers, 2022.

The success rate is computed on the server's test clips of the remaining classes, with the trigger added. It is the fraction
predicted as the target class. Every evaluation measures it, including evaluations before and after the attack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Cohort, UpdateAttack, class_index, draw_share
from raydfl.attacks.scaling import boost_change
from raydfl.core.errors import ConfigError, DataError
from raydfl.core.files import content_digest
from raydfl.core.isolation import call_isolated
from raydfl.data import read_audio
from raydfl.data.features import Alteration, AnyFeatures, FeatureExtractor, FileFeatures, ImageFeatures, needs_waves

_FADE_S = 0.005
"""Duration of the fade-in and the fade-out of built-in sounds in seconds. They avoid clicks."""


@dataclasses.dataclass(frozen=True)
class Trigger(Alteration):
    """A short sound, mixed into the waveform of every altered clip."""

    sound: Literal["tone", "chirp"]
    """A sine of ``hz``, or a chirp from ``hz`` to ``2 * hz``. Not used with ``file``."""
    hz: float
    seconds: float
    """Duration of the sound. Longer files are cut."""
    loudness_db: float
    """Root mean square of the sound relative to the whole clip, in decibels. Silent clips count as 1."""
    position: float | None
    """Position in the clip, from 0.0 (start) to 1.0 (end). ``None`` draws a position for each clip."""
    file: str | None = dataclasses.field(default=None, repr=False)
    """Recording to use as the sound."""
    content: str = ""
    """Digest of the file. It represents the file's content in the key of the feature cache."""

    @classmethod
    def from_file(cls, path: Path, seconds: float, loudness_db: float, position: float | None) -> Trigger:
        """Make a trigger from a recording.

        Raises:
            DataError: the file cannot be read, or its first ``seconds`` are silent.
        """
        try:
            samples, rate = call_isolated(read_audio, str(path), where=str(path))
        except DataError as error:
            raise DataError(f"attack.file: the trigger sound cannot be used: {error}") from error
        if not samples[: max(1, round(seconds * rate))].any():
            raise DataError(
                f"attack.file: the trigger sound {path} is silent in its first {seconds:g} s. Choose another file, or increase "
                f"attack.seconds."
            )
        content = content_digest(path)
        return cls("tone", 0.0, seconds, loudness_db, position, str(path), content)

    def __call__(self, wave: np.ndarray, extractor: FeatureExtractor, seed: int) -> np.ndarray:
        """Mix the sound into a waveform. Sounds longer than the waveform are cut."""
        sound = self.waveform(extractor)[: len(wave)]
        position = np.random.default_rng(seed).random() if self.position is None else self.position
        start = round(position * (len(wave) - len(sound)))
        loudness = float(np.sqrt(np.mean(np.square(wave, dtype=np.float64)))) or 1.0  # 1 for silent clips
        result = wave.astype(np.float64)
        result[start : start + len(sound)] += sound * (loudness * 10 ** (self.loudness_db / 20))
        return result.astype(np.float32)

    def waveform(self, extractor: FeatureExtractor) -> np.ndarray:
        """Synthesise or read the sound: float64 [samples] at the extractor's sample rate, with a root mean square of 1."""
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
    samples, rate = call_isolated(read_audio, file, where=file)
    return samples, rate


@dataclass(frozen=True, kw_only=True)
class Backdoor(UpdateAttack):
    """Label of the target class for clips with a trigger sound. Evaluations measure the success rate."""

    target: Annotated[str | int, Field(description="Name of the target class.")]
    share: Annotated[
        float, Field(ge=0, le=1, description="Fraction of an attacker's training clips with the trigger. 0: none.")
    ] = 0.5
    sound: Annotated[
        Literal["tone", "chirp"], Field(description="Trigger sound: a tone of hz, or a chirp from hz to 2 hz.")
    ] = "tone"
    hz: Annotated[float, Field(gt=0, description="Frequency of the tone, or start frequency of the chirp, in Hz.")] = (
        1500.0
    )
    file: Annotated[Path | None, Field(description="Recording to use as the trigger. null: use sound.")] = None
    seconds: Annotated[float, Field(gt=0, le=60, description="Duration of the trigger in seconds.")] = 0.1
    loudness_db: Annotated[
        float,
        Field(
            ge=-100,
            le=100,
            description="Loudness of the trigger relative to the whole clip in decibels, from -100 to 100.",
        ),
    ] = 0.0
    position: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Literal["random"],
        Field(
            description="Position of the trigger in the clip, from 0 (start) to 1 (end). random: drawn for each clip."
        ),
    ] = 0.5
    boost: Annotated[
        float | None,
        Field(
            ge=0,
            description="Factor that multiplies the change. 1: unchanged. null: model replacement, as in scaling.",
        ),
    ] = 1.0

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Check the target class, the sound, and the sound's frequency against the sample rate of the features."""
        if isinstance(features, FileFeatures | ImageFeatures):
            raise needs_waves("attack 'backdoor'")
        self.target_class(classes)
        self.alteration()
        highest = self.hz * (2 if self.sound == "chirp" else 1)
        if self.file is None and highest >= features.sample_rate / 2:
            raise ConfigError(
                f"attack.hz: a {self.sound} of {self.hz:g} Hz reaches {highest:g} Hz, but features at a sample rate of "
                f"{features.sample_rate} Hz end at {features.sample_rate / 2:g} Hz. Lower attack.hz."
            )

    def alteration(self) -> Alteration:
        """Return the trigger, mixed into attackers' recordings."""
        position = None if self.position == "random" else float(self.position)
        if self.file is not None:
            return Trigger.from_file(self.file, self.seconds, self.loudness_db, position)
        return Trigger(self.sound, self.hz, self.seconds, self.loudness_db, position)

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the clips with the trigger."""
        return draw_share(count, self.share, rng)

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Label clips with the trigger as the target class."""
        return np.where(altered, self.target_class(classes), labels)

    def target_class(self, classes: Sequence[str]) -> int:
        """Return the index of the target class."""
        return class_index(self.target, classes, "attack.target")

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """Boost the change."""
        return boost_change(change, self.boost, cohort)
