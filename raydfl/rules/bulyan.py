"""Bulyan: clients chosen by Krum, then for each element the values nearest to their median.

E. M. El Mhamdi, R. Guerraoui, S. Rouault, The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018, section 4:

    theta = n - 2 f clients are chosen one after another: the one that Krum takes of those that are left
    each element is the mean of the beta = theta - 2 f of their values that are nearest to their median
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.rules._group import Group
from raydfl.rules._robust import Byzantine, RobustRule
from raydfl.rules.krum import scores, tolerated


def near_median(ordered: np.ndarray, count: int) -> np.ndarray:
    """Return the mean of the values nearest to the median, for each element: float64 [elements].

    Args:
        ordered: float32 [elements, clients], ascending in each row.
        count: how many values; of two that are equally near the smaller is taken.
    """
    clients = ordered.shape[1]
    median = ordered[:, [(clients - 1) // 2, clients // 2]].mean(axis=1, dtype=np.float64, keepdims=True)
    median = median.astype(np.float32)  # only now: the sum of two float32 may be beyond float32
    # The nearest values lie side by side: of all such windows theirs reaches least far.
    windows = clients - count + 1
    reach = np.maximum(median - ordered[:, :windows], ordered[:, count - 1 :] - median)
    first = reach.argmin(axis=1)[:, None]
    return np.asarray(np.take_along_axis(ordered, first + np.arange(count), axis=1).mean(axis=1, dtype=np.float64))


@dataclass(frozen=True)
class Bulyan(RobustRule):
    """Krum chooses clients one by one; of their values for each element those nearest to the median are averaged.

    f = floor(byzantine n), but at most (n - 3) / 4, beyond which the paper promises nothing: with six clients or fewer it is 0,
    and the result the uniform mean. Krum looks at one neighbour at least; ties go by client order. Distances are those of Krum.
    The report has f of n (``bulyan/byzantine``); the influence of those that Krum chose is 1.
    """

    byzantine: Byzantine = 0.2

    def decide(self, voters: Group) -> np.ndarray:
        """See :class:`RobustRule`."""
        clients = len(voters.rows)
        byzantine = tolerated(self.byzantine, clients, voters.report, "bulyan", spare=3, times=4)
        squares = voters.pairwise()
        left = np.arange(clients)
        voters.influence = np.zeros(clients)
        for _ in range(clients - 2 * byzantine):
            best = int(np.argmin(scores(squares[np.ix_(left, left)], byzantine)))
            voters.influence[left[best]] = 1
            left = np.delete(left, best)
        chosen = np.flatnonzero(voters.influence)
        if byzantine == 0:
            return voters.average(voters.influence, uniform=True)
        vector = np.empty(voters.layout.size, np.float32)
        for begin, end, ordered in voters.ordered(chosen.tolist()):
            vector[begin:end] = near_median(ordered, len(chosen) - 2 * byzantine)
        return vector
