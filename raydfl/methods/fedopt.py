"""FedOPT of audio benchmarks: PyTorch's Adam at the server, on the clients' mean change.

FedMLAC names its baseline FedOPT after S. Reddi et al., Adaptive Federated Optimization, ICLR 2021, without the optimiser's name.
Its protocol, FedAudio (T. Zhang et al., FedAudio: A Federated Learning Benchmark for Audio Tasks, ICASSP 2023), passes -delta as
the gradient to torch.optim.Adam, and keeps Adam's state between rounds:

    delta = mean_k (w_k) - w        (rule: uniform_mean)
    m <- beta1 m + (1 - beta1) delta,        v <- beta2 v + (1 - beta2) delta^2,        m_0 = v_0 = 0
    w <- w + server_lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps),        t = 1, 2, ...

It differs from ``fedadam``, the paper's algorithm, in the bias correction, in v_0 and in the defaults. Buffers are averaged
without the optimiser. A round without updates changes nothing.

    raydfl run jobs/tiny.yaml run.name=fedopt train.rounds=1 method=fedopt
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import RELEASE
from raydfl.methods._server_optimiser import ServerOptimiser
from raydfl.rules import Rule, UniformMean


@dataclass(frozen=True, kw_only=True)
class FedOpt(ServerOptimiser):
    """FedAvg with PyTorch's Adam at the server."""

    default_rule: ClassVar[Rule] = UniformMean()

    server_lr: Annotated[
        float, Field(gt=0, description="Server learning rate, roughly the change of each element per round."), RELEASE
    ] = 0.001
    beta1: Annotated[float, Field(ge=0, lt=1, description="Decay of the first moment. 0: no momentum."), RELEASE] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="Decay of the second moment."), RELEASE] = 0.999
    eps: Annotated[float, Field(gt=0, description="Offset of the denominator, against division by 0."), RELEASE] = 1e-8

    def moments(self) -> Mapping[str, float]:
        """Return the initial values of both moments."""
        return {"m": 0.0, "v": 0.0}

    def move(
        self, old: Tensor, mean: Tensor, moments: Mapping[str, Tensor], number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Take one bias-corrected step of Adam."""
        delta = mean - old
        m = self.beta1 * moments["m"] + (1 - self.beta1) * delta
        v = self.beta2 * moments["v"] + (1 - self.beta2) * delta.square()
        first, second = 1 - self.beta1**number, 1 - self.beta2**number
        return old + self.server_lr / first * m / (v.sqrt() / math.sqrt(second) + self.eps), {"m": m, "v": v}
