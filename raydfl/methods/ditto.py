"""Ditto: each client has a personal model that is drawn to the global one, which is trained as in FedAvg.

T. Li, S. Hu, A. Beirami, V. Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, algorithm 1. A
client that takes part receives w and does:

    global     w_k   <- local training from w, sent back
    personal   v_k   <- local training from v_k on  F_k(v) + (lam / 2) ||v - w||^2,   so the gradient gains lam (v - w)
    server     w     <- mean of the w_k, all clients counting the same

v_k stays with the client and begins as w_0 did.

Readings and deviations:

- The global model is trained first and the personal one after it, each on batches of its own, so that the global model is FedAvg's
  to the bit. The paper's code takes both steps on each batch.
- Both models are trained for ``train.local_epochs``; ``personal_epochs`` sets another number for v_k.
- Clients count the same, as in the paper; ``rule: weighted_mean`` counts examples. lam is not chosen by the clients' hold-outs, as
  one variant of the paper has it.
- Both models are measured, the global one at the server and at the clients, the personal ones at theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import drift_term
from raydfl.core.types import Batch, Update
from raydfl.methods._method import Method
from raydfl.rules import Rule, UniformMean
from raydfl.training import Step, fit


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """FedAvg, and at each client a personal model near the global one."""

    default_rule: ClassVar[Rule] = UniformMean()

    models: ClassVar[Mapping[str, str]] = {"model": "crnn_base", "personal": "crnn_base"}

    copies: ClassVar[Mapping[str, str]] = {"personal": "model"}

    lam: Annotated[
        float, Field(ge=0, description="weight of the distance to the global model; 0: personal models learn alone")
    ] = 1.0
    personal_epochs: Annotated[
        int | None, Field(ge=1, description="passes over the data for the personal model; null: train.local_epochs")
    ] = None

    def personal_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss of the personal model plus its distance to the received one."""
        value = self.objective.loss(step, "personal", batch)
        if self.lam == 0:
            return value
        personal = step.parameters("personal")
        received = [step.reference("model/" + name.removeprefix("personal/")) for name in personal]
        return value + drift_term(list(personal.values()), self.lam, received)

    def local(self, step: Step) -> Update:
        """Train the global model, then the personal one."""
        metrics = fit(step, self.loss, models=("model",))
        personal = fit(step, self.personal_loss, models=("personal",), epochs=self.personal_epochs)
        return step.update({**metrics, "personal/loss": personal["loss"]})
