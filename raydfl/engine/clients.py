"""The population as a sequence of clients. Clients are created on demand, so 100,000 of them cost only a few arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raydfl.core import seeds
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.sequences import OnDemand
from raydfl.core.types import Client, ModelSpec
from raydfl.data import DataSettings, Population, deal_values
from raydfl.engine.assembly import format_value, split_view
from raydfl.engine.client_sampling import Draw, Turns, make_draw
from raydfl.engine.config import Config
from raydfl.models import INIT_FROM

_CACHE_SIZE = 4096
"""Number of cached clients. A round looks up each client of its cohort several times."""
_CHUNK = 1 << 20
"""Number of clients whose profiles are compared at a time."""


class Clients(OnDemand[Client]):
    """Clients of a population, each with the architectures that its profile selects or the run seed draws."""

    def __init__(self, population: Population, config: Config, planning: bool = False) -> None:
        """Read the profiles and draw the architectures.

        Args:
            population: The population.
            config: Configuration of the run.
            planning: Whether to set ``Client.chance`` and ``Client.stratum``, which only the planning of rounds needs.
        """
        self._planning = planning
        self._population = population
        objective, settings = config.components.method.objective, config.data.each
        self._dealt: dict[str, tuple[int, Mapping[str, tuple[Sequence[Any], np.ndarray]]]] = {}
        """For each part, the index of its first client, and its ``data.profile``: values, and positions in them [clients]."""
        self._specs: dict[str, list[list[ModelSpec]]] = {}
        """Architectures by part and model."""
        widest = max(len(part_data.classes) for part_data in population.parts.values())
        for part, part_data in population.parts.items():
            data, classes = settings[part], len(part_data.classes)
            values = {
                name: (profile.values, deal_values(name, profile, len(part_data), config.run.seed))
                for name, profile in data.profile.items()
                if profile.values
            }
            self._dealt[part] = population.spans[part].start, values
            outputs = objective.outputs(widest if config.data.heads == "common" else classes)
            width = None if outputs == classes else outputs
            self._specs[part] = [
                [_make_spec(name, architecture, options, part_data, data, width) for architecture, options in choices]
                for name, choices in config.components.models.items()
            ]
        self._choices: list[np.ndarray | None] = []
        """For each model, the position of every client's architecture; ``None``: all clients have the same."""
        for name, choices in config.components.models.items():
            if name in config.components.chosen_by:
                self._choices.append(self._choose_architectures(name, *config.components.chosen_by[name]))
                continue
            rng = seeds.generator(config.run.seed, 0, "", f"architecture/{name}")
            drawn = rng.integers(len(choices), size=len(population)) if len(choices) > 1 else None
            self._choices.append(None if drawn is None else _shrink(drawn))
        self._index = functools.lru_cache(_CACHE_SIZE)(population.index)
        self._settings = config.train.clients
        self._seed = config.run.seed
        self._client = functools.lru_cache(_CACHE_SIZE)(self._make_client)
        self._method = config.components.method
        self._read = self._method.needs.columns
        self._own_models = functools.lru_cache(_CACHE_SIZE)(self._narrow)

    def __len__(self) -> int:
        return len(self._population)

    def item(self, position: int) -> Client:
        """Return the client at a position of the population."""
        client: Client = self._client(position)
        return client

    def _make_client(self, position: int) -> Client:
        profile = self._read_profile(position)
        read = tuple((name, profile[name]) for name in self._read if name in profile)
        return Client(
            id=self._population.ids[position],
            index=position,
            num_examples=self._population.num_examples(position),
            models=self._own_models(self._select_models(position), read),
            profile=profile,
            **self._find_chance(position),
        )

    def _find_chance(self, position: int) -> dict[str, Any]:
        """Return a client's weight and stratum in the sampling of cohorts, unless they are equal for all clients."""
        if not self._planning or self.draw is None:
            return {}
        return {"chance": float(self.draw.chances[position]), "stratum": int(self.draw.strata[position])}

    @functools.cached_property
    def draw(self) -> Draw | None:
        """Weights and strata of all clients in the sampling of cohorts; ``None``: uniform sampling.

        Raises:
            ConfigError: ``train.clients`` does not fit the clients.
        """
        return None if self._settings is None else make_draw(self._settings, self._population, self.read_column)

    @property
    def eligible(self) -> int:
        """Number of clients that may take part in training."""
        return len(self) if self.draw is None else self.draw.eligible

    def find_available(self, round_index: int) -> Clients | Available:
        """Return the clients whose turn it is after a number of completed rounds (``train.clients.rest``)."""
        return self if self._turns is None else Available(self, self._turns.find_resting(round_index))

    @functools.cached_property
    def _turns(self) -> Turns | None:
        if self.draw is None or self._settings is None or self._settings.rest == 1:
            return None
        return Turns(np.flatnonzero(self.draw.chances), len(self), self._settings.rest, self._seed)

    def read_column(self, name: str) -> tuple[Sequence[Any], np.ndarray]:
        """Return a column of all profiles, including ``data.profile``.

        Returns:
            Values, and the position of each client's value [clients]. -1 means unknown.
        """
        known, positions = self._population.column(name)
        values, places = [*known], positions.astype(np.int32)
        for first, dealt_values in self._dealt.values():
            if name in dealt_values:
                own, own_places = dealt_values[name]
                places[first : first + len(own_places)] = own_places.astype(np.int32) + len(values)
                values += own
        return values, places

    def _narrow(self, models: tuple[ModelSpec, ...], read: tuple[tuple[str, Any], ...]) -> tuple[ModelSpec, ...]:
        return self._method.client_models(models, dict(read))

    def _read_profile(self, position: int) -> dict[str, Any]:
        first, dealt_values = self._dealt[self._population.part_of(position)]
        own = {name: values[int(places[position - first])] for name, (values, places) in dealt_values.items()}
        return {**self._population.profile(position), **own}

    def _choose_architectures(self, model: str, column: str, keys: Sequence[str]) -> np.ndarray:
        """Return the position of every client's architecture, selected by a profile column.

        Raises:
            ConfigError: A client's value has no architecture.
        """
        position_of = {key: place for place, key in enumerate(keys)}
        places = _map_values(*self.read_column(column), position_of)
        missing = np.flatnonzero(places < 0)
        if len(missing):
            value = self._read_profile(int(missing[0])).get(column)
            raise ConfigError(
                f"models.{model}.choices: no architecture for client {self._population.ids[int(missing[0])]!r}, whose {column} is "
                f"{value!r}. {nearest(format_value(value), keys)}"
            )
        return _shrink(places)

    def by_id(self, client_id: str) -> Client:
        """Return the client with this id.

        Raises:
            DataError: The id is unknown.
        """
        return self[self._index(client_id)]

    def views_of(self, client_id: str) -> str:
        """Return the ``data.views`` of a client, such as ``video+depth``, or ``none``."""
        return "+".join(self.by_id(client_id).profile["views"]) or "none"

    def index_of(self, client_id: str) -> int:
        """Return the position of a client in the population.

        Raises:
            DataError: The id is unknown.
        """
        return self._index(client_id)

    def _select_models(self, position: int) -> tuple[ModelSpec, ...]:
        return tuple(
            specs[0] if chosen is None else specs[int(chosen[position])]
            for specs, chosen in zip(self._specs[self._population.part_of(position)], self._choices, strict=True)
        )

    def classes_of(self, part: str) -> tuple[str, ...]:
        """Return the names of a part's classes."""
        return self._population.parts[part].classes

    def of_part(self, part: str) -> Sequence[Client]:
        """Return the clients of a part. They are created on demand."""
        return _Section(self, self._population.spans[part])

    def variants(self) -> list[tuple[ModelSpec, ...]]:
        """Return each distinct combination of architectures, in the order of first appearance."""
        return list(dict.fromkeys(specs for variants in self.variants_of_parts().values() for specs in variants))

    def variants_of_parts(self) -> dict[str, list[tuple[ModelSpec, ...]]]:
        """Return the distinct combinations of architectures of each part, as the server has them."""
        return {part: self._find_variants(positions) for part, positions in self._population.spans.items()}

    def _find_variants(self, positions: range) -> list[tuple[ModelSpec, ...]]:
        return [self._select_models(position) for position in self._find_distinct(positions, self._choices)]

    def narrow_variants(self) -> dict[str, list[tuple[ModelSpec, ...]]]:
        """Return the distinct combinations of ``Method.client_models`` of each part that differ from the server's networks.

        Raises:
            ConfigError: The method has no network for a client's profile.
        """
        read = [self.read_column(name)[1] for name in self._read]
        return {
            part: [
                own
                for position in self._find_distinct(positions, [*self._choices, *read])
                if (own := self[position].models) != self._select_models(position)
            ]
            for part, positions in self._population.spans.items()
        }

    @staticmethod
    def _find_distinct(positions: range, columns: Sequence[np.ndarray | None]) -> list[int]:
        """Return the first client with each combination of values in some columns."""
        if all(column is None for column in columns):
            return [positions.start]
        varying = [column for column in columns if column is not None]
        first: dict[tuple[int, ...], int] = {}
        for start in range(positions.start, positions.stop, _CHUNK):
            chunk = [column[start : min(start + _CHUNK, positions.stop)] for column in varying]
            for place in _find_first(chunk):
                first.setdefault(tuple(int(column[place]) for column in chunk), start + place)
        return sorted(first.values())


class _Section(OnDemand[Client]):
    """Consecutive clients of a population, created on demand."""

    def __init__(self, clients: Clients, positions: range) -> None:
        self._clients = clients
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def item(self, position: int) -> Client:
        """Return the client at a position of the section."""
        return self._clients[self._positions[position]]


class Available(OnDemand[Client]):
    """The available clients, created on demand.

    Args:
        clients: All clients.
        unavailable: Sorted indices of unavailable clients, int [unavailable].
    """

    def __init__(self, clients: Clients, unavailable: np.ndarray) -> None:
        self._clients = clients
        self._unavailable = unavailable
        # Number of available clients before each unavailable one
        self._before = self._unavailable - np.arange(len(unavailable))

    def __len__(self) -> int:
        return len(self._clients) - len(self._unavailable)

    def item(self, position: int) -> Client:
        """Return the client at a position among the available ones."""
        return self._clients[position + int(np.searchsorted(self._before, position, side="right"))]

    def has(self, index: int) -> bool:
        """Return whether a client is available, by its index among all clients."""
        place = int(np.searchsorted(self._unavailable, index))
        return place == len(self._unavailable) or int(self._unavailable[place]) != index

    @functools.cached_property
    def draw(self) -> Draw | None:
        """Weights and strata of the available clients; ``None``: uniform sampling."""
        whole = self._clients.draw
        if whole is None:
            return None
        kept = {name: np.delete(getattr(whole, name), self._unavailable) for name in ("chances", "strata")}
        return dataclasses.replace(whole, **kept)


def _shrink(places: np.ndarray) -> np.ndarray:
    """Convert non-negative integers to the smallest type, because a population may have millions of clients."""
    return places.astype(np.min_scalar_type(int(places.max())))


def _find_first(columns: Sequence[np.ndarray]) -> list[int]:
    """Return the first row of each combination of integers in columns of equal length, in ascending order."""
    kinds, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        least = int(column.min())
        pairs = kinds * (int(column.max()) - least + 1) + column.astype(np.int64) - least
        distinct, kinds = np.unique(pairs, return_inverse=True)
        count = len(distinct)
    first = np.empty(count, np.int64)
    first[kinds[::-1]] = np.arange(len(kinds) - 1, -1, -1)  # reversed, because the last write to an index wins
    return sorted(first.tolist())


def _map_values(values: Sequence[Any], places: np.ndarray, position_of: Mapping[str, int]) -> np.ndarray:
    """Map the clients' values of a column to positions, int32 [clients]. -1 means unknown.

    Args:
        values: Values of the column.
        places: Position of each client's value, int [clients]. -1 means unknown.
        position_of: Position of each value's text.
    """
    mapped: np.ndarray = np.array([*(position_of.get(format_value(v), -1) for v in values), -1], np.int32)[places]
    return mapped


def _make_spec(
    name: str,
    architecture: str,
    options: Mapping[str, Any],
    population: Population,
    data: DataSettings,
    width: int | None,
) -> ModelSpec:
    view, own = split_view({key: value for key, value in options.items() if key != INIT_FROM})
    shape = population.shape(view, data)
    start = _freeze(options.get(INIT_FROM, {}))
    return ModelSpec(name, architecture, shape, len(population.classes), _freeze(own), width, start, view)


def _freeze(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Convert options to a hashable value, with tuples in place of lists and pairs in place of mappings."""
    return tuple((key, _freeze_value(value)) for key, value in sorted(options.items()))


def _freeze_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _freeze(value)
    return tuple(map(_freeze_value, value)) if isinstance(value, list) else value
