"""FedNTD: clients distil the received model's predictions for each example's other classes.

G. Lee, M. Jeong, Y. Shin, S. Bae, S.-Y. Yun, Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
NeurIPS 2022. z are the client's logits and z_g the received model's, in evaluation mode. For an example of class y, z^{-y} are the
logits of the other classes:

    loss  mean of CE(z, y) + beta tau^2 KL( softmax(z_g^{-y} / tau) || softmax(z^{-y} / tau) )

The objective must be ``classify``. No gradient reaches z_g. The factor tau^2, as in the authors' code, keeps the gradients' size
independent of tau.

    raydfl run jobs/tiny.yaml run.name=fedntd train.rounds=1 method=fedntd method.tau=3
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.options import RELEASE
from raydfl.core.types import Batch
from raydfl.methods._distillation import compute_divergences
from raydfl.methods._method import Method
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class FedNTD(Method):
    """FedAvg plus distillation of the received model's logits, without the true class."""

    needs = Needs(objectives=("classify",))

    beta: Annotated[float, Field(ge=0, description="Weight of the distillation. 0 is FedAvg."), RELEASE] = 1.0
    tau: Annotated[
        float,
        Field(gt=0, description="Softmax temperature of both models in the distillation. 1: no softening."),
        RELEASE,
    ] = 1.0

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return cross-entropy plus the distillation."""
        logits = step.forward("model", batch)
        value = batch.cross_entropy(logits)
        if self.beta == 0:
            return value
        with step.teacher("model", next(iter(step.received.values()))):
            teacher_logits = step.forward("model", batch)
        classes = _list_false_classes(batch.y, logits.shape[1])
        divergences = compute_divergences(teacher_logits.gather(1, classes), logits.gather(1, classes), self.tau)
        return value + self.beta * self.tau**2 * batch.mean(divergences)


def _list_false_classes(labels: Tensor, classes: int) -> Tensor:
    """Return the classes without the true class, int64 [batch, classes - 1], for labels int64 [batch]."""
    numbers = torch.arange(classes - 1, device=labels.device)
    return numbers + (numbers >= labels.unsqueeze(1))
