"""DnC (divide and conquer): leaves out the clients that stand out along the direction in which all differ most.

V. Shejwalkar, A. Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated
Learning, NDSS 2021, algorithm 2:

    repeat    of b random elements: centre the clients, v = their top right singular vector,
              outlier score s_k = <centred w_k, v>^2;  good: all but the c f clients of the largest scores
    result    the mean of the clients that are good every time
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.types import Ratio
from raydfl.rules._group import Group
from raydfl.rules._robust import Byzantine, RobustRule, count_of


def outlier_scores(sample: np.ndarray) -> np.ndarray:
    """Return each client's squared projection on the top right singular vector of the centred sample: float64 [clients].

    Args:
        sample: float64 [clients, elements].
    """
    centred = sample - sample.mean(axis=0)
    # With centred = U S V', the projections on the first column of V are S[0] times the first column of U.
    values, vectors = np.linalg.eigh(centred @ centred.T)
    return np.asarray(np.maximum(values[-1], 0) * np.square(vectors[:, -1]))


@dataclass(frozen=True)
class DnC(RobustRule):
    """The uniform mean without the clients that stand out along the top singular vector of randomly drawn elements.

    Over all tensors of a key that the same clients sent, taken as one vector. The draws depend on the run's seed and the round
    alone. floor(filter floor(byzantine n)) clients are left out each time, ties by client order, so that the first stay; with few
    clients that is nobody. Where nobody is good every time, the client that was good most often is taken, and among several the
    one of the smallest sum of scores. The report has f of n (``dnc/byzantine``).
    """

    byzantine: Byzantine = 0.2
    iterations: Annotated[int, Field(ge=1, description="how often elements are drawn and clients left out")] = 5
    sample: Annotated[int, Field(ge=1, description="b: elements drawn each time; all if there are fewer")] = 10_000
    filter: Annotated[
        float, Field(ge=0, description="c: clients left out each time, in multiples of f; 0: the uniform mean")
    ] = 1.0

    def decide(self, voters: Group) -> np.ndarray:
        """See :class:`RobustRule`."""
        clients, elements = len(voters.rows), voters.layout.size
        byzantine = count_of(self.byzantine, clients)
        voters.report["dnc/byzantine"] = Ratio(byzantine, clients)
        kept = max(1, clients - count_of(self.filter, byzantine))
        good, total = np.zeros(clients, np.int64), np.zeros(clients)
        for _ in range(self.iterations):
            drawn = np.sort(voters.rng.choice(elements, min(self.sample, elements), replace=False, shuffle=False))
            scores = outlier_scores(np.stack([row[drawn] for row in voters.rows]).astype(np.float64))
            good[np.argsort(scores, kind="stable")[:kept]] += 1
            total += scores
        chosen = good == self.iterations
        if not chosen.any():
            chosen[np.lexsort((total, -good))[0]] = True
        voters.influence = chosen.astype(np.float64)
        return voters.average(voters.influence, uniform=True)
