"""Noise in recordings: white noise of a given level, and the coloured noise of generated corpora.

Each clip has a generator of its own, from the run's seed and the clip's name, where FedAudio (Zhang et al., ICASSP 2023) seeds its
generator with 8 for every file. The noise is added at the features' sample rate, before the log-mel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raydfl.core.seeds import seed_for

NOISELESS = -1
"""In place of a clip's seed: no noise."""


@dataclass(frozen=True)
class Noise:
    """The noise of some clips."""

    snr_db: float
    """Power of the clip over the power of the noise, in decibels."""
    seeds: tuple[int, ...]
    """One for each clip, at least 0; :data:`NOISELESS` leaves the clip as it is."""

    def part(self, start: int, stop: int) -> Noise:
        """Return the noise of clips ``start`` to ``stop - 1``."""
        return Noise(self.snr_db, self.seeds[start:stop])


def noise_for(clips: Iterable[str], snr_db: float, seed: int) -> Noise:
    """Return the noise of clips of these names in a run of this seed."""
    return Noise(snr_db, tuple(seed_for(seed, 0, clip, "noise") for clip in clips))


def add_noise(wave: np.ndarray, snr_db: float, seed: int) -> np.ndarray:
    """Add white Gaussian noise of power mean(wave^2) / 10^(snr_db / 10) to ``wave`` (float32 [samples])."""
    power = float(np.mean(np.square(wave, dtype=np.float64)))
    noise = np.random.default_rng(seed).standard_normal(wave.size)
    result: np.ndarray = (wave + noise * np.sqrt(power / 10 ** (snr_db / 10))).astype(np.float32)
    return result


def rms(samples: npt.NDArray[np.floating[Any]]) -> float:
    """Return the root mean square of some samples."""
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))


def coloured_noise(size: int, rumble: float, random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Draw noise [size], white at rumble 0, more and more of it low towards 1: white noise through 1 + r z + ... + (r z)**31.

    Computed as (1 + r z)(1 + (r z)**2) ... (1 + (r z)**16): only sums and products of elements, the same bits everywhere.
    """
    noise: npt.NDArray[np.float32] = random.standard_normal(size + 31, np.float32)
    for delay in (1, 2, 4, 8, 16):
        noise = noise[delay:] + np.float32(rumble**delay) * noise[:-delay]
    return noise
