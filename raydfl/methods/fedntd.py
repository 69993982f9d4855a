"""FedNTD: clients keep what the received model says about the classes that an example is not of.

G. Lee, M. Jeong, Y. Shin, S. Bae, S.-Y. Yun, Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
NeurIPS 2022. For an example of class y, with z the client's logits, z_g those of the received model in evaluation mode, and
z^{-y} logits without that of class y:

    loss  mean of CE(z, y) + beta tau^2 KL( softmax(z_g^{-y} / tau) || softmax(z^{-y} / tau) )

No gradient reaches z_g. The factor tau^2, which the authors' code has too, keeps gradients of one size.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.types import Batch
from raydfl.methods._distillation import compute_divergences
from raydfl.methods._method import Method
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class FedNTD(Method):
    """FedAvg plus distillation of the received model's answers about the classes that are not true."""

    needs = Needs(objectives=("classify",))

    beta: Annotated[float, Field(ge=0, description="weight of the distillation; 0 is FedAvg")] = 1.0
    tau: Annotated[float, Field(gt=0, description="softening of both models' outputs in the distillation; 1: none")] = (
        1.0
    )

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return cross-entropy plus the distillation."""
        logits = step.forward("model", batch)
        value = batch.cross_entropy(logits)
        if self.beta == 0:
            return value
        with step.teacher("model", next(iter(step.received.values()))):
            taught = step.forward("model", batch)
        others = _others(batch.y, logits.shape[1])
        away = compute_divergences(taught.gather(1, others), logits.gather(1, others), self.tau)
        return value + self.beta * self.tau**2 * batch.mean(away)


def _others(labels: Tensor, classes: int) -> Tensor:
    """Return the classes that are not true: int64 [batch, classes - 1], of labels int64 [batch]."""
    numbers = torch.arange(classes - 1, device=labels.device)
    return numbers + (numbers >= labels.unsqueeze(1))
