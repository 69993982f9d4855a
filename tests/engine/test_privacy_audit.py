"""The audit of differential privacy. Oracles: the exact epsilon of the Gaussian mechanism, numerical integrals, and broken runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from raydfl.attacks.canary import draw_direction
from raydfl.engine.privacy_audit import Cosines, compute_normal_epsilon

DELTA = 0.01


def test_three_values_by_hand() -> None:
    """N(0, 1) and N(1, 1), with the table of the normal distribution: delta is 2 Phi(1/2) - 1 = 0.3829 for epsilon 0, and
    Phi(0) - e^0.5 Phi(-1) = 0.5 - 1.6487 x 0.1587 = 0.2384 for epsilon 0.5."""
    assert compute_normal_epsilon(0.0, 1.0, DELTA) == 0.0
    assert compute_normal_epsilon(1.0, 1.0, 0.383) == 0.0
    assert compute_normal_epsilon(1.0, 1.0, 0.2384) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("mean", [0.1, 1.0, 3.0, 10.0, 50.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-2])
def test_the_epsilon_of_two_shifted_normals_is_that_of_the_gaussian_mechanism(mean: float, delta: float) -> None:
    """B. Balle, Y.-X. Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018, theorem 5."""
    epsilon = compute_normal_epsilon(mean, 1.0, delta)
    lower = epsilon + norm.logcdf(-mean / 2 - epsilon / mean)
    assert norm.cdf(mean / 2 - epsilon / mean) - math.exp(lower) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("mean", "deviation"), [(1.0, 0.5), (1.0, 2.0), (0.0, 1.5), (2.0, 0.9)])
def test_the_epsilon_of_unequal_deviations_equals_an_integral(mean: float, deviation: float) -> None:
    epsilon = compute_normal_epsilon(mean, deviation, DELTA)
    grid = np.linspace(-40, 40, 800_001)
    first, second = norm.pdf(grid), norm.pdf(grid, mean, deviation)
    deltas = [
        np.trapezoid(np.maximum(one - math.exp(epsilon) * two, 0), grid)
        for one, two in ((first, second), (second, first))
    ]
    assert max(deltas) == pytest.approx(DELTA, rel=1e-4)


def _simulate(noise: float, rng: np.random.Generator, canaries: int = 40, parameters: int = 4000) -> Cosines:
    """Release the sum of the canaries' directions with noise, as a round in which all take part."""
    directions = np.array([draw_direction(parameters, rng) for _ in range(canaries)])
    released = directions.sum(axis=0) + noise * rng.standard_normal(parameters)
    return Cosines(directions @ released / np.linalg.norm(released), parameters, DELTA)


@pytest.mark.slow
def test_the_lower_bound_exceeds_a_true_epsilon_of_two_in_at_most_two_of_twenty_runs() -> None:
    """The exact epsilon of a Gaussian mechanism with noise s is that of normals at distance 1 / s."""
    noise, rng = 1.1163, np.random.default_rng(0)
    true = compute_normal_epsilon(1 / noise, 1.0, DELTA)
    assert true == pytest.approx(2.0, abs=0.01)
    runs = [_simulate(noise, rng) for _ in range(20)]
    assert sum(run.compute_lower_bound() > true for run in runs) <= 2
    many = [_simulate(noise, rng, canaries=400, parameters=10_000).estimate_epsilon() for _ in range(5)]
    assert np.mean(many) == pytest.approx(true, rel=0.2)


@pytest.mark.slow
def test_the_lower_bound_exceeds_ten_in_all_runs_without_noise() -> None:
    rng = np.random.default_rng(1)
    assert min(_simulate(0.0, rng).compute_lower_bound() for _ in range(20)) > 10


@pytest.mark.slow
def test_directions_that_were_never_sent_have_a_lower_bound_of_zero() -> None:
    rng, bounds = np.random.default_rng(2), []
    for _ in range(20):
        released = rng.standard_normal(4000)
        cosines = np.array([draw_direction(4000, rng) @ released for _ in range(40)]) / np.linalg.norm(released)
        bounds.append(Cosines(cosines, 4000, DELTA).compute_lower_bound())
    assert sum(bound > 0 for bound in bounds) <= 2
