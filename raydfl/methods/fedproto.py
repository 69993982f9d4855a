"""FedProto: clients exchange class means of features, to which they draw their private networks.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, FedProto: Federated Prototype Learning across Heterogeneous Clients,
AAAI 2022, algorithm 1. With f_i the features that the last layer of client i's network sees:

    (3)  C_i,j = mean of f_i(x) over client i's examples of class j
    (6)  C_j   = sum_i n_i,j C_i,j / sum_i n_i,j
    (7)  loss    CE + lam d(f_i(x), C_y),    d(a, b) = mean of (a - b)^2 over the features

A class without a global mean has no second term. Each client's network stays private and is measured on its held-out clips and on
sampled test clips (``evaluate.client_test_clips``). ``prototypes/accuracy`` measures the paper's prediction, the class with the
nearest mean. The objective must be ``classify``, without ``data.parts``.

Readings and deviations:

- The distance of equation 7 is between each example's features and the global mean, and d is a mean, as in the released code.
- Equation 6 divides once more by the number of clients with the class, which shrinks the mean. The released code takes the plain
  mean over these clients.
- Class means are computed after the training, in evaluation mode; the released code uses the features of the last epoch's batches.
- Features must be equally many at all clients. ``fedkad`` maps different numbers of features to a common size.

    raydfl run jobs/tiny.yaml run.name=fedproto method=fedproto
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import RELEASE
from raydfl.methods._prototypes import PrototypeMethod


@dataclass(frozen=True, kw_only=True)
class FedProto(PrototypeMethod):
    """Private networks with features near common class means."""

    lam: Annotated[
        float,
        Field(ge=0, description="Weight of the distance to the class means. 0: every client trains alone."),
        RELEASE,
    ] = 1.0

    def distances(self, differences: Tensor) -> Tensor:
        """Return the mean squared difference of each example."""
        return differences.square().mean(dim=1)
