"""Corrupted recordings: attackers train on noisy, silent or clipped recordings with true labels.

The setting ``data.corrupt`` describes the data of a federation. This attack has a first and a last round, and the metrics
table lists its attackers.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Attack, draw_share
from raydfl.data import add_noise
from raydfl.data.features import Alteration, FeatureExtractor


@dataclasses.dataclass(frozen=True)
class Damage(Alteration):
    """Noise, silence or clipping of a recording."""

    kind: Literal["noise", "silence", "clipping"]
    snr_db: float
    """noise: signal-to-noise ratio in decibels, with white noise."""
    silent: float
    """silence: fraction of the clip to silence, from 0 to 1, as one segment at a random position."""
    ceiling: float
    """clipping: maximum amplitude, as a fraction of the clip's largest amplitude, from 0 to 1."""

    def __call__(self, wave: np.ndarray, extractor: FeatureExtractor, seed: int) -> np.ndarray:
        """Return the damaged waveform."""
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


@dataclass(frozen=True, kw_only=True)
class CorruptRecordings(Attack):
    """Training on noisy, silent or clipped recordings with true labels."""

    kind: Annotated[
        Literal["noise", "silence", "clipping"],
        Field(description="Kind of damage: white noise, a silent segment, or clipping."),
    ] = "noise"
    share: Annotated[
        float, Field(ge=0, le=1, description="Fraction of an attacker's training clips to damage. 0: none.")
    ] = 1.0
    snr_db: Annotated[
        float,
        Field(ge=-100, le=300, description="noise: signal-to-noise ratio in decibels, from -100 to 300."),
    ] = 0.0
    silent: Annotated[
        float,
        Field(ge=0, le=1, description="silence: fraction of the clip to silence, as one segment. 1: all, 0: none."),
    ] = 1.0
    ceiling: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="clipping: maximum amplitude as a fraction of the clip's largest amplitude. 1: unchanged.",
        ),
    ] = 0.05

    def alteration(self) -> Alteration:
        """Return the damage to attackers' recordings."""
        return Damage(self.kind, self.snr_db, self.silent, self.ceiling)

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a mask of the clips to damage."""
        return draw_share(count, self.share, rng)
