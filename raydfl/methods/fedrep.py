"""FedRep: each client trains its own head with a fixed representation, then the shared representation with a fixed head.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, Exploiting Shared Representations for Personalized Federated Learning, ICML
2021, algorithm 1. With the representation phi and the head h_k of client k:

    client   h_k   <- head_epochs epochs with phi fixed
             phi_k <- train.local_epochs epochs with h_k fixed; phi_k is sent
    server   phi   <- mean of the phi_k

Deviations: the mean is weighted by examples (``rule: uniform_mean`` is the paper's). Name prefixes of tensors select the head, as
in FedPer. Without a head it is FedAvg.

No model is shared as a whole, so the server evaluates none. Clients evaluate their models on their held-out clips and on sampled
test clips (``evaluate.client_test_clips``).

    raydfl run jobs/tiny.yaml run.name=fedrep train.rounds=1 method=fedrep method.head_epochs=2
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import PAPER
from raydfl.core.types import Batch, Update
from raydfl.methods.fedper import FedPer
from raydfl.training import Step, fit, substitute_tensors


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """FedPer with the personal layers trained before the shared layers."""

    head_epochs: Annotated[int, Field(ge=1, description="Epochs of the personal layers' training."), PAPER] = 10

    def head_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss with gradients only for the personal layers."""
        frozen = {name: value.detach() for name, value in step.parameters("model").items() if self.shared(name)}
        if not frozen:
            return super().loss(step, batch)
        with substitute_tensors("model", step.models["model"], frozen):
            return super().loss(step, batch)

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss with gradients only for the shared layers."""
        parameters = step.parameters("model")
        frozen = {name: value.detach() for name, value in parameters.items() if not self.shared(name)}
        if len(frozen) in (0, len(parameters)):  # Nothing to freeze, or nothing to train.
            return super().loss(step, batch)
        with substitute_tensors("model", step.models["model"], frozen):
            return super().loss(step, batch)

    def local(self, step: Step) -> Update:
        """Train the personal layers, then the shared layers."""
        if self.personal:
            fit(step, self.head_loss, epochs=self.head_epochs)
        return step.update(fit(step, self.loss))
