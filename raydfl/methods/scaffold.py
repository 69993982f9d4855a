r"""SCAFFOLD: control variates correct the clients' drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning, ICML 2020, algorithm 1, option II:

    local step            y <- y - lr (grad(y) - c_k + c)
    after K steps         c_k+ = c_k - c + (x - y) / (K lr),    dc = c_k+ - c_k
    server                x <- x + server_lr mean_S(y - x),     c <- c + (|S| / N) mean_S(dc)

So c is the mean of all clients' c_k. Each client keeps its c_k. Model and control variate are both sent: twice FedAvg's bytes in
each direction. With several ``data.parts``, S and N of a part's own tensors count only the part's clients.

The correction is the loss term ``<y, c - c_k>``. Its gradient is exactly c - c_k, so the training loop does not change. With
momentum rho, the effective number of steps (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) replaces K.

As in the paper, means over the cohort are uniform for clients of any size (``uniform_mean``). Deviations: floating buffers are
averaged without correction. Only ``train.optimiser.name: sgd`` is accepted, because the correction is not defined for Adam.

    raydfl run jobs/tiny.yaml run.name=scaffold train.rounds=1 method=scaffold \
      train.optimiser='{name: sgd, lr: 0.05}'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, ClassVar, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.ops import drift_term
from raydfl.core.options import PAPER
from raydfl.core.types import Batch, Metrics, Ratio, State, Update
from raydfl.methods._control import CONTROL, ControlMethod, effective_steps
from raydfl.rules import Rule, UniformMean
from raydfl.training import Step, fit


@dataclass(frozen=True, kw_only=True)
class Scaffold(ControlMethod):
    """FedAvg with control variates (stochastic controlled averaging)."""

    default_rule: ClassVar[Rule] = UniformMean()

    associative: ClassVar[bool] = True

    server_lr: Annotated[
        float, Field(gt=0, description="Server's step size along the mean change. 1: the clients' mean."), PAPER
    ] = 1.0

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss plus <y, c - c_k>."""
        value = super().loss(step, batch)
        parameters = step.parameters()
        return value + drift_term(list(parameters.values()), slopes=[step.state["correction/" + n] for n in parameters])

    def local(self, step: Step) -> Update:
        """Train with the correction, then update the client's control variate."""
        names = list(step.parameters())
        c = {name: step.reference(CONTROL + name) for name in names}
        c_k = {name: step.state.get(CONTROL + name, torch.zeros_like(c[name])) for name in names}
        # In the state, because the clients of a batched step have different corrections.
        for name in names:
            step.state["correction/" + name] = c[name] - c_k[name]
        metrics = fit(step, self.loss)
        steps = effective_steps(cast(Ratio, metrics["steps"]).total, step.training.optimiser.momentum)
        trained = step.parameters()
        tensors = {name: value for name, value in step.floating_state().items() if self.shared(name)}
        for name in names:
            del step.state["correction/" + name]
            scale = steps * self._compute_rate(step, name)
            new = c_k[name] - c[name] + (step.reference(name) - trained[name].detach()) / scale
            tensors[CONTROL + name] = new - c_k[name]
            step.state[CONTROL + name] = new
        return step.update(metrics, tensors=tensors)

    def _compute_rate(self, step: Step, name: str) -> float:
        settings = step.training.optimiser
        return float(settings.models.get(name.partition("/")[0], settings.lr) * settings.decay**step.round_index)

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Step along the mean change."""
        averaged, report = super().aggregate(state, updates, rng)
        old, new = state.tensors["global"], dict(averaged.tensors["global"])
        for name in old:
            if CONTROL + name in old:
                new[name] = old[name] + self.server_lr * (new[name] - old[name])
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": new}), report
