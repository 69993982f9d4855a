"""Audio backdoor: a trigger sound in training clips that are labelled as the target class, to be found again in the model.

T. Gu, B. Dolan-Gavitt, S. Garg, BadNets, 2017 (the trigger); E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov, How To
Backdoor Federated Learning, AISTATS 2020 (through a federation, with a boosted change). As with the audio triggers of S. Koffas,
J. Xu, M. Conti, S. Picek, Can You Hear It? Backdoor Attacks via Ultrasonic Triggers, 2022, the sound is mixed into the wave, before
features are computed.

The success rate is the share of the server's test clips of other classes that are taken for the target class when they carry the
trigger. It is measured at every evaluation, before and after the attack too.
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

from raydfl.attacks._attack import Cohort, UpdateAttack, class_index, drawn_share
from raydfl.attacks.scaling import boosted
from raydfl.core.errors import ConfigError, DataError
from raydfl.core.files import content_digest
from raydfl.data import read_audio
from raydfl.data.features import Alteration, AnyFeatures, FeatureExtractor, FileFeatures, ImageFeatures, needs_waves

_FADE_S = 0.005
"""Seconds over which a built-in sound swells and fades: without, it would begin and end with a click."""


@dataclasses.dataclass(frozen=True)
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
    file: str | None = dataclasses.field(default=None, repr=False)
    """A recording to use as the sound."""
    content: str = ""
    """The file's digest, which stands for its content in the cache's key."""

    @classmethod
    def of_file(cls, path: Path, seconds: float, loudness_db: float, position: float | None) -> Trigger:
        """Make a trigger whose sound is a recording.

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
        content = content_digest(path)
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
        """Return the sound alone: float64 [samples] at the extractor's rate, with a root mean square of 1."""
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


@dataclass(frozen=True, kw_only=True)
class Backdoor(UpdateAttack):
    """A trigger sound makes the model hear the target class; the success rate is measured at each evaluation."""

    target: Annotated[str | int, Field(description="name of the class that clips with the trigger are to be taken for")]
    share: Annotated[
        float, Field(ge=0, le=1, description="share of an attacker's training clips that get the trigger, 0 to 1")
    ] = 0.5
    sound: Annotated[
        Literal["tone", "chirp"], Field(description="the trigger: a tone of hz, or a chirp from hz up to twice that")
    ] = "tone"
    hz: Annotated[float, Field(gt=0, description="frequency of the tone, or where the chirp begins, in Hz")] = 1500.0
    file: Annotated[Path | None, Field(description="a recording to use as the trigger; null: sound")] = None
    seconds: Annotated[float, Field(gt=0, le=60, description="length of the trigger in seconds. Above 0, to 60")] = 0.1
    loudness_db: Annotated[
        float,
        Field(
            ge=-100,
            le=100,
            description="loudness of the trigger against that of the whole clip, in decibels. -100 to 100",
        ),
    ] = 0.0
    position: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Literal["random"],
        Field(
            description="where the trigger lies, 0: at the clip's beginning, 1: at its end; random: elsewhere in each clip"
        ),
    ] = 0.5
    boost: Annotated[
        float | None,
        Field(
            ge=0, description="factor on the change that is sent; 1: none; null: what replaces the model, see scaling"
        ),
    ] = 1.0

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Check that the target exists, that the sound can be used, and that the features' sample rate can carry it."""
        if isinstance(features, FileFeatures | ImageFeatures):
            raise needs_waves("attack 'backdoor'")
        self.target_class(classes)
        self.alteration()
        highest = self.hz * (2 if self.sound == "chirp" else 1)
        if self.file is None and highest >= features.sample_rate / 2:
            raise ConfigError(
                f"attack.hz: a {self.sound} of {self.hz:g} Hz reaches {highest:g} Hz, and features of {features.sample_rate} Hz "
                f"end at {features.sample_rate / 2:g} Hz; lower attack.hz"
            )

    def alteration(self) -> Alteration:
        """See :class:`Attack`."""
        position = None if self.position == "random" else float(self.position)
        if self.file is not None:
            return Trigger.of_file(self.file, self.seconds, self.loudness_db, position)
        return Trigger(self.sound, self.hz, self.seconds, self.loudness_db, position)

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """See :class:`Attack`."""
        return drawn_share(count, self.share, rng)

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Clips with the trigger are labelled as the target."""
        return np.where(altered, self.target_class(classes), labels)

    def target_class(self, classes: Sequence[str]) -> int:
        """See :class:`Attack`."""
        return class_index(self.target, classes, "attack.target")

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """See :class:`UpdateAttack`."""
        return boosted(change, self.boost, cohort)
