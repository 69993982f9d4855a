"""Krum: the one update that has the nearest neighbours.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent, NeurIPS 2017, section 4:

    s(k) = sum of ||w_k - w_j||^2 over the n - f - 2 clients j nearest to k,     the result is the w_k of the least s(k)
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.core.types import Ratio
from raydfl.rules._group import Group
from raydfl.rules._robust import Byzantine, RobustRule, count_of


def scores(squares: np.ndarray, byzantine: int) -> np.ndarray:
    """Krum's score of each client: float64 [clients]; the lower the better.

    Args:
        squares: squared distances between the clients: float64 [clients, clients].
        byzantine: f, the number of clients that may send anything.
    """
    clients = len(squares)
    neighbours = min(max(1, clients - byzantine - 2), clients - 1)
    nearest = np.sort(squares, axis=1)[:, : neighbours + 1]  # the nearest of all is the client itself, at distance 0
    return np.asarray(nearest.sum(axis=1))


def tolerated(share: float, clients: int, report: dict[str, Ratio], rule: str, spare: int, times: int) -> int:
    """f: the share of the clients, but no more than the largest f for which ``clients >= times * f + spare``; reported."""
    byzantine = max(0, min(count_of(share, clients), (clients - spare) // times))
    report[f"{rule}/byzantine"] = Ratio(byzantine, clients)
    return byzantine


@dataclass(frozen=True)
class Krum(RobustRule):
    """The update that is nearest to its n - f - 2 nearest neighbours, as it is; all others are left out.

    f = floor(byzantine n), but at most (n - 3) / 2, beyond which the paper promises nothing; with fewer than three clients each
    has the one neighbour there is. Ties go to the first client. Distances are over all tensors of a key that the same clients
    sent, taken as one vector. The report has f of n (``krum/byzantine``).
    """

    byzantine: Byzantine = 0.2

    def decide(self, voters: Group) -> np.ndarray:
        """See :class:`RobustRule`."""
        clients = len(voters.rows)
        byzantine = tolerated(self.byzantine, clients, voters.report, "krum", spare=3, times=2)
        voters.influence = np.zeros(clients)
        voters.influence[np.argmin(scores(voters.pairwise(), byzantine))] = 1
        return voters.average(voters.influence, uniform=True)
