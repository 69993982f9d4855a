"""FedDyn: a linear and a quadratic term in each client's loss align local optima with the global one.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, Federated Learning Based on Dynamic
Regularization, ICLR 2021, equation 1 and algorithm 1. With m clients, the cohort P and initially g_k = 0, h = 0:

    client   w_k <- local training from w on  F_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2         (equation 1)
             g_k <- g_k - alpha (w_k - w)
    server   h   <- h - alpha (1 / m) sum over P of (w_k - w),      w <- mean over P of w_k - h / alpha

Only the model is sent, and the rule is ``uniform_mean``. A client keeps -g_k. The server keeps -h / alpha, the sum of all
clients' changes divided by m, so that alpha = 0 is FedAvg with a uniform mean.

Deviations: ``train.local_epochs`` of the run's optimiser minimise equation 1. Buffers are averaged. The released code also
divides alpha by a client's fraction of the examples.

    raydfl run jobs/tiny.yaml run.name=feddyn train.rounds=1 method=feddyn method.alpha=0.01
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import drift_term
from raydfl.core.options import OURS
from raydfl.core.part_names import mark_like
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, State, Update
from raydfl.methods._control import global_parameters
from raydfl.methods._method import CLIENTS, Method, UpdateCounter
from raydfl.rules import Rule, UniformMean
from raydfl.training import Step, fit

_SLOPE, _CHANGE = "slope/", "change"


@dataclass(frozen=True, kw_only=True)
class FedDyn(Method):
    """FedAvg with dynamic regularisation."""

    default_rule: ClassVar[Rule] = UniformMean()

    associative: ClassVar[bool] = True

    alpha: Annotated[
        float, Field(ge=0, description="Weight of the regularisation. 0 is FedAvg with a uniform mean."), OURS
    ] = 0.1

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state with the clients' summed changes, initially zero."""
        state = super().init(clients, models, rng)
        change = {name: torch.zeros_like(value) for name, value in global_parameters(state, models, tied=True).items()}
        return dataclasses.replace(state, tensors={**state.tensors, _CHANGE: change}, extra={CLIENTS: len(clients)})

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss plus both terms of equation 1."""
        value = super().loss(step, batch)
        if self.alpha == 0:
            return value
        parameters = step.parameters()
        received = [step.reference(name) for name in parameters]
        slopes = [step.state[_SLOPE + name] for name in parameters]
        return value + drift_term(list(parameters.values()), self.alpha, received, slopes)

    def local(self, step: Step) -> Update:
        """Train, then update the client's gradient g_k."""
        for name in step.parameters():
            step.state.setdefault(_SLOPE + name, torch.zeros_like(step.reference(name)))
        metrics = fit(step, self.loss)
        for name, trained in step.parameters().items():
            moved = trained.detach() - step.reference(name)
            step.state[_SLOPE + name] = step.state[_SLOPE + name] + self.alpha * moved
        return step.update(metrics)

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average the cohort's models, and add all clients' past changes."""
        counter = UpdateCounter(updates)
        averaged, report = super().aggregate(state, counter, rng)
        if self.alpha == 0:
            return averaged, report
        weights, changes = dict(averaged.tensors["global"]), dict(state.tensors[_CHANGE])
        for name in changes.keys() & counter.senders.keys():
            share = counter.senders[name] / state.extra[mark_like(CLIENTS, name)]
            changes[name] = changes[name] + share * (weights[name] - state.tensors["global"][name])
            weights[name] = weights[name] + changes[name]
        tensors = {**averaged.tensors, "global": weights, _CHANGE: changes}
        return dataclasses.replace(averaged, tensors=tensors), report
