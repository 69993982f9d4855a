"""Profiles: what is known of each client besides its examples (group, noise, wrong labels, views, columns of a user's own)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raydfl.core.sequences import OnDemand
from raydfl.data.names import Names
from raydfl.data.population_file import PRESENCE

TYPES: Mapping[str, Callable[[str], bool | int | float]] = {"bool": "True".__eq__, "int": int, "float": float}
"""Types of columns that are no text, and the way from the stored text back to a value."""

Column = tuple[Sequence[Any], np.ndarray]
"""Values, and int [clients]: the position of each client's among them; -1 where nothing is known of it."""


class ClientProfiles:
    """The profiles of all clients, each name in them a column.

    Args:
        arrays: of the population.
        clients: how many there are.
        views: names of the further views.
        types: keys of :data:`TYPES` by column. Other columns are text.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], clients: int, views: Sequence[str], types: Mapping[str, str]
    ) -> None:
        self._arrays, self._clients, self._views = arrays, clients, tuple(views)
        self._groups = Names.among(arrays, "groups")
        of_columns = [name.split("/")[1] for name in arrays if name.startswith("profile/") and name.endswith("/of")]
        texts = {name: Names.among(arrays, f"profile/{name}") for name in of_columns}
        self._columns: dict[str, Sequence[Any]] = texts | {
            name: _Typed(texts[name], TYPES[types[name]]) for name in types
        }
        self._alike: dict[int, np.ndarray] = {}
        """The same number for each client, by number."""

    def of(self, client: int) -> dict[str, Any]:
        """Return what is known of a client, by name."""
        known = {}
        for name in ("group", "noisy", "label_errors", "views", *self._columns):
            values, of = self.column(name)
            if of[client] >= 0:
                known[name] = values[int(of[client])]
        return known

    def column(self, name: str) -> Column:
        """Return what is known of all clients under one name."""
        if name == "group":
            return self._groups, self._of_clients("groups_of", -1)
        if name in ("noisy", "label_errors"):
            return (False, True), self._of_clients(name, 0).view(np.int8)
        if name == "views" and self._views:
            return self._sets_of_views
        if name in self._columns:
            return self._columns[name], self._arrays[f"profile/{name}/of"]
        return (), self._of_clients("", -1)

    def _of_clients(self, name: str, other: int) -> np.ndarray:
        """Return an array of that name with one number for each client; ``other`` for all where it is not there."""
        if name in self._arrays:
            return self._arrays[name]
        if other not in self._alike:
            self._alike[other] = np.broadcast_to(np.int8(other), self._clients)
        return self._alike[other]

    def owners(self, view: str) -> np.ndarray:
        """Return which clients have a further view of any of their training examples: bool [clients]."""
        everybody = np.ones(self._clients, bool)  # a population of an early version does not say it
        return self._arrays.get(f"{PRESENCE}/{view}", everybody)

    @functools.cached_property
    def _sets_of_views(self) -> Column:
        """Return each set of further views that clients have, and the position of each client's."""
        table = np.stack([self.owners(view) for view in self._views], axis=1)
        kinds, of = np.unique(table, axis=0, return_inverse=True)
        names = np.array([*self._views])
        return [tuple(names[kind].tolist()) for kind in kinds], of.reshape(-1)


class _Typed(OnDemand[bool | int | float]):
    """Values of a column that is stored as text."""

    def __init__(self, texts: Sequence[str], parse: Callable[[str], bool | int | float]) -> None:
        self._texts, self._parse = texts, parse

    def __len__(self) -> int:
        return len(self._texts)

    def item(self, position: int) -> bool | int | float:
        """Return a value."""
        return self._parse(self._texts[position])


def joined(columns: Iterable[Column]) -> Column:
    """Return the column of all clients, of which each of ``columns`` is about some, one after another."""
    values: list[Any] = []
    places = []
    for own, of in columns:
        places.append(np.where(of < 0, -1, of.astype(np.int64) + len(values)))
        values += own
    return values, np.concatenate(places)
