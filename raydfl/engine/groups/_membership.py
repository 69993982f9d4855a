"""Membership of clients in groups, and keys of the groups' entries in the server's state.

The key of a group's entry ``global`` is the group's name, such as ``task1`` or ``task_phone``. Further entries have the name as
suffix: ``generator/task1``. Entries without a group serve clients that were never in a group.
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
"""Key of the membership in the state's ``extra``, as in run folders of version 1."""

PREFIX = "task"
"""Prefix of the groups' names."""


def entry_key(key: str, group: str) -> str:
    """Return the key of a group's entry.

    >>> entry_key("global", "task1"), entry_key("generator", "task1"), entry_key("generator", "")
    ('task1', 'generator/task1', 'generator')
    """
    if not group:
        return key
    return group if key == GLOBAL else f"{key}/{group}"


def split_key(key: str) -> tuple[str, str]:
    """Split the key of an entry into its group and the method's key.

    >>> split_key("task1"), split_key("generator/task_a/b"), split_key("generator")
    (('task1', 'global'), ('task_a/b', 'generator'), ('', 'generator'))
    """
    if key.startswith(PREFIX):
        return key, GLOBAL
    own, slash, group = key.partition(f"/{PREFIX}")
    return (PREFIX + group, own) if slash else ("", key)


@dataclasses.dataclass(frozen=True)
class Membership:
    """Groups of all clients. The state's ``extra`` stores it under :data:`BOOK`."""

    clients: Sequence[str]
    """Ids of all clients."""
    keys: Sequence[str]
    """Group of each client; empty: never in a group."""
    parts: Sequence[str]
    """Part of each client, for evaluations."""
    truth: Sequence[str] | None
    """True group of each client, for measurements; ``None``: unknown."""
    following: int = 1
    """Number of the next new group."""

    @classmethod
    def from_state(cls, state: State) -> Membership:
        """Read the membership in a state."""
        return cls(**state.extra[BOOK])

    def groups(self) -> dict[str, str]:
        """Return each client's group, by its id."""
        return dict(zip(self.clients, self.keys, strict=True))

    def sizes(self, group: str) -> Counter[str]:
        """Return the number of a group's members in each part."""
        return Counter(part for key, part in zip(self.keys, self.parts, strict=True) if key == group)

    def move(self, keys: Mapping[str, str], following: int) -> Membership:
        """Return a copy with new groups of some clients.

        Args:
            keys: New group by client id.
            following: Number of the next new group.
        """
        new = [keys.get(client, key) for client, key in zip(self.clients, self.keys, strict=True)]
        return dataclasses.replace(self, keys=new, following=following)

    def metrics(self) -> dict[str, Ratio | np.ndarray]:
        """Return the number of groups, their agreement with the truth, and the membership.

        ``tasks/membership`` is float64 [2, clients]: the number of each client's group (0: never in a group), and of its true group
        (-1: unknown).
        """
        numbers = {key: place for place, key in enumerate(sorted(set(self.keys) - {""}, key=_sort_key), start=1)}
        groups = [_read_number(key, numbers) for key in self.keys]
        metrics: dict[str, Ratio | np.ndarray] = {"tasks/groups": Ratio(len(numbers), 1)}
        codes = np.full(len(groups), -1.0)
        if self.truth is not None:
            kinds = {kind: code for code, kind in enumerate(sorted(set(self.truth)))}
            codes = np.array([kinds[kind] for kind in self.truth], np.float64)
            pairs = [(key, kind) for key, kind in zip(self.keys, self.truth, strict=True) if key]
            if pairs:
                keys, truth = zip(*pairs, strict=True)
                metrics["tasks/purity"] = Ratio(purity(keys, truth), 1)
                metrics["tasks/rand_index"] = Ratio(adjusted_rand_index(keys, truth), 1)
        metrics["tasks/membership"] = np.stack([np.array(groups, np.float64), codes])
        return metrics


def _read_number(key: str, numbers: Mapping[str, int]) -> int:
    """Return the number of a group: the permanent number in its name, or its position among all groups."""
    end = key.removeprefix(PREFIX)
    return int(end) if end.isdigit() else numbers.get(key, 0)


def _sort_key(key: str) -> tuple[int, str]:
    end = key.removeprefix(PREFIX)
    return (int(end), "") if end.isdigit() else (0, key)
