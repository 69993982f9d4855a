"""Multi-Krum: the mean of the updates with the best scores of Krum.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent, NeurIPS 2017, section 4 for the score, and the variant with m vectors that its experiments call Multi-Krum.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.rules._group import Group
from raydfl.rules._robust import Byzantine, RobustRule, count_of
from raydfl.rules.krum import scores, tolerated


@dataclass(frozen=True)
class MultiKrum(RobustRule):
    """The uniform mean of the clients with the lowest scores of Krum.

    f is as in Krum. ``keep`` leaves how many clients are averaged to the user; the paper has any number from 1 (Krum) to n (the
    mean). Ties go by client order, distances are those of Krum. The report has f of n (``multi_krum/byzantine``).
    """

    byzantine: Byzantine = 0.2
    keep: Annotated[
        float | None,
        Field(gt=0, le=1, description="share of the clients averaged, rounded down, at least one; null: all but f"),
    ] = None

    def decide(self, voters: Group) -> np.ndarray:
        """See :class:`RobustRule`."""
        clients = len(voters.rows)
        byzantine = tolerated(self.byzantine, clients, voters.report, "multi_krum", spare=3, times=2)
        kept = clients - byzantine if self.keep is None else max(1, count_of(self.keep, clients))
        voters.influence = np.zeros(clients)
        voters.influence[np.argsort(scores(voters.pairwise(), byzantine), kind="stable")[:kept]] = 1
        return voters.average(voters.influence, uniform=True)
