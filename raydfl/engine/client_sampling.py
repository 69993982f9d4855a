"""Eligibility, weights and strata of clients in the sampling of cohorts (``train.clients``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydfl.core import seeds
from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.data import Population
from raydfl.engine.assembly import format_value
from raydfl.training import ClientSettings

_LARGEST = 1e100
"""Largest weight, and inverse of the smallest. With it, sums of weights are finite and fractions of the sums are above 0."""

Column = Callable[[str], tuple[Sequence[Any], np.ndarray]]
"""Function from a column's name to its values and the position of each client's value, int [clients]. -1 means unknown."""


@dataclass(frozen=True)
class Draw:
    """Weights and strata of all clients in the sampling of cohorts."""

    chances: np.ndarray
    """Weights, float64 [clients]. 0 excludes the client."""
    strata: np.ndarray
    """Strata, int [clients], numbered from 0."""

    @property
    def eligible(self) -> int:
        """Number of clients that may take part."""
        return int(np.count_nonzero(self.chances))


def make_draw(settings: ClientSettings, population: Population, column: Column) -> Draw:
    """Compute the sampling weights and strata of a population's clients from ``train.clients``.

    Args:
        settings: ``train.clients``.
        population: Clients of the run.
        column: Columns of the clients' profiles.

    Raises:
        ConfigError: A value or id has no client, a column has values that are no weights, or no client is left.
    """
    chances = np.ones(len(population))
    for name, wanted in settings.where.items():
        values, places = column(name)
        accepted = [format_value(value) for value in wanted]
        fits = np.array(
            [format_value(value) in accepted for value in values] + [False]
        )  # the last is place -1, unknown
        if not fits.any():
            raise ConfigError(
                f"train.clients.where.{name}: no client has {' or '.join(accepted)}. "
                f"{nearest(accepted[0], [*map(format_value, values)])}"
            )
        chances[~fits[places]] = 0
    if settings.ids is not None:
        listed = np.zeros(len(population), bool)
        for client in settings.ids:
            try:
                listed[population.index(client)] = True
            except DataError as error:
                raise ConfigError(f"train.clients.ids: {error}") from error
        chances[~listed] = 0
    if settings.min_examples or settings.weight == "examples":
        sizes = population.sizes()
        chances[sizes < settings.min_examples] = 0
        if settings.weight == "examples":
            chances *= sizes
    if settings.weight not in (None, "examples"):
        chances *= _read_weights(settings.weight, *column(settings.weight))
    if not chances.any():
        raise ConfigError(
            f"train.clients excludes all {len(population)} clients. Remove one of its conditions (where, ids, min_examples), or "
            f"give a client a weight above 0"
        )
    strata = np.broadcast_to(np.int8(0), len(population))  # a single stratum, without memory for each client
    if settings.strata is not None:
        strata = column(settings.strata)[1] + 1  # clients with an unknown value (-1) are a stratum too
    return Draw(chances, strata)


class Turns:
    """Groups of clients in turn (``train.clients.rest``): one group in each round.

    Args:
        eligible: Indices of the eligible clients, int [eligible].
        clients: Number of all clients.
        rest: Number of groups. Their sizes differ by at most 1.
        seed: Seed of the run.
    """

    def __init__(self, eligible: np.ndarray, clients: int, rest: int, seed: int) -> None:
        self._rest = rest
        self._groups = np.full(clients, -1, np.int32)
        self._groups[seeds.generator(seed, 0, "", "rest").permutation(eligible)] = np.arange(len(eligible)) % rest

    def find_resting(self, round_index: int) -> np.ndarray:
        """Return the sorted indices of the clients that may not take part after a number of completed rounds, int [clients]."""
        return np.flatnonzero(self._groups != round_index % self._rest)


def _read_weights(name: str, values: Sequence[Any], places: np.ndarray) -> np.ndarray:
    """Convert a column to weights, float64 [clients]. The weight of an unknown value is 0.

    Raises:
        ConfigError: A value is no number, negative, or outside the range of weights.
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(
                f"train.clients.weight: {name} has {format_value(value)!r}, but weights must be numbers of at least 0. Choose a "
                f"numeric column, or examples"
            )
        if value and not 1 / _LARGEST <= value <= _LARGEST:
            raise ConfigError(
                f"train.clients.weight: {name} has {format_value(value)!r}, but weights must be 0 or from {1 / _LARGEST:g} to "
                f"{_LARGEST:g}. Divide all of them by the same number, because only their ratios matter"
            )
    weights: np.ndarray = np.array([*map(float, values), 0.0])[places]
    return weights
