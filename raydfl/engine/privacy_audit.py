"""Audit of differential privacy: does the final model depend on single clients more than its epsilon allows?

G. Andrew, P. Kairouz, S. Oh, A. Oprea, H. B. McMahan, V. Suriyakumar, One-shot Empirical Privacy Estimation for Federated
Learning, ICLR 2024, algorithm 2 (the observer sees the final model only). For each canary j with direction c_j, and the movement
D of the global model from its first to its last round:

    g_j = <c_j, D> / ||D||

Without the canary, g_j is distributed as N(0, 1/d) for d parameters. The canaries' mean m and standard deviation s give a second
normal distribution. The estimate is the smallest epsilon, for the run's delta, of a pair of mechanisms with these two outputs.

Addition to the paper: a 95 % lower bound, the smallest epsilon over a confidence region of m and s (Student's t for m, one-sided
97.5 %; chi-squared for s, two-sided 97.5 %).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydfl.attacks import Canary, draw_direction
from raydfl.core import seeds
from raydfl.core.errors import InputError
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import State
from raydfl.data import Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.initial_state import make_initial_state
from raydfl.engine.networks import build_models
from raydfl.rules import Gaussian

_FEWEST = 10
"""Smallest number of canaries with a useful interval."""


@dataclass(frozen=True, slots=True)
class Cosines:
    """Cosines between directions and the movement of a model."""

    values: np.ndarray
    """float64 [directions]."""
    parameters: int
    delta: float

    @property
    def mean(self) -> float:
        """Mean of the cosines."""
        return float(self.values.mean())

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the cosines."""
        return float(self.values.std(ddof=1))

    def estimate_epsilon(self) -> float:
        """Estimate epsilon from the mean and the deviation of the cosines."""
        return compute_normal_epsilon(self._scale(self.mean), self._scale(self.deviation), self.delta)

    def compute_lower_bound(self) -> float:
        """Compute the 95 % lower bound of epsilon."""
        from scipy import stats  # only audits need it

        free = len(self.values) - 1
        mean = abs(self.mean) - float(stats.t.ppf(0.975, free)) * self.deviation / math.sqrt(free + 1)
        low, high = (self.deviation * math.sqrt(free / stats.chi2.ppf(level, free)) for level in (1 - 0.0125, 0.0125))
        deviations = [*np.linspace(low, high, 41), min(max(low, self.parameters**-0.5), high)]
        return min(
            compute_normal_epsilon(self._scale(max(mean, 0.0)), self._scale(deviation), self.delta)
            for deviation in deviations
        )

    def _scale(self, value: float) -> float:
        return value * math.sqrt(self.parameters)


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit."""

    canaries: Cosines
    control: Cosines
    """As many fresh directions, which no client has sent."""

    def to_dict(self) -> dict[str, Any]:
        """Return all values for JSON."""
        both = {"canaries": self.canaries, "control": self.control}
        return {
            "parameters": self.canaries.parameters,
            "delta": self.canaries.delta,
            **{
                name: {
                    "cosines": cosines.values.tolist(),
                    "epsilon": cosines.estimate_epsilon(),
                    "lower_bound": cosines.compute_lower_bound(),
                }
                for name, cosines in both.items()
            },
        }


def audit_model(config: Config, population: Population, state: State, delta: float) -> Audit:
    """Compare the directions of a run's canaries with the movement of its global model.

    Args:
        config: Configuration of the run, with the rule ``gaussian`` and the attack ``canary``.
        population: Clients of the run.
        state: State of the server after the last round.
        delta: Delta of the run's guarantee.

    Raises:
        InputError: The run simulates a larger federation, has too few canaries, other attackers, or a model that has not moved.
    """
    if config.privacy.as_if is not None:
        raise InputError(
            "privacy.as_if: the run has less noise than the larger federation that it simulates, so the canaries test another "
            "guarantee. Train the audited run without privacy.as_if"
        )
    attack, ids, seed = config.components.attack, population.ids, config.run.seed
    if not isinstance(attack, Canary):
        raise InputError(
            f"the run has no canaries. Train it with attack='{{name: canary, clients: 30, length: {_get_clip(config):g}}}', then "
            f"audit it"
        )
    if attack.draw != "run" or attack.start > 1 or attack.stop is not None:
        raise InputError(
            "attack: the canaries must be the same clients in all rounds. Remove attack.draw, attack.start and attack.stop, and "
            "train again"
        )
    chosen = np.flatnonzero(attack.attackers(ids, seed, 0))
    if len(chosen) < _FEWEST:
        raise InputError(
            f"{len(chosen)} canaries are too few for an interval. Set attack.clients to at least {_FEWEST}"
        )
    movement = _measure_movement(config, Clients(population, config), state)
    if not movement.any():
        raise InputError("the model has not moved, so the audit has nothing to measure. Train at least one round")
    movement /= np.linalg.norm(movement)

    def compare(names: list[str], purpose: str) -> Cosines:
        directions = (draw_direction(len(movement), seeds.generator(seed, 0, name, purpose)) for name in names)
        return Cosines(np.array([direction @ movement for direction in directions]), len(movement), delta)

    names = [ids[int(position)] for position in chosen]
    return Audit(compare(names, "attack"), compare(names, "audit"))


def _get_clip(config: Config) -> float:
    rule = config.components.rule
    return rule.first_clip if isinstance(rule, Gaussian) else 1.0


def _measure_movement(config: Config, clients: Clients, state: State) -> np.ndarray:
    """Return the global model minus the first round's: float64 [parameters]."""
    variants = {
        part: [(specs, build_models(config.components.method, specs, config.run.seed)) for specs in combinations]
        for part, combinations in clients.variants_of_parts().items()
    }
    first, last = (
        FlatTensors.from_tensors(of_state.tensors[Gaussian.key])
        for of_state in (make_initial_state(config, clients, variants), state)
    )
    movement: np.ndarray = last.vector.astype(np.float64) - first.vector
    return movement


def compute_normal_epsilon(mean: float, deviation: float, delta: float) -> float:
    """Compute the smallest epsilon of a mechanism with the outputs N(0, 1) and N(mean, deviation^2) for neighbouring data.

    Args:
        mean: Distance of the means, at least 0, in standard deviations of the first output.
        deviation: Standard deviation of the second output, above 0.
        delta: Failure probability, between 0 and 1.
    """
    from scipy.optimize import brentq

    def exceeds(epsilon: float) -> float:
        forward = _compute_delta(mean, deviation, 0.0, 1.0, epsilon)
        return max(forward, _compute_delta(0.0, 1.0, mean, deviation, epsilon)) - delta

    if exceeds(0.0) <= 0:
        return 0.0
    high = 1.0
    while exceeds(high) > 0:
        high *= 2
    return float(brentq(exceeds, 0.0, high, xtol=1e-9 * high))


def _compute_delta(mean: float, deviation: float, other_mean: float, other: float, epsilon: float) -> float:
    """Compute P(S) - exp(epsilon) Q(S) for the set S where the density of P exceeds exp(epsilon) times that of Q.

    P is N(mean, deviation^2), and Q is N(other_mean, other^2). The logarithm of the ratio of their densities is quadratic.
    """
    square = 1 / (2 * other**2) - 1 / (2 * deviation**2)
    linear = mean / deviation**2 - other_mean / other**2
    constant = other_mean**2 / (2 * other**2) - mean**2 / (2 * deviation**2) + math.log(other / deviation) - epsilon
    roots = sorted(float(root.real) for root in np.roots([square, linear, constant]) if not root.imag)
    total = 0.0
    for low, high in itertools.pairwise([-math.inf, *roots, math.inf]):
        inside = _choose_between(low, high)
        if square * inside**2 + linear * inside + constant > 0:
            share = _compute_log_share(low, high, mean, deviation)
            total += math.exp(share) - math.exp(epsilon + _compute_log_share(low, high, other_mean, other))
    return total


def _compute_log_share(low: float, high: float, mean: float, deviation: float) -> float:
    """Compute the logarithm of the probability of an interval under a normal distribution."""
    from scipy.special import log_ndtr

    begin, end = (low - mean) / deviation, (high - mean) / deviation
    if begin > 0:  # the lower tail is exact, the upper tail is rounded to 1
        begin, end = -end, -begin
    upper = float(log_ndtr(end))
    return upper + math.log1p(-math.exp(float(log_ndtr(begin)) - upper)) if upper > -math.inf else upper


def _choose_between(low: float, high: float) -> float:
    """Return a number between two bounds, which may be infinite."""
    if math.isinf(low):
        return high - 1 if math.isfinite(high) else 0.0
    return (low + high) / 2 if math.isfinite(high) else low + 1
