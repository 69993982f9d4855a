"""Multi-Krum: uniform mean of the updates with the best Krum scores.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent, NeurIPS 2017: the score of section 4, and the variant with m vectors of the experiments.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.rules._group import Group
from raydfl.rules._robust import Byzantine, RobustRule, floor_share
from raydfl.rules.krum import krum_scores, limit_byzantine


@dataclass(frozen=True)
class MultiKrum(RobustRule):
    """Uniform mean of the clients with the smallest Krum scores.

    Scores, distances and f = floor(byzantine n), at most (n - 3) / 2, are those of ``krum``. ``keep`` sets the number of
    averaged clients, from 1 (Krum) to n (the mean) in the paper. Ties follow the client order. The report contains f of n
    (``multi_krum/byzantine``).
    """

    byzantine: Byzantine = 0.2
    keep: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Fraction of clients to average, rounded down to at least one. 1: all. null: all except f.",
        ),
    ] = None

    def decide(self, voters: Group) -> np.ndarray:
        """Average the clients with the smallest scores."""
        clients = len(voters.rows)
        byzantine = limit_byzantine(self.byzantine, clients, voters.report, "multi_krum", spare=3, times=2)
        kept = clients - byzantine if self.keep is None else max(1, floor_share(self.keep, clients))
        voters.influence = np.zeros(clients)
        voters.influence[np.argsort(krum_scores(voters.pairwise(), byzantine), kind="stable")[:kept]] = 1
        return voters.average(voters.influence, uniform=True)
