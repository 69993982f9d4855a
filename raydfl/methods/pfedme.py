"""pFedMe: each client's personal model is a proximal point of its local copy of the global model.

C. T. Dinh, N. H. Tran, T. D. Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, algorithm 1 and
equation 7. For each batch D of client i, with its local copy w_i of w:

    theta_i  ~ argmin over v of  F_i(v; D) + (lam / 2) ||v - w_i||^2     by personal_steps steps of rate personal_lr   (7)
    w_i      <- w_i - lr lam (w_i - theta_i)                            lr is the run's learning rate
    server   w <- (1 - beta) w + beta mean of the w_i

theta_i, the private model ``personal`` of ``model``'s architecture, starts from w in every round, and continues from batch to
batch. Clients are measured with both models.

The rule is ``uniform_mean``. The learning rate times ``lam`` should be below 1: it is the fraction of the distance to theta_i
that w_i moves.

Deviations: the run's optimiser takes all steps, including those of theta_i. Buffers of w_i do not change.

    raydfl run jobs/tiny.yaml run.name=pfedme train.rounds=1 method=pfedme method.lam=1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import drift_term
from raydfl.core.options import OURS, RELEASE
from raydfl.core.types import Batch, Metrics, State, Update
from raydfl.methods._copies import copy_model
from raydfl.methods._method import Method
from raydfl.rules import Rule, UniformMean
from raydfl.training import Step, fit


@dataclass(frozen=True, kw_only=True)
class PFedMe(Method):
    """Federated averaging of Moreau envelopes, and a personal model at each client."""

    default_rule: ClassVar[Rule] = UniformMean()

    associative: ClassVar[bool] = True

    models: ClassVar[Mapping[str, str]] = {"model": "crnn_base", "personal": "crnn_base"}

    copies: ClassVar[Mapping[str, str]] = {"personal": "model"}

    lam: Annotated[
        float,
        Field(gt=0, description="Weight of the distance between the two models. The paper tries 0.1 to 50."),
        RELEASE,
    ] = 15.0
    personal_steps: Annotated[int, Field(ge=1, description="Steps of the personal model per batch."), RELEASE] = 5
    personal_lr: Annotated[
        float | None, Field(gt=0, description="Learning rate of the personal model. null: the run's."), OURS
    ] = None
    beta: Annotated[
        float, Field(gt=0, description="Server's step size along the mean change. 1: the clients' mean."), RELEASE
    ] = 1.0

    def personal_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective of equation 7."""
        return self.objective.loss(step, "personal", batch) + self._compute_distance(step, "personal", "model")

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return (lam / 2) ||w_i - theta_i||^2. Its gradient gives the step of w_i."""
        return self._compute_distance(step, "model", "personal")

    def _compute_distance(self, step: Step, moving: str, fixed: str) -> Tensor:
        """Return (lam / 2) times the squared distance between two models, with gradients only for ``moving``."""
        anchors = [value.detach() for value in step.parameters(fixed).values()]
        return drift_term(list(step.parameters(moving).values()), self.lam, anchors)

    def local(self, step: Step) -> Update:
        """Train both models in turn on each batch."""
        copy_model(step, "model", "personal")
        losses = [*[self.personal_loss] * self.personal_steps, self.loss]
        rates = None if self.personal_lr is None else {"personal": self.personal_lr}
        return step.update(fit(step, *losses, lr=rates))

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Move the global model by ``beta`` times the mean change."""
        averaged, report = super().aggregate(state, updates, rng)
        if self.beta == 1:
            return averaged, report
        old = state.tensors["global"]
        new = {name: old[name] + self.beta * (mean - old[name]) for name, mean in averaged.tensors["global"].items()}
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": new}), report
