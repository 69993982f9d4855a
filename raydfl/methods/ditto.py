"""Ditto: FedAvg, and at each client a personal model regularised towards the global one.

T. Li, S. Hu, A. Beirami, V. Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, algorithm 1. A
client of the cohort receives w and computes:

    global     w_k   <- local training from w, sent back
    personal   v_k   <- local training from v_k on  F_k(v) + (lam / 2) ||v - w||^2,   so the gradient gains lam (v - w)
    server     w     <- uniform mean of the w_k

v_k, the private model ``personal`` of ``model``'s architecture, stays with the client. Its initial value is w_0. Each round
records its training loss, ``personal/loss``.

Readings and deviations:

- The global model is trained before the personal one, on separate batches, so that it equals FedAvg's to the bit. The paper's code
  takes both steps on each batch.
- Both models are trained for ``train.local_epochs``. ``personal_epochs`` overrides it for v_k.
- The mean is uniform (``uniform_mean``), as in the paper. ``rule: weighted_mean`` weights by examples. One variant of the paper
  selects lam on the clients' held-out examples; here lam is fixed.
- The global model is measured at the server and the clients, the personal models at their clients.

    raydfl run jobs/tiny.yaml run.name=ditto_method train.rounds=1 method=ditto method.lam=0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import drift_term
from raydfl.core.options import OURS, RELEASE
from raydfl.core.types import Batch, Update
from raydfl.methods._method import Method
from raydfl.rules import Rule, UniformMean
from raydfl.training import Step, fit


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """FedAvg with a personal model at each client."""

    default_rule: ClassVar[Rule] = UniformMean()

    models: ClassVar[Mapping[str, str]] = {"model": "crnn_base", "personal": "crnn_base"}

    copies: ClassVar[Mapping[str, str]] = {"personal": "model"}

    lam: Annotated[
        float,
        Field(ge=0, description="Weight of the distance to the global model. 0: personal models train alone."),
        RELEASE,
    ] = 1.0
    personal_epochs: Annotated[
        int | None, Field(ge=1, description="Epochs of the personal model. null: train.local_epochs."), OURS
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
