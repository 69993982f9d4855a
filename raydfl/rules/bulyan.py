"""Bulyan: repeated selection by Krum, then an element-wise mean of the values nearest to the median.

E. M. El Mhamdi, R. Guerraoui, S. Rouault, The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018, section 4:

    selection  theta = n - 2 f clients, chosen one after another by Krum among the remaining clients
    result     for each element, the mean of the beta = theta - 2 f selected values nearest to their median
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.rules._group import Group
from raydfl.rules._robust import Byzantine, RobustRule
from raydfl.rules.krum import krum_scores, limit_byzantine


def average_near_median(ordered: np.ndarray, count: int) -> np.ndarray:
    """Average the values nearest to the median, for each element. Ties go to the smaller value.

    Args:
        ordered: float32 [elements, clients], ascending in each row.
        count: number of values to average.

    Returns:
        float64 [elements].
    """
    clients = ordered.shape[1]
    median = ordered[:, [(clients - 1) // 2, clients // 2]].mean(axis=1, dtype=np.float64, keepdims=True)
    median = median.astype(np.float32)  # after the mean, because the sum of two float32 may overflow
    # The nearest values are adjacent: they are the window with the smallest distance from the median to its far end.
    windows = clients - count + 1
    reach = np.maximum(median - ordered[:, :windows], ordered[:, count - 1 :] - median)
    first = reach.argmin(axis=1)[:, None]
    return np.asarray(np.take_along_axis(ordered, first + np.arange(count), axis=1).mean(axis=1, dtype=np.float64))


@dataclass(frozen=True)
class Bulyan(RobustRule):
    """Mean of the values nearest to the median of each element, over clients selected by Krum.

    f = floor(byzantine n), limited to the paper's bound of (n - 3) / 4. With six clients or fewer f is 0, and the result is
    the uniform mean. Krum uses at least one neighbour, and ties follow the client order. Distances are those of ``krum``.
    The report contains f of n (``bulyan/byzantine``). Selected clients have influence 1.

    Attackers that all send the same update can be among Krum's last choices. The second stage is meant for them.
    """

    byzantine: Byzantine = 0.2

    def decide(self, voters: Group) -> np.ndarray:
        """Select clients, then average the values nearest to the median."""
        clients = len(voters.rows)
        byzantine = limit_byzantine(self.byzantine, clients, voters.report, "bulyan", spare=3, times=4)
        squares = voters.pairwise()
        remaining = np.arange(clients)
        voters.influence = np.zeros(clients)
        for _ in range(clients - 2 * byzantine):
            best = int(np.argmin(krum_scores(squares[np.ix_(remaining, remaining)], byzantine)))
            voters.influence[remaining[best]] = 1
            remaining = np.delete(remaining, best)
        chosen = np.flatnonzero(voters.influence)
        if byzantine == 0:
            return voters.average(voters.influence, uniform=True)
        vector = np.empty(voters.layout.size, np.float32)
        for begin, end, ordered in voters.iter_sorted(chosen.tolist()):
            vector[begin:end] = average_near_median(ordered, len(chosen) - 2 * byzantine)
        return vector
