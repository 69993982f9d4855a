"""The population as a sequence of Client values, made on demand: 100,000 clients cost a few arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raydfl.core import seeds
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.sequences import OnDemand
from raydfl.core.types import Client, ModelSpec
from raydfl.data import DataSettings, Population, deal_values
from raydfl.engine.assembly import split_view, text_of
from raydfl.engine.config import Config
from raydfl.engine.draw import Draw, make_draw
from raydfl.models import INIT_FROM

_REMEMBERED = 4096
"""Clients that are kept once made: those of a round are asked for several times."""
_AT_ONCE = 1 << 20
"""Clients whose profiles are looked at together."""


class Clients(OnDemand[Client]):
    """Every client of a population with the architectures that its profile says, or that were drawn for it (by the run seed)."""

    def __init__(self, population: Population, config: Config, planning: bool = False) -> None:
        """Take note of what each client has.

        Args:
            population: the clients.
            config: of the run.
            planning: whether rounds are planned with them, so that each knows its weight in the draw. An actor has no use for it.
        """
        self._planning = planning
        self._population = population
        objective, settings = config.parts.method.objective, config.data.each
        self._dealt: dict[str, tuple[int, Mapping[str, tuple[Sequence[Any], np.ndarray]]]] = {}
        """By part: the index of its first client, and by name the values and which of them each client is dealt."""
        self._specs: dict[str, list[list[ModelSpec]]] = {}
        """By part and model: its architectures."""
        widest = max(len(of.classes) for of in population.parts.values())
        for part, of in population.parts.items():
            data, classes = settings[part], len(of.classes)
            values = {
                name: (profile.values, deal_values(name, profile, len(of), config.run.seed))
                for name, profile in data.profile.items()
                if profile.values
            }
            self._dealt[part] = population.spans[part].start, values
            outputs = objective.outputs(widest if config.data.heads == "common" else classes)
            width = None if outputs == classes else outputs
            self._specs[part] = [
                [_spec(name, architecture, options, of, data, width) for architecture, options in choices]
                for name, choices in config.parts.models.items()
            ]
        self._drawn: list[np.ndarray | None] = []
        for name, choices in config.parts.models.items():
            if name in config.parts.chosen_by:
                self._drawn.append(self._chosen(name, *config.parts.chosen_by[name]))
                continue
            rng = seeds.generator(config.run.seed, 0, "", f"architecture/{name}")
            drawn = rng.integers(len(choices), size=len(population)) if len(choices) > 1 else None
            self._drawn.append(None if drawn is None else _small(drawn))
        self._index = functools.lru_cache(_REMEMBERED)(population.index)
        self._settings = config.train.clients
        self._client = functools.lru_cache(_REMEMBERED)(self._make)
        self._method = config.parts.method
        self._read = self._method.needs.columns
        self._own_models = functools.lru_cache(_REMEMBERED)(self._narrowed)

    def __len__(self) -> int:
        return len(self._population)

    def item(self, position: int) -> Client:
        """Return a client."""
        client: Client = self._client(position)
        return client

    def _make(self, position: int) -> Client:
        profile = self._profile(position)
        read = tuple((name, profile[name]) for name in self._read if name in profile)
        return Client(
            id=self._population.ids[position],
            index=position,
            num_examples=self._population.num_examples(position),
            models=self._own_models(self._models(position), read),
            profile=profile,
            **self._drawn_with(position),
        )

    def _drawn_with(self, position: int) -> dict[str, Any]:
        """Return a client's weight and group in the draw, where they differ between clients."""
        if not self._planning or self.draw is None:
            return {}
        return {"chance": float(self.draw.chances[position]), "stratum": int(self.draw.strata[position])}

    @functools.cached_property
    def draw(self) -> Draw | None:
        """Every client's weight and group in the draw of a round; ``None``: all are drawn alike.

        Raises:
            ConfigError: ``train.clients`` does not fit the clients.
        """
        return None if self._settings is None else make_draw(self._settings, self._population, self._column)

    @property
    def eligible(self) -> int:
        """Clients that may take part in training."""
        return len(self) if self.draw is None else self.draw.eligible

    def _column(self, name: str) -> tuple[Sequence[Any], np.ndarray]:
        """Return a column of all profiles, dealt values among them: see :meth:`Population.column`."""
        known, of = self._population.column(name)
        values, places = [*known], of.astype(np.int32)
        for first, dealt_values in self._dealt.values():
            if name in dealt_values:
                own, own_of = dealt_values[name]
                places[first : first + len(own_of)] = own_of.astype(np.int32) + len(values)
                values += own
        return values, places

    def _narrowed(self, models: tuple[ModelSpec, ...], read: tuple[tuple[str, Any], ...]) -> tuple[ModelSpec, ...]:
        return self._method.client_models(models, dict(read))

    def _profile(self, position: int) -> dict[str, Any]:
        first, dealt_values = self._dealt[self._population.part_of(position)]
        own = {name: values[int(of[position - first])] for name, (values, of) in dealt_values.items()}
        return {**self._population.profile(position), **own}

    def _chosen(self, model: str, column: str, keys: Sequence[str]) -> np.ndarray:
        """Return the position of every client's architecture, by what its profile says.

        Raises:
            ConfigError: there is no architecture for what it says of a client.
        """
        number = {key: place for place, key in enumerate(keys)}
        places = _places(*self._column(column), number)
        missing = np.flatnonzero(places < 0)
        if len(missing):
            value = self._profile(int(missing[0])).get(column)
            raise ConfigError(
                f"models.{model}.choices: no architecture for client {self._population.ids[int(missing[0])]!r}, whose {column} is "
                f"{value!r}; {nearest(text_of(value), keys)}"
            )
        return _small(places)

    def by_id(self, client_id: str) -> Client:
        """Return the client of that id.

        Raises:
            DataError: there is none.
        """
        return self[self._index(client_id)]

    def views_of(self, client_id: str) -> str:
        """Return a client's ``data.views``, as in ``video+depth``; ``none`` if it has none of them."""
        return "+".join(self.by_id(client_id).profile["views"]) or "none"

    def index_of(self, client_id: str) -> int:
        """Return the position of a client in the population."""
        return self._index(client_id)

    def _models(self, position: int) -> tuple[ModelSpec, ...]:
        return tuple(
            specs[0] if drawn is None else specs[int(drawn[position])]
            for specs, drawn in zip(self._specs[self._population.part_of(position)], self._drawn, strict=True)
        )

    def classes_of(self, part: str) -> tuple[str, ...]:
        """Return the names of a part's classes."""
        return self._population.parts[part].classes

    def of_part(self, part: str) -> Sequence[Client]:
        """Return the clients of one part, made on demand."""
        return _Section(self, self._population.spans[part])

    def variants(self) -> list[tuple[ModelSpec, ...]]:
        """Return each distinct combination of architectures, in the order of first appearance."""
        return list(dict.fromkeys(specs for variants in self.variants_of_parts().values() for specs in variants))

    def variants_of_parts(self) -> dict[str, list[tuple[ModelSpec, ...]]]:
        """Return each part's distinct combinations of architectures, as the server has them."""
        return {part: self._variants(positions) for part, positions in self._population.spans.items()}

    def _variants(self, positions: range) -> list[tuple[ModelSpec, ...]]:
        return [self._models(position) for position in self._unlike(positions, self._drawn)]

    def built_in_parts(self) -> dict[str, list[tuple[ModelSpec, ...]]]:
        """Return what clients of each part build in place of their architectures, where it is another (Method.client_models).

        Raises:
            ConfigError: there is no such network for a client's profile.
        """
        read = [self._column(name)[1] for name in self._read]
        return {
            part: [
                own
                for position in self._unlike(positions, [*self._drawn, *read])
                if (own := self[position].models) != self._models(position)
            ]
            for part, positions in self._population.spans.items()
        }

    @staticmethod
    def _unlike(positions: range, columns: Sequence[np.ndarray | None]) -> list[int]:
        """Return the first of some clients with each combination of what columns say."""
        if all(column is None for column in columns):
            return [positions.start]
        given = [column for column in columns if column is not None]
        found: dict[tuple[int, ...], int] = {}
        for start in range(positions.start, positions.stop, _AT_ONCE):
            own = [column[start : min(start + _AT_ONCE, positions.stop)] for column in given]
            for place in _first_of_kinds(own):
                found.setdefault(tuple(int(column[place]) for column in own), start + place)
        return sorted(found.values())


class _Section(OnDemand[Client]):
    """Clients that follow one another in a population, made on demand."""

    def __init__(self, clients: Clients, positions: range) -> None:
        self._clients = clients
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def item(self, position: int) -> Client:
        """Return a client."""
        return self._clients[self._positions[position]]


def _small(places: np.ndarray) -> np.ndarray:
    """Return numbers from 0 on as integers as small as can be: there may be millions of clients."""
    return places.astype(np.min_scalar_type(int(places.max())))


def _first_of_kinds(columns: Sequence[np.ndarray]) -> list[int]:
    """Return the first place of each combination of numbers in columns of one length, ascending."""
    kinds, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        least = int(column.min())
        pairs = kinds * (int(column.max()) - least + 1) + column.astype(np.int64) - least
        found, kinds = np.unique(pairs, return_inverse=True)
        count = len(found)
    first = np.empty(count, np.int64)
    first[kinds[::-1]] = np.arange(len(kinds) - 1, -1, -1)  # of several written to one place the last counts
    return sorted(first.tolist())


def _places(values: Sequence[Any], of: np.ndarray, number: Mapping[str, int]) -> np.ndarray:
    """Return int32 [clients]: the number of what each client's profile says, -1 where it has none.

    Args:
        values: that the profile may say.
        of: int [clients]: the position of each client's, -1 for none.
        number: of each value's text.
    """
    found: np.ndarray = np.array([*(number.get(text_of(value), -1) for value in values), -1], np.int32)[of]
    return found


def _spec(
    name: str,
    architecture: str,
    options: Mapping[str, Any],
    population: Population,
    data: DataSettings,
    width: int | None,
) -> ModelSpec:
    view, own = split_view({key: value for key, value in options.items() if key != INIT_FROM})
    shape = population.shape(view, data)
    start = _frozen(options.get(INIT_FROM, {}))
    return ModelSpec(name, architecture, shape, len(population.classes), _frozen(own), width, start, view)


def _frozen(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options as a hashable value: lists become tuples, mappings pairs."""
    return tuple((key, _hashable(value)) for key, value in sorted(options.items()))


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _frozen(value)
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
