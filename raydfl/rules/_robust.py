"""Base classes and options of robust rules.

A robust rule sees the tensors of a group as one vector for each client. Most rules ignore the weights that clients send,
because an attacker can send a false number of examples. All rules ignore clients of weight 0.

Masks give weight 0 to tensors or elements, and so do cuts to elements that the client did not receive. Element-wise rules
skip these elements. Rules based on distances replace them by the server's values, as if the client had not changed them.
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
    Field(
        ge=0,
        lt=0.5,
        description="Expected fraction of attackers, rounded down to whole clients. 0: none.",
    ),
]
"""Option ``byzantine`` of the rules that need an upper bound on the number of attackers."""


def floor_share(share: float, clients: int) -> int:
    """Compute ``floor(share * clients)`` for the decimal value of ``share``."""
    # In binary, 0.29 * 100 is 28.999..., so a small constant is added.
    return math.floor(share * clients + 1e-9)


@dataclass(frozen=True)
class RobustRule(CollectingRule):
    """Base class of rules over the clients with a positive weight. A subclass defines :meth:`decide`."""

    @abstractmethod
    def decide(self, voters: Group) -> np.ndarray:
        """Combine the clients into the server's new values, and optionally set ``voters.influence``.

        Args:
            voters: at least one client, each with a value for every element.

        Returns:
            float [elements].
        """

    def combine(self, group: Group) -> np.ndarray:
        """Apply :meth:`decide` to the clients with a positive weight."""
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
    """Base class of rules that average the middle of the sorted values of each element."""

    @abstractmethod
    def count_trimmed(self, clients: np.ndarray) -> np.ndarray:
        """Compute the number of values to remove at either end.

        Args:
            clients: int64, number of clients with a value.

        Returns:
            int64 of the same shape, less than half of ``clients``.
        """

    def combine(self, group: Group) -> np.ndarray:
        """Average the middle values of each element."""
        # Missing values sort to the end as infinity, where no middle includes them.
        voters = group.voters(fill=np.inf)
        vector = group.server.copy()
        if not voters.positions:
            return vector
        clients = len(voters.positions)
        lowest = int(self.count_trimmed(np.array(clients)))
        counts = np.subtract(clients, np.sum(voters.masks, axis=0)) if voters.masks else None
        for begin, end, ordered in voters.group.iter_sorted():
            if counts is None:
                vector[begin:end] = ordered[:, lowest : clients - lowest].mean(axis=1, dtype=np.float64)
                continue
            present = counts[begin:end]
            trimmed = self.count_trimmed(present)
            rank = np.arange(clients)
            middle = (rank >= trimmed[:, None]) & (rank < (present - trimmed)[:, None])
            sums = np.where(middle, ordered, 0).sum(axis=1, dtype=np.float64)
            np.divide(sums, present - 2 * trimmed, out=vector[begin:end], where=present > 0, casting="same_kind")
        return vector
