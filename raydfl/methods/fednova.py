r"""FedNova: clients' changes are divided by their local steps before the mean, so that unequal work biases nothing.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020, algorithm 1. With p_k = n_k / sum_j n_j over the cohort, tau_k local steps of SGD with momentum rho:

    a_k      tau_k, with momentum  (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho)
    client   d_k = (w_k - w) / a_k
    server   w <- w + tau_eff sum_k p_k d_k,    tau_eff = sum_k p_k a_k

A client sends w + d_k, so that every aggregation rule applies to normalised models. It sends a_k too, for each parameter,
and the rule averages both. Equal steps at all clients give FedAvg.

Deviations: buffers are averaged without normalisation. The server has no momentum. Other optimisers than SGD are rejected.

    raydfl run jobs/tiny.yaml run.name=fednova train.rounds=1 method=fednova \
      train.optimiser='{name: sgd, lr: 0.05}'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar, cast

import numpy as np
import torch
from pydantic.dataclasses import dataclass

from raydfl.core.needs import Needs
from raydfl.core.types import BuiltModels, Client, Metrics, Ratio, State, Update
from raydfl.methods._control import effective_steps, global_parameters
from raydfl.methods._method import Method, UpdateCounter
from raydfl.training import Step, fit

STEPS = "steps/"
"""Prefix of the steps of each parameter: a client's a_k, the server's tau_eff."""


@dataclass(frozen=True, kw_only=True)
class FedNova(Method):
    """FedAvg over changes per local step."""

    needs = Needs(optimiser="sgd")

    changes: ClassVar[tuple[str, ...]] = (STEPS,)  # The steps have no reference value at the server.

    associative: ClassVar[bool] = True

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state and tau_eff, zero."""
        state = super().init(clients, models, rng)
        steps = {STEPS + name: torch.zeros(()) for name in global_parameters(state, models, tied=True)}
        return dataclasses.replace(state, tensors={"global": {**state.tensors["global"], **steps}})

    def local(self, step: Step) -> Update:
        """Train, and divide the change of each parameter by the number of steps."""
        metrics = fit(step, self.loss)
        number = effective_steps(cast(Ratio, metrics["steps"]).total, step.training.optimiser.momentum)
        tensors = step.floating_state()
        for name in [name for name in tensors if STEPS + name in step.received["global"]]:
            received = step.reference(name)
            tensors[name] = received + (tensors[name] - received) / max(
                number, 1.0
            )  # Without steps there is no change.
            tensors[STEPS + name] = torch.tensor(number, device=step.device)
        return step.update(metrics, tensors=tensors)

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Move along the mean change per step, by the mean number of steps."""
        counter = UpdateCounter(updates)
        averaged, report = super().aggregate(state, counter, rng)
        old, new = state.tensors["global"], dict(averaged.tensors["global"])
        for name in counter.senders:
            if STEPS + name in new:
                new[name] = old[name] + new[STEPS + name] * (new[name] - old[name])
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": new}), report
