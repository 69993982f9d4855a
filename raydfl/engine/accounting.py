"""Accounting of differential privacy: from noise and rounds to epsilon, and back.

The library dp-accounting computes all values. Cohorts by Poisson sampling use its privacy loss distributions (PLD). Cohorts of a
fixed size use its Renyi accountant (RDP), because the library has no tighter one for them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydfl.core.errors import ConfigError

_LARGEST_NOISE = 1e6
_TOLERANCE = 1e-3
"""Relative tolerance of a calibrated noise multiplier. It is never too small."""
_INTERVAL = 1e-4
"""Interval of the values of a privacy loss."""
_STEP_INTERVAL = 1e-3
"""The same for clients' steps. Ten times faster, and epsilon is larger by about 1 per mille."""
_MOST_EPSILONS = 30
"""Largest number of epsilons of clients computed at once. Each takes up to a second."""


def check_library() -> None:
    """Check the installation of dp-accounting.

    Raises:
        ConfigError: It is missing.
    """
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(
            "Differential privacy needs the package dp-accounting. Install it: pip install 'raydfl[privacy]'"
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
    rest: int = 1
    """Groups of clients that take turns (``train.clients.rest``)."""
    simulated: int = 0
    """Clients in a round of the run that simulates this mechanism with fewer clients (``privacy.as_if``); 0: no simulation."""

    @property
    def neighbours(self) -> str:
        """Neighbouring data sets of the guarantee."""
        if self.draw == "fixed":
            return "replacing the data of one client"
        # With turns, a new client would move clients to another group.
        return "adding or removing " + ("one client" if self.rest == 1 else "the data of one listed client")

    @property
    def assumption(self) -> str:
        """Mark of a guarantee for stated numbers of clients; empty: for the run's own clients."""
        return f"as if {self.cohort:,} of {self.clients:,} clients took part in a round" if self.simulated else ""

    @property
    def run_cohort(self) -> int:
        """Divisor of the run's sum."""
        return self.simulated or self.cohort

    @property
    def run_noise(self) -> float:
        """Noise multiplier in the run's sum. Divided by its cohort, the noise is that of the mechanism's mean."""
        return self.noise * self.simulated / self.cohort if self.simulated else self.noise

    def compute_epsilon(self, rounds: int) -> float:
        """Compute epsilon after a number of rounds: 0 for no round, infinite without noise.

        Raises:
            ConfigError: dp-accounting is missing.
        """
        if not rounds or not self.noise:
            return math.inf if rounds else 0.0
        check_library()
        return _compute_epsilon(self, -(-rounds // self.rest))

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
        enough = _compute_renyi(mechanism, middle, -(-rounds // mechanism.rest), range(2, 65)) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return high


@functools.lru_cache(4096)
def _compute_epsilon(mechanism: Mechanism, turns: int) -> float:
    """Compute epsilon after some turns of a client's group."""
    if mechanism.draw == "fixed":
        return _compute_renyi(mechanism, mechanism.noise, turns)
    loss = _make_loss(mechanism.noise, mechanism.cohort * mechanism.rest / mechanism.clients, _INTERVAL)
    return float(loss.self_compose(turns).get_epsilon_for_delta(mechanism.delta))


@functools.lru_cache(64)
def _make_loss(noise: float, share: float, interval: float) -> Any:
    """Return the privacy loss distribution of a sum with Poisson sampling."""
    from dp_accounting.pld import privacy_loss_distribution  # takes a second, and only private runs need it

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=share, value_discretization_interval=interval
    )


def _compute_renyi(mechanism: Mechanism, noise: float, turns: int, orders: range | None = None) -> float:
    """Compute epsilon by the Renyi accountant.

    Args:
        mechanism: The mechanism, whose noise does not count.
        noise: Noise multiplier.
        turns: Number of turns of a client's group.
        orders: Orders of the divergence; ``None``: those of dp-accounting.
    """
    import dp_accounting
    from dp_accounting import rdp

    event: Callable[[], Any]
    if mechanism.draw == "poisson":
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp_accounting.PoissonSampledDpEvent(
            mechanism.cohort * mechanism.rest / mechanism.clients, dp_accounting.GaussianDpEvent(noise)
        )
    else:
        # A replaced client moves the sum by at most 2 clip, and the event's noise is relative to this distance.
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            mechanism.clients // mechanism.rest, mechanism.cohort, dp_accounting.GaussianDpEvent(noise / 2)
        )
    accountant = rdp.RdpAccountant(orders, relation)
    accountant.compose(event, turns)
    return float(accountant.get_epsilon(mechanism.delta))


@dataclass(frozen=True, slots=True)
class ExampleMechanism:
    """Gaussian mechanism of clients: in every step, a noisy sum of the clipped gradients of a Poisson sample of their clips."""

    batch: int
    """Expected number of clips in a step. A client with fewer clips takes all of them."""
    noise: float
    """Standard deviation of the noise in the sum, divided by the clipping norm."""
    delta: float

    @property
    def neighbours(self) -> str:
        """Neighbouring data sets of the guarantee."""
        return "adding or removing one clip of a client"

    def compute_epsilon(self, examples: int, steps: int) -> float:
        """Compute a client's epsilon: 0 for no step, infinite without noise.

        Args:
            examples: Number of the client's clips.
            steps: Number of its steps.

        Raises:
            ConfigError: dp-accounting is missing.
        """
        if not steps or not self.noise:
            return math.inf if steps else 0.0
        check_library()
        return _compute_example_epsilon(self, examples, steps)

    def summarise(self, clients: Mapping[tuple[int, int], int]) -> tuple[float, float]:
        """Compute the largest and the median epsilon of clients.

        With more than 30 different pairs, neighbouring pairs form 30 groups. Every client of a group has the epsilon of its fewest
        clips with its most steps, which is an upper bound.

        Args:
            clients: Number of clients by clips and steps.
        """
        groups = _group_pairs(sorted(clients))
        epsilons = [self.compute_epsilon(*bound) for bound, _ in groups]
        repeated = np.repeat(epsilons, [sum(clients[pair] for pair in pairs) for _, pairs in groups])
        middle = np.sort(repeated)[[(len(repeated) - 1) // 2, len(repeated) // 2]] if len(repeated) else np.zeros(2)
        return max(epsilons, default=0.0), float(middle.mean())

    def count_steps(self, epsilon: float, most: Mapping[int, int]) -> dict[int, int]:
        """Count the steps of clients up to a limit of epsilon.

        Args:
            epsilon: Largest epsilon.
            most: Largest useful number of steps by number of clips.

        Returns:
            Number of steps by number of clips, at most ``most``.
        """
        counts: dict[int, int] = {}
        for (examples, steps), pairs in _group_pairs(sorted(most.items())):
            low, high = 0, steps + 1
            if self.compute_epsilon(examples, steps) <= epsilon:
                low = steps
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.compute_epsilon(examples, middle) <= epsilon else (low, middle)
            counts |= {pair[0]: min(low, pair[1]) for pair in pairs}
        return counts


def _group_pairs(pairs: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Divide sorted pairs of clips and steps into at most 30 groups, each with its fewest clips and its most steps."""
    chunks = np.array_split(np.arange(len(pairs)), min(len(pairs), _MOST_EPSILONS)) if pairs else []
    groups = [[pairs[int(index)] for index in chunk] for chunk in chunks]
    return [((group[0][0], max(steps for _, steps in group)), group) for group in groups]


@functools.lru_cache(4096)
def _compute_example_epsilon(mechanism: ExampleMechanism, examples: int, steps: int) -> float:
    loss = _make_loss(mechanism.noise, min(mechanism.batch, examples) / examples, _STEP_INTERVAL)
    return float(loss.self_compose(steps).get_epsilon_for_delta(mechanism.delta))
