"""The draw of a round's clients: who may take part, with what weight, and evenly over which groups (``train.clients``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.data import Population
from raydfl.engine.assembly import text_of
from raydfl.training import ClientSettings

_LARGEST = 1e100
"""Largest weight, and the inverse of the smallest: sums of them and shares of the sums are finite and above 0."""

Column = Callable[[str], tuple[Sequence[Any], np.ndarray]]
"""A function that gives, for a column's name, its values and int [clients], the position of each client's; -1: none is known."""


@dataclass(frozen=True)
class Draw:
    """Every client's weight and group."""

    chances: np.ndarray
    """float64 [clients]: weights; 0: the client does not take part."""
    strata: np.ndarray
    """int [clients]: groups, from 0 on."""

    @property
    def eligible(self) -> int:
        """Clients that may take part."""
        return int(np.count_nonzero(self.chances))


def make_draw(settings: ClientSettings, population: Population, column: Column) -> Draw:
    """Return the draw that the settings ask for.

    Args:
        settings: ``train.clients``.
        population: the clients.
        column: what profiles say.

    Raises:
        ConfigError: a value that no client has, a client that there is not, a column without numbers, or nobody is left.
    """
    chances = np.ones(len(population))
    for name, wanted in settings.where.items():
        values, places = column(name)
        accepted = [text_of(value) for value in wanted]
        fits = np.array([text_of(value) in accepted for value in values] + [False])  # place -1: unknown
        if not fits.any():
            raise ConfigError(
                f"train.clients.where.{name}: no client has {' or '.join(accepted)}; "
                f"{nearest(accepted[0], [*map(text_of, values)])}"
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
        chances *= _numbers(settings.weight, *column(settings.weight))
    if not chances.any():
        raise ConfigError(
            f"train.clients leaves none of {len(population)} clients; take back one of its conditions (where, ids, min_examples), "
            f"or give somebody a weight above 0"
        )
    strata = np.broadcast_to(np.int8(0), len(population))
    if settings.strata is not None:
        strata = column(settings.strata)[1] + 1  # those of which nothing is known are a group too
    return Draw(chances, strata)


def _numbers(name: str, values: Sequence[Any], places: np.ndarray) -> np.ndarray:
    """Return a column as weights: float64 [clients], 0 where nothing is known.

    Raises:
        ConfigError: a value is no number, below 0, or so large or small that shares of sums are not numbers.
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(
                f"train.clients.weight: {name} has {text_of(value)!r}; a weight must be a number from 0 on, or take examples"
            )
        if value and not 1 / _LARGEST <= value <= _LARGEST:
            raise ConfigError(
                f"train.clients.weight: {name} has {text_of(value)!r}; a weight must be 0 or from {1 / _LARGEST:g} to "
                f"{_LARGEST:g}, because only ratios count: divide all of them by the same number"
            )
    weights: np.ndarray = np.array([*map(float, values), 0.0])[places]
    return weights
