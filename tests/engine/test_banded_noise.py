"""Correlated noise. Oracles: the inverse of the whole matrix, all allowed participations, and independent noise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from raydfl.core.noise_key import NoiseKey
from raydfl.engine.banded_noise import BandedNoise, compute_bands, sum_deviation

KEY = NoiseKey.from_seed(3)


def make_matrix(rounds: int, bands: int) -> np.ndarray:
    """Write the matrix C: c_(t - s) in row t and column s."""
    coefficients = compute_bands(bands)
    return np.array(
        [[coefficients[t - s] if 0 <= t - s < bands else 0.0 for s in range(rounds)] for t in range(rounds)]
    )


def test_the_coefficients_by_hand() -> None:
    """1, 1/2 and 3/8, divided by their norm (89/64)^(1/2)."""
    assert compute_bands(1).tolist() == [1]
    assert compute_bands(3).tolist() == pytest.approx([8 / 89**0.5, 4 / 89**0.5, 3 / 89**0.5])


@pytest.mark.parametrize(("rounds", "bands"), [(1, 1), (5, 2), (12, 4), (12, 12), (3, 8)])
def test_the_noise_solves_the_whole_matrix(rounds: int, bands: int) -> None:
    independent = np.stack([KEY.normals(number, "noise", 5) for number in range(rounds)])
    noise, source = np.linalg.solve(make_matrix(rounds, bands), independent), BandedNoise(KEY, bands)
    for number in range(rounds):
        np.testing.assert_allclose(source.draw(number, 5), noise[number], rtol=1e-12, atol=1e-12)


def test_with_one_band_the_noise_is_independent_to_the_bit() -> None:
    source = BandedNoise(KEY, 1)
    for number in (4, 0, 1):
        assert np.array_equal(source.draw(number, 7), KEY.normals(number, "noise", 7))


def test_a_restart_draws_the_same_noise_to_the_bit() -> None:
    whole, later = BandedNoise(KEY, 3), BandedNoise(KEY, 3)
    drawn = [whole.draw(number, 4) for number in range(6)]
    for number in (4, 5, 2, 2, 3):  # a resume, and a repeated round
        assert np.array_equal(later.draw(number, 4), drawn[number])


@pytest.mark.parametrize(("rounds", "bands", "rest"), [(8, 1, 1), (9, 3, 3), (10, 2, 4), (11, 4, 4)])
def test_participations_reveal_as_much_as_the_same_number_of_rounds(rounds: int, bands: int, rest: int) -> None:
    """The noise is the same as without bands, if changes of norm 1, times C, have at most the norm of the participations."""
    matrix, rng = make_matrix(rounds, bands), np.random.default_rng(1)
    allowed = [
        chosen
        for count in range(1, rounds + 1)
        for chosen in itertools.combinations(range(rounds), count)
        if all(later - earlier >= rest for earlier, later in itertools.pairwise(chosen))
    ]
    assert max(map(len, allowed)) == -(-rounds // rest)
    for chosen in allowed:
        changes = np.zeros((rounds, 3))
        changes[list(chosen)] = rng.normal(size=(len(chosen), 3))
        changes[list(chosen)] /= np.linalg.norm(changes[list(chosen)], axis=1, keepdims=True)
        assert np.linalg.norm(matrix @ changes) <= len(chosen) ** 0.5 * (1 + 1e-12)


def test_the_sum_of_all_rounds_has_less_noise() -> None:
    """The model has the sum of all noise. After 64 rounds with 8 bands, its variance is 12.9 instead of 64."""
    sums = np.tri(64) @ np.linalg.inv(make_matrix(64, 8))
    exact = np.linalg.norm(sums, axis=1) ** 2
    source = BandedNoise(KEY, 8)
    drawn = np.cumsum([source.draw(number, 4000) for number in range(64)], axis=0).var(axis=1)
    np.testing.assert_allclose(drawn, exact, rtol=0.15)
    assert exact[-1] == pytest.approx(12.88, abs=0.01)
    assert sum_deviation(8, 64) ** 2 == pytest.approx(exact[-1], rel=1e-12)
    assert sum_deviation(1, 64) == pytest.approx(8)
