"""FedLC: clients train on logits shifted by the rarity of each class in their own data.

J. Zhang, Z. Li, B. Li, J. Xu, S. Wu, S. Ding, C. Wu, Federated Learning with Label Distribution Skew via Logits Calibration,
ICML 2022. With n_c the number of a client's own training examples of class c:

    s_c   z_c - tau n_c^{-1/4},     with max(n_c, 1e-8) instead of n_c
    loss  mean of  -s_y + log sum_{c in D} exp(s_c)

D is all classes (``denominator: all``, cross-entropy of the shifted logits), or all classes except y (``others``), as printed.

Readings and deviations:

- As printed, the loss has no lower bound: the logits of a correctly classified example grow without limit. Published
  implementations use cross-entropy, the default here.
- A class without local examples would have an infinite shift. With 1e-8 the shift is 100 tau, so that the class hardly counts.
- The counts are the client's own. Some code sums them over all clients, and thereby shifts all classes of balanced data equally.
- Logits are shifted only in training. The objective must be ``classify``.

    raydfl run jobs/tiny.yaml run.name=fedlc train.rounds=1 method=fedlc method.tau=0.5
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.options import OURS
from raydfl.core.types import Batch, Update
from raydfl.methods._method import Method
from raydfl.training import Step, fit

_SHIFT = "shift"
_FEWEST = 1e-8
"""Example count of a class without local examples."""


@dataclass(frozen=True, kw_only=True)
class FedLC(Method):
    """FedAvg with logits calibrated by the client's own label counts."""

    needs = Needs(objectives=("classify",))

    tau: Annotated[
        float,
        Field(ge=0, description="Size of the shift. 0 with denominator all is FedAvg. Usual values are 0.1 to 1."),
        OURS,
    ] = 1.0
    denominator: Annotated[
        Literal["all", "others"],
        Field(
            description="Classes in the denominator. all: all classes. others: all except the true class, as printed."
        ),
        OURS,
    ] = "all"

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the loss of the shifted logits."""
        logits = step.forward("model", batch)
        if self.tau:
            logits = logits - step.state[_SHIFT]
        if self.denominator == "all":
            return batch.cross_entropy(logits)
        labels = batch.y.unsqueeze(1)
        denominators = logits.scatter(1, labels, -torch.inf).logsumexp(dim=1)
        return batch.mean(denominators - logits.gather(1, labels).squeeze(1))

    def local(self, step: Step) -> Update:
        """Count the client's labels, then train."""
        classes = next(spec.classes for spec in step.client.models if spec.name == "model")
        step.state[_SHIFT] = self.shift(np.asarray(step.data.train.labels, np.int64), classes).to(step.device)
        metrics = fit(step, self.loss)
        del step.state[_SHIFT]
        return step.update(metrics)

    def shift(self, labels: np.ndarray, classes: int) -> Tensor:
        """Return the shift of each class's logit, float32 [classes].

        Args:
            labels: Labels of a client's training examples, int64 [examples].
            classes: Number of classes.
        """
        counts = np.bincount(labels, minlength=classes).clip(_FEWEST)
        return torch.from_numpy(self.tau * counts**-0.25).float()
