r"""FedDC: each client tracks its drift from the global model, and sends its drift-corrected model.

L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C. Xu, FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction, CVPR 2022, algorithm 1. With the drift h_i, the control variates g_i and g, all initially 0, and s_i = mean(n) / n_i:

    loss     CE + (s_i alpha / 2) ||v - (w - h_i)||^2 + <v, s_i g - g_i>
    client   D_i = w_i - w,    h_i <- h_i + D_i,    g_i <- g_i - s_i g - D_i / (lr E ceil(mean(n) / B))
    server   w <- sum_i n_i (w_i + h_i) / sum_i n_i,    g <- g + (1 / N) sum_i (g_i after - g_i before) / s_i

Readings and deviations:

- Scales s_i and g_i follow the released code. With equal clients s_i is 1. The code's means over clients are uniform
  (``rule: uniform_mean``), and it adds the mean drift of all clients to the cohort's mean model. In algorithm 1 the cohort is the
  whole population. Here both means are over the cohort.
- A client sends the sum w_i + h_i. The mean is the same. With the control variate, it sends twice FedAvg's bytes, and
  receives as many.
- The last term has v - w instead of v, with the same gradient. With momentum, the number of plain steps that move equally far
  along a constant gradient replaces E ceil(mean(n) / B). Only ``train.optimiser.name: sgd`` is accepted. Buffers are averaged.
- Without pruning and groups, ``fedapta`` is this method.

    raydfl run jobs/tiny.yaml run.name=feddc train.rounds=1 method=feddc \
      train.optimiser='{name: sgd, lr: 0.05}'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import OURS
from raydfl.core.types import Batch, Client, State, Task, Update
from raydfl.methods._control import (
    CONTROL,
    DRIFT,
    ControlMethod,
    add_mean_examples,
    drift_penalty,
    put_drift_terms,
    renew_drifts,
)
from raydfl.training import Step, fit


@dataclass(frozen=True, kw_only=True)
class FedDC(ControlMethod):
    """FedAvg with local drifts and control variates."""

    alpha: Annotated[
        float,
        Field(ge=0, description="Weight of the drift's penalty. 0: drifts and control variates without a penalty."),
        OURS,
    ] = 0.1

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Plan FedAvg's tasks with the mean number of examples."""
        return add_mean_examples(super().plan(state, clients, rng, cohort), clients)

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss plus the penalty and the correction."""
        return super().loss(step, batch) + drift_penalty(step, step.parameters())

    def local(self, step: Step) -> Update:
        """Train, then renew the client's drift and control variate."""
        put_drift_terms(step, self.alpha)
        metrics = fit(step, self.loss)
        tensors = step.floating_state()
        renewed = renew_drifts(step, tensors, {})
        for name in step.parameters():
            tensors |= {name: tensors[name] + renewed[DRIFT + name], CONTROL + name: renewed[CONTROL + name]}
        number = float(step.client.num_examples)
        return step.update(
            metrics, tensors=tensors, weight={n: 1.0 if n.startswith(CONTROL) else number for n in tensors}
        )
