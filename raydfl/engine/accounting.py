"""Accounting of differential privacy: from noise and rounds to epsilon, and back.

The library dp-accounting computes all values. Cohorts by Poisson sampling use its privacy loss distributions (PLD). Cohorts of a
fixed size use its Renyi accountant (RDP), because the library has no tighter one for them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raydfl.core.errors import ConfigError

_LARGEST_NOISE = 1e6
_TOLERANCE = 1e-3
"""Relative tolerance of a calibrated noise multiplier. It is never too small."""


def check_library() -> None:
    """Check the installation of dp-accounting.

    Raises:
        ConfigError: It is missing.
    """
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(
            "method.rule: gaussian needs the package dp-accounting. Install it: pip install 'raydfl[privacy]'"
        )


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Gaussian mechanism of a run: a noisy sum over a random cohort in every round."""

    clients: int
    """Clients that may take part."""
    cohort: int
    """Clients in a round; for Poisson sampling their expected number."""
    draw: str
    """``"poisson"``: each client takes part with probability cohort / clients. ``"fixed"``: a cohort without replacement."""
    noise: float
    """Standard deviation of the noise in the sum, divided by the clipping norm."""
    delta: float

    @property
    def neighbours(self) -> str:
        """Neighbouring data sets of the guarantee."""
        return "adding or removing one client" if self.draw == "poisson" else "replacing the data of one client"

    def compute_epsilon(self, rounds: int) -> float:
        """Compute epsilon after a number of rounds: 0 for no round, infinite without noise.

        Raises:
            ConfigError: dp-accounting is missing.
        """
        if not rounds or not self.noise:
            return math.inf if rounds else 0.0
        check_library()
        return _compute_epsilon(self, rounds)

    def count_rounds(self, epsilon: float, most: int) -> int:
        """Count the rounds up to a limit of epsilon, at most ``most``."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.compute_epsilon(middle) <= epsilon else (low, middle)
        return low

    def compute_ratio(self, parameters: int) -> float:
        """Compute the signal-to-noise ratio of a round: the largest possible sum, divided by the expected norm of the noise.

        Args:
            parameters: Number of elements with noise.
        """
        return self.cohort / (self.noise * math.sqrt(parameters)) if self.noise else math.inf

    def calibrate(self, epsilon: float, rounds: int) -> Mechanism:
        """Return the mechanism with the least noise for an epsilon, up to a relative tolerance of 0.1 %.

        Args:
            epsilon: Largest epsilon after all rounds.
            rounds: Number of rounds.

        Raises:
            ConfigError: No noise up to 1e6 reaches it, or dp-accounting is missing.
        """
        check_library()

        def reaches(noise: float) -> bool:
            return dataclasses.replace(self, noise=noise).compute_epsilon(rounds) <= epsilon

        if not reaches(_LARGEST_NOISE):
            nearest = dataclasses.replace(self, noise=_LARGEST_NOISE).compute_epsilon(rounds)
            raise ConfigError(
                f"method.rule.epsilon: no noise up to {_LARGEST_NOISE:g} gives epsilon {epsilon:g} with delta {self.delta:.3g}. "
                f"The smallest epsilon is {nearest:.3g}. Raise epsilon, or privacy.delta"
            )
        high = _start_search(self, epsilon, rounds)
        while not reaches(high):
            high = min(2 * high, _LARGEST_NOISE)
        low = high / 1.3
        while reaches(low):
            low, high = low / 1.3, low
        while high > low * (1 + _TOLERANCE):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return dataclasses.replace(self, noise=high)


def _start_search(mechanism: Mechanism, epsilon: float, rounds: int) -> float:
    """Estimate a noise multiplier by the Renyi accountant. It is fast but less tight."""
    low, high = 0.05, 1e4
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        enough = _compute_renyi(mechanism, middle, rounds, range(2, 65)) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return high


@functools.lru_cache(4096)
def _compute_epsilon(mechanism: Mechanism, rounds: int) -> float:
    if mechanism.draw == "fixed":
        return _compute_renyi(mechanism, mechanism.noise, rounds)
    loss = _make_loss(mechanism.noise, mechanism.cohort / mechanism.clients)
    return float(loss.self_compose(rounds).get_epsilon_for_delta(mechanism.delta))


@functools.lru_cache(4)
def _make_loss(noise: float, share: float) -> Any:
    """Return the privacy loss distribution of a round with Poisson sampling."""
    from dp_accounting.pld import privacy_loss_distribution  # takes a second, and only private runs need it

    return privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=share)


def _compute_renyi(mechanism: Mechanism, noise: float, rounds: int, orders: range | None = None) -> float:
    """Compute epsilon by the Renyi accountant.

    Args:
        mechanism: The mechanism, whose noise does not count.
        noise: Noise multiplier.
        rounds: Number of rounds.
        orders: Orders of the divergence; ``None``: those of dp-accounting.
    """
    import dp_accounting
    from dp_accounting import rdp

    event: Callable[[], Any]
    if mechanism.draw == "poisson":
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp_accounting.PoissonSampledDpEvent(
            mechanism.cohort / mechanism.clients, dp_accounting.GaussianDpEvent(noise)
        )
    else:
        # A replaced client moves the sum by at most 2 clip, and the event's noise is relative to this distance.
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            mechanism.clients, mechanism.cohort, dp_accounting.GaussianDpEvent(noise / 2)
        )
    accountant = rdp.RdpAccountant(orders, relation)
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(mechanism.delta))
