"""Forecast of asynchronous training (``train.fleet``): its server steps in virtual time, without any training."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydfl.core.errors import ConfigError
from raydfl.core.types import Client, State, Task
from raydfl.core.users_code import naming_failures
from raydfl.data import Population
from raydfl.engine.asynchrony import StepPlanner
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.fleet import NOBODY, InFlight, Step
from raydfl.engine.initial_state import make_initial_state
from raydfl.engine.networks import build_variants


@dataclass(frozen=True)
class Forecast:
    """Arrivals of some server steps."""

    clients: int
    """Number of clients that may take part."""
    steps: np.ndarray
    """Virtual time at the end of each step in seconds, float64 [steps]."""
    arrivals: np.ndarray
    """Virtual time of each used arrival in seconds, float64 [arrivals]."""
    round_trips: np.ndarray
    """Seconds between the start and the arrival, float64 [arrivals]."""
    staleness: np.ndarray
    """Staleness in server steps, int64 [arrivals]."""
    arrived: np.ndarray
    """Index of the arriving client, int64 [arrivals]."""
    dropped: Mapping[str, int]
    """Number of dropped clients by reason."""
    busy: float
    """Mean number of clients in training."""

    @property
    def seconds(self) -> float:
        """Virtual time of all steps."""
        return float(self.steps[-1])

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON values, with the 10, 50 and 90 % quantiles of round trips and staleness."""
        rounds, arrivals = len(self.steps), len(self.arrivals)
        return {
            "rounds": rounds,
            "seconds": self.seconds,
            "seconds_per_round": self.seconds / rounds,
            "arrivals": arrivals,
            "arrivals_per_hour": 3600 * arrivals / self.seconds,
            "busy": self.busy,
            "dropped": dict(self.dropped),
            "round_trip": _find_quantiles(self.round_trips),
            "staleness": _find_quantiles(self.staleness),
            "clients": self.clients,
            "clients_without_update": self.clients - len(np.unique(self.arrived)),
            "share_of_slowest": self.share_of_slowest,
        }

    @property
    def share_of_slowest(self) -> float:
        """Share of the arrivals that come from the slowest quarter of the arriving clients, by their mean round trip."""
        clients, place, count = np.unique(self.arrived, return_inverse=True, return_counts=True)
        slowest = np.argsort(-np.bincount(place, self.round_trips) / count, kind="stable")[
            : math.ceil(len(clients) / 4)
        ]
        return float(count[slowest].sum() / count.sum())


def _find_quantiles(values: np.ndarray) -> dict[str, float]:
    shares = {"10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "largest": 1.0}
    return {name: float(np.quantile(values, share, method="inverted_cdf")) for name, share in shares.items()}


def forecast_steps(config: Config, population: Population) -> Forecast:
    """Compute the arrivals of all rounds of a run.

    A method whose choice of clients depends on the training chooses as in the first round.

    Args:
        config: Configuration with ``train.fleet``.
        population: Clients and their data.

    Raises:
        ConfigError: ``train.fleet`` is not set, or does not fit the clients.
    """
    if config.train.fleet is None:
        raise ConfigError(
            "train.fleet is not set. Add train.fleet, with the duration of the clients' work (train.fleet.seconds)"
        )
    clients, method = Clients(population, config, planning=True), config.components.method
    state = make_initial_state(config, clients, build_variants(method, clients.variants_of_parts(), config.run.seed))
    cohorts = {name: config.train.resolve_phase(name).cohort_size(clients.eligible) for name in config.phases.names}
    planner = StepPlanner(config.train.fleet, config, clients, cohorts, population.part_of)

    def draw(state: State, chosen: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        with naming_failures(method, "plan", f"round {state.round_index + 1}"):
            return method.plan(state, chosen, rng, cohort)

    steps: list[Step] = []
    in_flight, limit = NOBODY, math.inf
    if config.run.stop is not None and config.run.stop.seconds is not None:
        limit = config.run.stop.seconds
    while len(steps) < config.train.rounds and in_flight.fleet.seconds < limit:
        phase = config.phases.find(len(steps))
        if phase != state.phase:
            in_flight = in_flight.land()
        state = dataclasses.replace(state, round_index=len(steps), phase=phase)
        steps.append(planner.plan(state, in_flight, draw))
        in_flight = InFlight(steps[-1].fleet)
    return _summarise(steps, clients.eligible)


def _summarise(steps: Sequence[Step], clients: int) -> Forecast:
    used = [(flight, version) for version, step in enumerate(steps) for flight in step.arrivals]
    left = [(flight, step.fleet.seconds) for step in steps for flight, _ in step.dropped]
    left += [(flight, steps[-1].fleet.seconds) for flight in steps[-1].fleet.flights]
    work = sum(flight.start.seconds for flight, _ in used)
    work += sum(min(end, flight.arrival) - (flight.arrival - flight.start.seconds) for flight, end in left)
    return Forecast(
        clients,
        np.array([step.fleet.seconds for step in steps]),
        np.array([flight.arrival for flight, _ in used]),
        np.array([flight.start.seconds for flight, _ in used]),
        np.array([version - flight.version for flight, version in used]),
        np.array([flight.start.client for flight, _ in used]),
        Counter(reason for step in steps for _, reason in step.dropped),
        work / steps[-1].fleet.seconds,
    )
