r"""Per-FedAvg: clients train the global model to be accurate after one step on their data.

A. Fallah, A. Mokhtari, A. Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020, algorithm 1, in its first-order form (FO, section 5). For each batch with the halves D and D':

    v   = w_i - alpha grad F_i(w_i; D)
    w_i <- w_i - lr grad F_i(v; D')        without the factor I - alpha Hessian, lr is the run's learning rate
    server   w <- mean of the w_i

Readings and deviations:

- D and D' are the even and the odd examples of a batch. The paper samples them separately.
- The mean is weighted by examples. The paper's is uniform (``rule: uniform_mean``).
- v is a private network at the client, ``adapted``. Momentum, clipping and optimisers other than SGD would change its step, and
  are rejected.
- The global model is measured before any step at a client.

    raydfl run jobs/tiny.yaml run.name=perfedavg train.rounds=1 method=perfedavg method.alpha=0.05 \
      train.optimiser='{name: sgd, lr: 0.05}'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.ops import drift_term
from raydfl.core.options import OURS
from raydfl.core.types import Batch, Metrics, Update
from raydfl.data import Examples
from raydfl.methods._method import Method
from raydfl.training import Step, fit, substitute_tensors


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Method):
    """FedAvg over first-order meta-gradients."""

    needs = Needs(optimiser="sgd", plain_steps=True)

    models: ClassVar[Mapping[str, str]] = {"model": "crnn_base", "adapted": "crnn_base"}

    copies: ClassVar[Mapping[str, str]] = {"adapted": "model"}

    alpha: Annotated[
        float, Field(ge=0, description="Learning rate of the step to the adapted model. 0 is FedAvg."), OURS
    ] = 0.01

    def adapting_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return a loss that moves the second network to v in one step, from any point."""
        received = [value.detach() for value in step.parameters("model").values()]
        adapted = step.parameters("adapted")
        # The values of w_i, with gradients for the second network.
        at_model = {name: w + (v - v.detach()) for (name, v), w in zip(adapted.items(), received, strict=True)}
        with substitute_tensors("adapted", step.models["adapted"], at_model):
            value = self.objective.loss(step, "adapted", _select_half(batch, 0))
        return value + drift_term(list(adapted.values()), 1 / self.alpha, received)

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss at v, with its gradient for w_i."""
        if self.alpha == 0:
            return super().loss(step, batch)
        adapted = step.parameters("adapted").values()
        at_adapted = {
            name: w + (v - w).detach() for (name, w), v in zip(step.parameters("model").items(), adapted, strict=True)
        }
        with substitute_tensors("model", step.models["model"], at_adapted):
            return super().loss(step, _select_half(batch, 1))

    def local(self, step: Step) -> Update:
        """Train the global model by the loss of the adapted model."""
        if self.alpha == 0:
            return step.update(fit(step, self.loss, models=("model",)))
        # fit() decays rates, but alpha stays.
        alpha = self.alpha / step.training.optimiser.decay**step.round_index
        return step.update(fit(step, self.adapting_loss, self.loss, lr={"adapted": alpha}))

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure only the global model, because the second network belongs to an earlier batch."""
        models = {name: model for name, model in step.models.items() if name != "adapted"}
        return super().evaluate(dataclasses.replace(step, models=models), examples, batch_size)


def _select_half(batch: Batch, first: int) -> Batch:
    """Return a batch with weight 0 for every second example. ``first`` is the first counted example, 0 or 1."""
    counts = (torch.arange(len(batch.y), device=batch.y.device) % 2 == first).float()
    return dataclasses.replace(batch, weight=counts if batch.weight is None else counts * batch.weight)
