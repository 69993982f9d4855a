"""The population as a sequence of Client values, made on demand: 100,000 clients cost a few arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from raydfl.core import seeds
from raydfl.core.types import Client, ModelSpec
from raydfl.data.population import Population
from raydfl.engine.config import Config

_REMEMBERED = 4096
"""Clients that are kept once made: those of a round are asked for several times."""


class Clients(Sequence[Client]):
    """Every client of a population with the architectures that were drawn for it (uniformly, by the run seed)."""

    def __init__(self, population: Population, config: Config) -> None:
        self._population = population
        self._specs: dict[str, list[list[ModelSpec]]] = {
            part: [
                [
                    ModelSpec(name, architecture, of.bands, len(of.classes), _frozen(options))
                    for architecture, options in choices
                ]
                for name, choices in config.parts.models.items()
            ]
            for part, of in population.each.items()
        }
        """By part and model: its architectures."""
        self._drawn: list[np.ndarray | None] = []
        for name, choices in config.parts.models.items():
            rng = seeds.generator(config.run.seed, 0, "", f"architecture/{name}")
            drawn = rng.integers(len(choices), size=len(population)) if len(choices) > 1 else None
            self._drawn.append(drawn)
        self._client = functools.lru_cache(_REMEMBERED)(self._make)

    def __len__(self) -> int:
        return len(self._population)

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...
    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._client(range(len(self))[index])

    def _make(self, position: int) -> Client:
        return Client(
            id=self._population.ids[position],
            index=position,
            num_examples=self._population.num_examples(position),
            models=self._models(position),
            profile=self._population.profile(position),
        )

    def by_id(self, client_id: str) -> Client:
        """The client of that id.

        Raises:
            DataError: there is none.
        """
        return self[self._population.index(client_id)]

    def index_of(self, client_id: str) -> int:
        """Position of a client in the population."""
        return self._population.index(client_id)

    def _models(self, position: int) -> tuple[ModelSpec, ...]:
        return tuple(
            specs[0] if drawn is None else specs[int(drawn[position])]
            for specs, drawn in zip(self._specs[self._population.part_of(position)], self._drawn, strict=True)
        )

    def variants(self) -> list[tuple[ModelSpec, ...]]:
        """Each distinct combination of architectures, in the order of first appearance."""
        return list(dict.fromkeys(specs for variants in self.variants_of_parts().values() for specs in variants))

    def variants_of_parts(self) -> dict[str, list[tuple[ModelSpec, ...]]]:
        """Each part's distinct combinations of architectures; under no name where there are no parts."""
        firsts = [part.first for part in self._population.parts] or [0]
        stops = [*firsts[1:], len(self)]
        return {name: self._variants(first, stop) for name, first, stop in zip(self._specs, firsts, stops, strict=True)}

    def _variants(self, first: int, stop: int) -> list[tuple[ModelSpec, ...]]:
        if all(drawn is None for drawn in self._drawn):
            return [self._models(first)]
        columns = [np.zeros(stop - first, np.int64) if d is None else d[first:stop] for d in self._drawn]
        _, places = np.unique(np.stack(columns, axis=1), axis=0, return_index=True)
        return [self._models(first + int(i)) for i in sorted(places)]


def _frozen(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options as a hashable value: lists become tuples."""
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(options.items()))
