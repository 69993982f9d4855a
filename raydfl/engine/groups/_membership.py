"""Membership: which client is in which group, and the keys of the entries that groups have in the server's state.

A group's entry ``global`` has the group's name, ``task1`` or ``task_phone``. Its other entries have it behind theirs:
``generator/task1``. Entries without a group are those of clients that were in none yet.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from raydfl.core.clustering import adjusted_rand_index, purity
from raydfl.core.types import Ratio, State

GLOBAL = "global"

BOOK = "tasks"
"""The key of the membership in the state's ``extra``. Run folders of version 1 have it."""

PREFIX = "task"
"""The beginning of every group's name."""


def entry_key(key: str, group: str) -> str:
    """Return the key of a group's entry.

    >>> entry_key("global", "task1"), entry_key("generator", "task1"), entry_key("generator", "")
    ('task1', 'generator/task1', 'generator')
    """
    if not group:
        return key
    return group if key == GLOBAL else f"{key}/{group}"


def split_key(key: str) -> tuple[str, str]:
    """Return the group of an entry, and the method's key of it.

    >>> split_key("task1"), split_key("generator/task_a/b"), split_key("generator")
    (('task1', 'global'), ('task_a/b', 'generator'), ('', 'generator'))
    """
    if key.startswith(PREFIX):
        return key, GLOBAL
    own, slash, group = key.partition(f"/{PREFIX}")
    return (PREFIX + group, own) if slash else ("", key)


@dataclasses.dataclass(frozen=True)
class Membership:
    """The members of groups, as the state's ``extra`` holds them under :data:`BOOK`."""

    clients: Sequence[str]
    """Ids of all clients."""
    keys: Sequence[str]
    """The group of each client; empty: it was never in a group."""
    parts: Sequence[str]
    """The part of each, to measure with."""
    truth: Sequence[str] | None
    """The kinds that groups are compared with; ``None``: it is not known."""
    following: int = 1
    """The number of the next new group."""

    @classmethod
    def from_state(cls, state: State) -> Membership:
        """Return the membership that a state holds."""
        return cls(**state.extra[BOOK])

    def groups(self) -> dict[str, str]:
        """Return each client's group, by its id."""
        return dict(zip(self.clients, self.keys, strict=True))

    def sizes(self, group: str) -> Counter[str]:
        """Return the number of a group's members in each part."""
        return Counter(part for key, part in zip(self.keys, self.parts, strict=True) if key == group)

    def move(self, keys: Mapping[str, str], following: int) -> Membership:
        """Return the membership after some clients changed their groups, by id."""
        new = [keys.get(client, key) for client, key in zip(self.clients, self.keys, strict=True)]
        return dataclasses.replace(self, keys=new, following=following)

    def metrics(self) -> dict[str, Ratio | np.ndarray]:
        """Return the number of groups, their agreement with the truth, and the membership.

        ``tasks/membership`` is float64 [2, clients]: the number of each client's group, 0 before it was in one; and of the truth.
        """
        numbers = {key: place for place, key in enumerate(sorted(set(self.keys) - {""}, key=_natural), start=1)}
        groups = [_number(key, numbers) for key in self.keys]
        found: dict[str, Ratio | np.ndarray] = {"tasks/groups": Ratio(len(numbers), 1)}
        codes = np.full(len(groups), -1.0)
        if self.truth is not None:
            kinds = {kind: code for code, kind in enumerate(sorted(set(self.truth)))}
            codes = np.array([kinds[kind] for kind in self.truth], np.float64)
            pairs = [(key, kind) for key, kind in zip(self.keys, self.truth, strict=True) if key]
            if pairs:
                keys, truth = zip(*pairs, strict=True)
                found["tasks/purity"] = Ratio(purity(keys, truth), 1)
                found["tasks/rand_index"] = Ratio(adjusted_rand_index(keys, truth), 1)
        found["tasks/membership"] = np.stack([np.array(groups, np.float64), codes])
        return found


def _number(key: str, numbers: Mapping[str, int]) -> int:
    """Return the number of a group: the one in its name, which lasts, or its place among all."""
    end = key.removeprefix(PREFIX)
    return int(end) if end.isdigit() else numbers.get(key, 0)


def _natural(key: str) -> tuple[int, str]:
    end = key.removeprefix(PREFIX)
    return (int(end), "") if end.isdigit() else (0, key)
