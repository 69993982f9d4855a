"""Accounting. Oracles: calls of dp-accounting by hand, published multipliers, and monotony."""

from __future__ import annotations

import itertools

import pytest

from raydfl.core.errors import ConfigError
from raydfl.engine.accounting import Mechanism
from raydfl.engine.privacy_audit import compute_normal_epsilon

dp_accounting = pytest.importorskip("dp_accounting")

SETTINGS = [
    *(
        (60, 12, draw, noise, rounds)
        for draw, noise, rounds in itertools.product(("fixed", "poisson"), (1.0, 3.0), (1, 7, 100))
    ),
    *((1000, 100, draw, noise, 50) for draw, noise in itertools.product(("fixed", "poisson"), (0.8, 1.5, 5.0))),
    (10, 10, "fixed", 2.0, 5),
    (10, 10, "poisson", 2.0, 5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "cohort", "draw", "noise", "rounds"), SETTINGS)
def test_epsilon_equals_a_call_of_dp_accounting(
    clients: int, cohort: int, draw: str, noise: float, rounds: int
) -> None:
    from dp_accounting import pld, rdp

    delta = clients**-1.1
    if draw == "poisson":
        event = dp_accounting.PoissonSampledDpEvent(cohort / clients, dp_accounting.GaussianDpEvent(noise))
        accountant = pld.PLDAccountant()
        tolerance = 1e-7  # the accountant composes with the identity, which truncates once more
    else:
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            clients, cohort, dp_accounting.GaussianDpEvent(noise / 2)
        )
        accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        tolerance = 1e-9
    accountant.compose(event, rounds)
    epsilon = Mechanism(clients, cohort, draw, noise, delta).compute_epsilon(rounds)
    assert epsilon == pytest.approx(accountant.get_epsilon(delta), rel=tolerance, abs=tolerance)


def test_there_are_twenty_settings() -> None:
    assert len(SETTINGS) == 20


@pytest.mark.parametrize("draw", ["fixed", pytest.param("poisson", marks=pytest.mark.slow)])
def test_more_rounds_a_larger_share_or_less_noise_never_lower_epsilon(draw: str) -> None:
    def compute(cohort: int = 10, noise: float = 1.0, rounds: int = 20) -> float:
        return Mechanism(100, cohort, draw, noise, 1e-3).compute_epsilon(rounds)

    for series in (
        [compute(rounds=rounds) for rounds in (1, 2, 10, 50)],
        [compute(cohort=cohort) for cohort in (5, 10, 20, 80)],
        [compute(noise=noise) for noise in (4.0, 2.0, 1.0, 0.7)],
    ):
        assert sorted(series) == series
        assert series[0] < series[-1]


def test_clients_that_rest_take_part_in_fewer_rounds() -> None:
    """60 clients, 12 a round, rest of 5 rounds: in 11 rounds, each client of a group takes part in at most 3."""
    turns = Mechanism(60, 12, "poisson", 4.0, 0.01, rest=5)
    assert turns.compute_epsilon(11) == pytest.approx(compute_normal_epsilon(3**0.5 / 4.0, 1.0, 0.01), rel=1e-3)
    assert turns.compute_epsilon(11) == turns.compute_epsilon(15) < turns.compute_epsilon(16)
    halves = Mechanism(60, 12, "fixed", 4.0, 0.01, rest=2)
    assert halves.compute_epsilon(8) == Mechanism(30, 12, "fixed", 4.0, 0.01).compute_epsilon(4)


def test_a_simulation_has_the_noise_of_the_stated_mean() -> None:
    """5,000 clients with noise 2 have noise 2 / 5000 in the mean. So have 10 clients with noise 0.004."""
    mechanism = Mechanism(10**6, 5000, "poisson", 2.0, 1e-7, simulated=10)
    assert (mechanism.run_cohort, mechanism.run_noise) == (10, 0.004)
    assert mechanism.assumption == "as if 5,000 of 1,000,000 clients took part in a round"
    plain = Mechanism(10**6, 5000, "poisson", 2.0, 1e-7)
    assert (plain.run_cohort, plain.run_noise, plain.assumption) == (5000, 2.0, "")
    assert mechanism.compute_epsilon(3) == plain.compute_epsilon(3)


def test_without_noise_or_rounds() -> None:
    assert Mechanism(10, 2, "poisson", 0.0, 0.1).compute_epsilon(3) == float("inf")
    assert Mechanism(10, 2, "poisson", 0.0, 0.1).compute_epsilon(0) == 0
    assert Mechanism(10, 2, "fixed", 1.0, 0.1).compute_epsilon(0) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clients", "cohort", "rounds", "epsilon", "noise"),
    [
        (60, 12, 100, 8, 1.01),
        (2112, 100, 300, 8, 0.76),
        (35_000, 500, 500, 8, 0.59),
        (1_000_000, 1000, 1000, 8, 0.42),
        (60, 12, 100, 2, 2.34),
        (2112, 100, 300, 2, 1.57),
        (35_000, 500, 500, 2, 0.99),
        (1_000_000, 1000, 1000, 2, 0.63),
    ],
)
def test_the_noise_for_an_epsilon_is_the_published_one(
    clients: int, cohort: int, rounds: int, epsilon: float, noise: float
) -> None:
    found = Mechanism(clients, cohort, "poisson", 0.0, clients**-1.1).calibrate(epsilon, rounds)
    assert found.noise == pytest.approx(noise, abs=0.006)
    assert 0.99 * epsilon < found.compute_epsilon(rounds) <= epsilon


@pytest.mark.slow
def test_calibration_is_tight_and_counts_rounds() -> None:
    found = Mechanism(50, 10, "fixed", 0.0, 0.01).calibrate(3.0, 20)
    assert 2.98 < found.compute_epsilon(20) <= 3
    assert found.count_rounds(3.0, 100) == 20
    assert found.count_rounds(3.0, 12) == 12
    assert found.count_rounds(1e-9, 100) == 0


def test_an_unreachable_epsilon_names_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"no noise up to 1e\+06 gives epsilon 1e-09 .* The smallest epsilon is "):
        Mechanism(50, 50, "fixed", 0.0, 1e-12).calibrate(1e-9, 10**6)


def test_the_signal_to_noise_ratio() -> None:
    """The largest sum of 12 clients clipped to 1 is 12, the norm of noise 2 in 36 dimensions is 12."""
    assert Mechanism(60, 12, "fixed", 2.0, 0.01).compute_ratio(36) == 1
