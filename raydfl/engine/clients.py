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
from raydfl.data import DataSettings, Population, dealt
from raydfl.engine.assembly import split_view, text_of
from raydfl.engine.config import Config
from raydfl.models import INIT_FROM

_REMEMBERED = 4096
"""Clients that are kept once made: those of a round are asked for several times."""


class Clients(OnDemand[Client]):
    """Every client of a population with the architectures that its profile says, or that were drawn for it (by the run seed)."""

    def __init__(self, population: Population, config: Config) -> None:
        self._population = population
        firsts = {part.name: part.first for part in population.parts} or {"": 0}
        objective, settings = config.parts.method.objective, config.data.each
        self._dealt: dict[str, tuple[int, Mapping[str, tuple[Sequence[Any], np.ndarray]]]] = {}
        """By part: the index of its first client, and by name the values and which of them each client is dealt."""
        self._specs: dict[str, list[list[ModelSpec]]] = {}
        """By part and model: its architectures."""
        widest = max(len(of.classes) for of in population.each.values())
        for part, of in population.each.items():
            data, classes = settings[part], len(of.classes)
            values = {
                name: (profile.values, dealt(name, profile, len(of), config.run.seed))
                for name, profile in data.profile.items()
                if profile.values
            }
            self._dealt[part] = firsts[part], values
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
            self._drawn.append(drawn)
        self._client = functools.lru_cache(_REMEMBERED)(self._make)

    def __len__(self) -> int:
        return len(self._population)

    def item(self, position: int) -> Client:
        """Return a client."""
        client: Client = self._client(position)
        return client

    def _make(self, position: int) -> Client:
        return Client(
            id=self._population.ids[position],
            index=position,
            num_examples=self._population.num_examples(position),
            models=self._models(position),
            profile=self._profile(position),
        )

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
        places = _places(*self._population.column(column), number)
        for first, dealt_values in self._dealt.values():
            if column in dealt_values:
                own = _places(*dealt_values[column], number)
                places[first : first + len(own)] = own
        missing = np.flatnonzero(places < 0)
        if len(missing):
            value = self._profile(int(missing[0])).get(column)
            raise ConfigError(
                f"models.{model}.choices: no architecture for client {self._population.ids[int(missing[0])]!r}, whose {column} is "
                f"{value!r}; {nearest(text_of(value), keys)}"
            )
        return places

    def by_id(self, client_id: str) -> Client:
        """Return the client of that id.

        Raises:
            DataError: there is none.
        """
        return self[self._population.index(client_id)]

    def index_of(self, client_id: str) -> int:
        """Return the position of a client in the population."""
        return self._population.index(client_id)

    def _models(self, position: int) -> tuple[ModelSpec, ...]:
        return tuple(
            specs[0] if drawn is None else specs[int(drawn[position])]
            for specs, drawn in zip(self._specs[self._population.part_of(position)], self._drawn, strict=True)
        )

    def of_part(self, part: str) -> Sequence[Client]:
        """Return the clients of one part, made on demand; all of them where there are no parts (``part`` is empty)."""
        return _Section(self, self._sections()[part]) if part else self

    def _sections(self) -> dict[str, range]:
        """Return the positions of each part's clients."""
        firsts = [part.first for part in self._population.parts] or [0]
        stops = [*firsts[1:], len(self)]
        return dict(zip(self._specs, map(range, firsts, stops), strict=True))

    def variants(self) -> list[tuple[ModelSpec, ...]]:
        """Return each distinct combination of architectures, in the order of first appearance."""
        return list(dict.fromkeys(specs for variants in self.variants_of_parts().values() for specs in variants))

    def variants_of_parts(self) -> dict[str, list[tuple[ModelSpec, ...]]]:
        """Return each part's distinct combinations of architectures; under no name where there are no parts."""
        return {part: self._variants(positions) for part, positions in self._sections().items()}

    def _variants(self, positions: range) -> list[tuple[ModelSpec, ...]]:
        if all(drawn is None for drawn in self._drawn):
            return [self._models(positions.start)]
        part = slice(positions.start, positions.stop)
        columns = [np.zeros(len(positions), np.int64) if d is None else d[part] for d in self._drawn]
        _, places = np.unique(np.stack(columns, axis=1), axis=0, return_index=True)
        return [self._models(positions[int(i)]) for i in sorted(places)]


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


def _places(values: Sequence[Any], of: np.ndarray, number: Mapping[str, int]) -> np.ndarray:
    """Return int64 [clients]: the number of what each client's profile says, -1 where it has none.

    Args:
        values: that the profile may say.
        of: int [clients]: the position of each client's, -1 for none.
        number: of each value's text.
    """
    found: np.ndarray = np.array([*(number.get(text_of(value), -1) for value in values), -1], np.int64)[of]
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
    settings = data.views.get(view)
    shape = data.pipeline.shape(population.bands)
    if settings is not None:
        shape = settings.pipeline.shape(settings.features.bands)
    start = _frozen(options.get(INIT_FROM, {}))
    return ModelSpec(name, architecture, shape, len(population.classes), _frozen(own), width, start, view)


def _frozen(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options as a hashable value: lists become tuples, mappings pairs."""
    return tuple((key, _hashable(value)) for key, value in sorted(options.items()))


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _frozen(value)
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
