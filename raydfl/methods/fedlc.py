"""FedLC: clients train on logits that are shifted by how rare each class is among their own examples.

J. Zhang, Z. Li, B. Li, J. Xu, S. Wu, S. Ding, C. Wu, Federated Learning with Label Distribution Skew via Logits Calibration,
ICML 2022. With n_c the number of a client's own training examples of class c:

    s_c   z_c - tau n_c^{-1/4},     with max(n_c, 1e-8) in the place of n_c
    loss  mean of  -s_y + log sum_{c in D} exp(s_c)

D is all classes (``denominator: all``, cross-entropy of the shifted logits), or all but y (``others``), as the paper prints it.

Readings and deviations:

- As printed, the loss has no lower bound: once an example is classified well, its logits go on growing. What others have run of the
  method is cross-entropy, which is the default.
- A class that a client does not hold has an infinite shift. With 1e-8 it is 100 tau, so that the class hardly counts.
- The counts are the client's own; sums over all clients, as some code has them, shift the classes of balanced sets all alike.
- Outputs are shifted in training alone.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.types import Batch, Update
from raydfl.methods._method import Method
from raydfl.training import Step, fit

_SHIFT = "shift"
_FEWEST = 1e-8
"""Examples that a class counts as which the client does not hold."""


@dataclass(frozen=True, kw_only=True)
class FedLC(Method):
    """FedAvg with logits calibrated by the client's own label counts."""

    needs = Needs(objectives=("classify",))

    tau: Annotated[
        float,
        Field(
            ge=0, description="how much rare classes are shifted; 0 (with denominator all) is FedAvg; usual 0.1 to 1"
        ),
    ] = 1.0
    denominator: Annotated[
        Literal["all", "others"],
        Field(description="classes that a logit is held against: all, or all others, as the paper prints it"),
    ] = "all"

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the loss of the shifted logits."""
        logits = step.forward("model", batch)
        if self.tau:
            logits = logits - step.state[_SHIFT]
        if self.denominator == "all":
            return batch.cross_entropy(logits)
        own = batch.y.unsqueeze(1)
        others = logits.scatter(1, own, -torch.inf).logsumexp(dim=1)
        return batch.mean(others - logits.gather(1, own).squeeze(1))

    def local(self, step: Step) -> Update:
        """Count the client's labels, then train."""
        classes = next(spec.classes for spec in step.client.models if spec.name == "model")
        step.state[_SHIFT] = self.shift(np.asarray(step.data.train.labels, np.int64), classes).to(step.device)
        metrics = fit(step, self.loss)
        del step.state[_SHIFT]
        return step.update(metrics)

    def shift(self, labels: np.ndarray, classes: int) -> Tensor:
        """Return what is taken from each class's logit: float32 [classes].

        Args:
            labels: int64 [examples], of a client's training examples.
            classes: of the data.
        """
        counts = np.bincount(labels, minlength=classes).clip(_FEWEST)
        return torch.from_numpy(self.tau * counts**-0.25).float()
