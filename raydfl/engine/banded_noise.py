"""Correlated noise of several rounds: the banded square root mechanism.

C. A. Choquette-Choo and others, (Amplified) Banded Matrix Factorization: A unified approach to private training, NeurIPS 2023.
N. Kalinin, C. Lampert, Banded Square Root Matrix Factorization for Differentially Private Model Training, NeurIPS 2024.

    noise = C^-1 z,      C[t, t - j] = c_j for j < bands, otherwise 0,      c_j ~ binomial(2j, j) / 4^j,      sum of c_j^2 = 1

The c_j are the first coefficients of (1 - x)^(-1/2), divided by their norm. With them, the noise of the sum over all rounds so far,
which is the noise of the model, is smaller than with independent noise.

The rounds of a client are at least ``bands`` apart, so its columns of C have no common row, and each has norm 1. Hence k
participations have the guarantee of k rounds with independent noise z (Choquette-Choo and others, theorem 4 for sampled cohorts).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from raydfl.core.noise_key import NoiseKey


def compute_bands(bands: int) -> np.ndarray:
    """Compute the coefficients of the matrix C: float64 [bands] with norm 1."""
    steps = np.arange(1, bands)
    coefficients = np.cumprod([1.0, *((2 * steps - 1) / (2 * steps))])
    normalised: np.ndarray = coefficients / np.linalg.norm(coefficients)
    return normalised


def sum_deviation(bands: int, rounds: int) -> float:
    """Compute the standard deviation of the sum of all noise, relative to a number of the independent noise."""
    coefficients, inverse = compute_bands(bands), np.zeros(rounds)
    for place in range(rounds):
        earlier = inverse[max(0, place - bands + 1) : place][::-1]
        inverse[place] = ((place == 0) - coefficients[1 : len(earlier) + 1] @ earlier) / coefficients[0]
    return float(np.linalg.norm(np.cumsum(inverse)))


class BandedNoise:
    """Noise of all rounds. It is drawn again after a restart, so nothing is stored.

    Args:
        key: Key of the independent numbers.
        bands: Rounds with correlated noise. 1: the noise of different rounds is independent.
    """

    def __init__(self, key: NoiseKey, bands: int) -> None:
        self._key = key
        self._coefficients = compute_bands(bands)
        self._latest: deque[np.ndarray] = deque(maxlen=bands - 1)
        """Noise of the latest rounds, the last one first."""
        self._rounds = 0
        """Number of rounds whose noise has been computed."""

    def draw(self, round_index: int, size: int) -> np.ndarray:
        """Draw the noise after a number of completed rounds: float64 [size].

        The memory is (bands - 1) x 8 bytes for each value. After a restart, the noise of all earlier rounds is computed once.
        """
        if round_index < self._rounds:
            self._latest.clear()
            self._rounds = 0
        # Without correlation, no earlier noise is needed.
        first = self._rounds if self._latest.maxlen else round_index
        for earlier in range(first, round_index + 1):
            noise = self._compute(earlier, size)
            self._latest.appendleft(noise)
        self._rounds = round_index + 1
        return noise

    def _compute(self, round_index: int, size: int) -> np.ndarray:
        """Solve a row of C noise = z for the last noise."""
        noise = self._key.normals(round_index, "noise", size)
        for coefficient, latest in zip(self._coefficients[1:], self._latest, strict=False):
            noise -= coefficient * latest
        noise /= self._coefficients[0]
        return noise
