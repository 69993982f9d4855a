"""Krum: selection of the single update with the nearest neighbours, unchanged.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent, NeurIPS 2017, section 4:

    s(k) = sum of ||w_k - w_j||^2 over the n - f - 2 clients j nearest to k,     the result is the w_k with the smallest s(k)
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.core.types import Ratio
from raydfl.rules._group import Group
from raydfl.rules._robust import Byzantine, RobustRule, floor_share


def krum_scores(squares: np.ndarray, byzantine: int) -> np.ndarray:
    """Compute Krum's score of each client. Lower is better.

    Args:
        squares: float64 [clients, clients], squared distances between the clients.
        byzantine: f, the expected number of attackers.

    Returns:
        float64 [clients].
    """
    clients = len(squares)
    neighbours = min(max(1, clients - byzantine - 2), clients - 1)
    nearest = np.sort(squares, axis=1)[:, : neighbours + 1]  # the first is the client itself, at distance 0
    return np.asarray(nearest.sum(axis=1))


def limit_byzantine(share: float, clients: int, report: dict[str, Ratio], rule: str, spare: int, times: int) -> int:
    """Compute f from the option ``byzantine``, within the paper's bound, and report it.

    Args:
        share: the option.
        clients: n, the number of clients.
        report: receives f of n.
        rule: the rule's name in the report.
        spare: constant of the bound ``clients >= times * f + spare``.
        times: factor of the bound.
    """
    byzantine = max(0, min(floor_share(share, clients), (clients - spare) // times))
    report[f"{rule}/byzantine"] = Ratio(byzantine, clients)
    return byzantine


@dataclass(frozen=True)
class Krum(RobustRule):
    """Update with the smallest sum of squared distances to its n - f - 2 nearest neighbours.

    f = floor(byzantine n), limited to the paper's bound of (n - 3) / 2. At least one neighbour counts. Ties go to the first
    client. A client's tensors form one vector. The report contains f of n (``krum/byzantine``).
    """

    byzantine: Byzantine = 0.2

    def decide(self, voters: Group) -> np.ndarray:
        """Select the client with the smallest score."""
        clients = len(voters.rows)
        byzantine = limit_byzantine(self.byzantine, clients, voters.report, "krum", spare=3, times=2)
        voters.influence = np.zeros(clients)
        voters.influence[np.argmin(krum_scores(voters.pairwise(), byzantine))] = 1
        return voters.average(voters.influence, uniform=True)
