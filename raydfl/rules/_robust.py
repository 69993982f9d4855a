"""The common part of the robust rules: who has a say, numbers of clients from shares, and means of what lies in the middle.

All of them see a group's tensors as one vector for each client. Weights that the clients send (their numbers of examples) count
only where a rule says so: who lies about a model lies about them too. A client of weight 0 has no say. Where single tensors or
elements of a client have no weight (masks), rules that go element by element do without them, and for rules that measure
distances the client has the server's value there, as if it had left them as they were. What a client did not send because its
tensors were cut has no weight either.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.rules._collecting import CollectingRule
from raydfl.rules._group import Group

Byzantine = Annotated[
    float,
    Field(ge=0, lt=0.5, description="share of the clients that may send anything, 0..0.5; rounded down to clients"),
]
"""The option of the rules that must know how many attackers to expect."""


def count_of(share: float, clients: int) -> int:
    """Return ``floor(share * clients)`` of the decimal number that the user wrote: 0.29 * 100 is 28.999... in binary."""
    return math.floor(share * clients + 1e-9)


@dataclass(frozen=True)
class RobustRule(CollectingRule):
    """A rule over the clients that have any weight. A subclass decides what they make together."""

    @abstractmethod
    def decide(self, voters: Group) -> np.ndarray:
        """Return the server's new values, float [elements]; may set ``voters.influence``.

        Args:
            voters: at least one client, each with a value for every element.
        """

    def combine(self, group: Group) -> np.ndarray:
        """See :class:`CollectingRule`."""
        voters = group.voters()
        if not voters.positions:
            return group.server
        vector = self.decide(voters.group)
        if voters.group.influence is not None and voters.group is not group:
            group.influence = np.zeros(len(group.rows))
            group.influence[list(voters.positions)] = voters.group.influence
        return vector


@dataclass(frozen=True)
class MiddleRule(CollectingRule):
    """A rule that averages, element by element, what lies in the middle of the sorted values. A subclass says how far out."""

    @abstractmethod
    def cut(self, clients: np.ndarray) -> np.ndarray:
        """Return how many values to leave out at either end if this many clients have one: int64, less than half of ``clients``."""

    def combine(self, group: Group) -> np.ndarray:
        """See :class:`CollectingRule`."""
        voters = group.voters(fill=np.inf)
        vector = group.server.copy()
        if not voters.positions:
            return vector
        clients = len(voters.positions)
        lowest = int(self.cut(np.array(clients)))
        counts = np.subtract(clients, np.sum(voters.masks, axis=0)) if voters.masks else None
        for begin, end, ordered in voters.group.ordered():
            if counts is None:
                vector[begin:end] = ordered[:, lowest : clients - lowest].mean(axis=1, dtype=np.float64)
                continue
            having = counts[begin:end]
            cut = self.cut(having)
            place = np.arange(clients)
            middle = (place >= cut[:, None]) & (place < (having - cut)[:, None])
            sums = np.where(middle, ordered, 0).sum(axis=1, dtype=np.float64)
            np.divide(sums, having - 2 * cut, out=vector[begin:end], where=having > 0, casting="same_kind")
        return vector
