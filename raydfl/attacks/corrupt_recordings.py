"""Corrupted recordings: attackers train on clips that are noisy, silent or clipped, under their true labels.

Unlike ``data.corrupt``, which describes the data of a federation, this is an attack: with a beginning and an end, and recorded as
one.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Attack, drawn_share
from raydfl.data import add_noise
from raydfl.data.features import Alteration, FeatureExtractor


@dataclasses.dataclass(frozen=True)
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


@dataclass(frozen=True, kw_only=True)
class CorruptRecordings(Attack):
    """Attackers train on noisy, silent or clipped recordings."""

    kind: Annotated[
        Literal["noise", "silence", "clipping"],
        Field(description="what is done to the recordings: noise, silence or clipping"),
    ] = "noise"
    share: Annotated[float, Field(ge=0, le=1, description="share of an attacker's training clips, 0 to 1")] = 1.0
    snr_db: Annotated[
        float,
        Field(
            ge=-100, le=300, description="noise: power of the clip over that of white noise, in decibels. -100 to 300"
        ),
    ] = 0.0
    silent: Annotated[
        float, Field(ge=0, le=1, description="silence: share of the clip, in one piece, that is silent, 0 to 1")
    ] = 1.0
    ceiling: Annotated[
        float,
        Field(
            ge=0, le=1, description="clipping: share of the clip's largest amplitude beyond which it is cut off, 0 to 1"
        ),
    ] = 0.05

    def alteration(self) -> Alteration:
        """See :class:`Attack`."""
        return Damage(self.kind, self.snr_db, self.silent, self.ceiling)

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """See :class:`Attack`."""
        return drawn_share(count, self.share, rng)
