"""Noise in recordings: white noise of a given level, and coloured noise for generated corpora.

The run's seed and the clip's name seed a separate generator for each clip. FedAudio (Zhang et al., ICASSP 2023) seeds the generator
with 8 for all files. Noise is added at the features' sample rate, before the log-mel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raydfl.core.seeds import seed_for

NOISELESS = -1
"""Seed of a clip without noise."""


@dataclass(frozen=True)
class ClipNoise:
    """White noise for a sequence of clips."""

    snr_db: float
    """Ratio of the clip's power to the noise's power, in decibels."""
    seeds: tuple[int, ...]
    """Seed for each clip, at least 0, or :data:`NOISELESS`."""

    def part(self, start: int, stop: int) -> ClipNoise:
        """Return the noise of the clips from ``start`` to ``stop - 1``."""
        return ClipNoise(self.snr_db, self.seeds[start:stop])


def seed_noise(clips: Iterable[str], snr_db: float, seed: int) -> ClipNoise:
    """Derive the noise of clips from their names and the seed of the run."""
    return ClipNoise(snr_db, tuple(seed_for(seed, 0, clip, "noise") for clip in clips))


def add_noise(wave: np.ndarray, snr_db: float, seed: int) -> np.ndarray:
    """Add white Gaussian noise of power ``mean(wave**2) / 10**(snr_db / 10)`` to a wave, float32 [samples]."""
    power = float(np.mean(np.square(wave, dtype=np.float64)))
    noise = np.random.default_rng(seed).standard_normal(wave.size)
    result: np.ndarray = (wave + noise * np.sqrt(power / 10 ** (snr_db / 10))).astype(np.float32)
    return result


def rms(samples: npt.NDArray[np.floating[Any]]) -> float:
    """Compute the root mean square of samples."""
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))


def draw_noise(size: int, rumble: float, random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Draw coloured noise, float32 [size].

    The noise is white noise after the filter 1 + r z + ... + (r z)**31, computed as (1 + r z)(1 + (r z)**2) ... (1 + (r z)**16).
    Elementwise sums and products have the same bits on all machines.

    Args:
        size: number of samples.
        rumble: r in 0..1. 0: white noise. Larger values emphasise low frequencies.
        random: generator of the white noise.
    """
    # The filter has 32 taps, and needs 31 samples before the first.
    noise: npt.NDArray[np.float32] = random.standard_normal(size + 31, np.float32)
    for delay in (1, 2, 4, 8, 16):
        noise = noise[delay:] + np.float32(rumble**delay) * noise[:-delay]
    return noise
