r"""FedProx: FedAvg with a proximal term that keeps clients near the received model.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, Federated Optimization in Heterogeneous Networks, MLSys 2020,
equation 2:

    min_w  F_k(w) + (mu / 2) ||w - w_t||^2,    so the gradient gains mu (w - w_t)

Deviation: every client trains for the configured epochs. The paper also allows unequal work.

``squared: false`` is the form of FedAudio, (mu / 2) sum over tensors of ||w - w_t||_2 without the square: a pull of size mu / 2
on each tensor, at any distance. FedAudio's mu is 1, and its mean over the cohort is uniform (second command). FedMLAC's
comparison follows FedAudio's protocol, and reports neither the form nor mu.

    raydfl run jobs/tiny.yaml run.name=fedprox train.rounds=1 method=fedprox method.mu=0.1
    raydfl run jobs/tiny.yaml run.name=fedprox_as_run train.rounds=1 \
      method='{name: fedprox, squared: false, mu: 1.0, rule: uniform_mean}'
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import drift_term
from raydfl.core.options import OURS, PAPER
from raydfl.core.types import Batch
from raydfl.methods._method import Method
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """FedAvg plus a proximal term."""

    mu: Annotated[
        float, Field(ge=0, description="Weight of the proximal term. 0 is FedAvg. Usual values are 0.001 to 1."), OURS
    ] = 0.01
    squared: Annotated[
        bool,
        Field(description="Use the paper's squared norm. false: the norm of each tensor, a pull of constant size."),
        PAPER,
    ] = True

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss plus the proximal term over all shared parameters."""
        value = super().loss(step, batch)
        if self.mu == 0:
            return value
        shared = {name: parameter for name, parameter in step.parameters().items() if self.shared(name)}
        received = [step.reference(name) for name in shared]
        if self.squared:
            return value + drift_term(list(shared.values()), self.mu, received)
        squares = [(local - start).square().sum() for local, start in zip(shared.values(), received, strict=True)]
        # The norm has no gradient at 0, the start of every round. The subgradient 0 replaces it.
        norms = [torch.where(d > 0, d.clamp_min(1e-30).sqrt(), torch.zeros_like(d)) for d in squares]
        return value + self.mu / 2 * torch.stack(norms).sum()
