"""Common parts of corpora that are generated: levels, and noise of a colour."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


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
