"""DnC (divide and conquer): exclusion of outliers along the direction of largest variance.

V. Shejwalkar, A. Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated
Learning, NDSS 2021, algorithm 2:

    repeat    draw b elements, centre the clients, v = top right singular vector,
              outlier score s_k = <centred w_k, v>^2;  good: all but the c f clients with the largest scores
    result    mean of the clients that are good in every iteration
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.types import Ratio
from raydfl.rules._group import Group
from raydfl.rules._robust import Byzantine, RobustRule, floor_share


def outlier_scores(sample: np.ndarray) -> np.ndarray:
    """Compute each client's squared projection on the top right singular vector of the centred sample.

    Args:
        sample: float64 [clients, elements].

    Returns:
        float64 [clients].
    """
    centred = sample - sample.mean(axis=0)
    # With centred = U S V', the projections on the first column of V are S[0] U[:, 0]: an eigenvector of a small matrix.
    values, vectors = np.linalg.eigh(centred @ centred.T)
    return np.asarray(np.maximum(values[-1], 0) * np.square(vectors[:, -1]))


@dataclass(frozen=True)
class DnC(RobustRule):
    """Uniform mean without outliers along the top singular vector of randomly drawn elements.

    A client's tensors form one vector. Draws depend on the run's seed and the round only. Each iteration excludes
    floor(filter floor(byzantine n)) clients, which is none for few clients. Ties keep the first clients. If no client is good
    in every iteration, the result is the client that was good most often, with the smallest sum of scores in a tie.
    The report contains f of n (``dnc/byzantine``).
    """

    byzantine: Byzantine = 0.2
    iterations: Annotated[
        int, Field(ge=1, description="Number of iterations. Each draws elements and excludes clients.")
    ] = 5
    sample: Annotated[
        int, Field(ge=1, description="b: number of elements drawn in an iteration, limited to all elements.")
    ] = 10_000
    filter: Annotated[
        float,
        Field(
            ge=0,
            description="c: number of clients excluded in an iteration, as a multiple of the assumed attackers. 0: the uniform "
            "mean.",
        ),
    ] = 1.0

    def decide(self, voters: Group) -> np.ndarray:
        """Exclude outliers and average the remaining clients."""
        clients, elements = len(voters.rows), voters.layout.size
        byzantine = floor_share(self.byzantine, clients)
        voters.report["dnc/byzantine"] = Ratio(byzantine, clients)
        kept = max(1, clients - floor_share(self.filter, byzantine))
        good, total = np.zeros(clients, np.int64), np.zeros(clients)
        for _ in range(self.iterations):
            sample = np.sort(voters.rng.choice(elements, min(self.sample, elements), replace=False, shuffle=False))
            scores = outlier_scores(np.stack([row[sample] for row in voters.rows]).astype(np.float64))
            good[np.argsort(scores, kind="stable")[:kept]] += 1
            total += scores
        chosen = good == self.iterations
        if not chosen.any():
            chosen[np.lexsort((total, -good))[0]] = True
        voters.influence = chosen.astype(np.float64)
        return voters.average(voters.influence, uniform=True)
