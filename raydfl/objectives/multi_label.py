"""Multi-label: a clip has a set of classes, each of which is learnt by itself.

The loss of a clip is the mean over the classes of the binary cross-entropy. Measured are the mean over the classes of average
precision (mAP), of AUC, and of F1 at a threshold.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.types import Batch, Metrics, Ratio, Scores
from raydfl.data import Examples
from raydfl.objectives._objective import Objective, mean_over_clips
from raydfl.training import Step

_SMALLEST = 1e-12
"""Probability below which a clip's loss grows no more: the mean over its segments is taken of probabilities."""


@dataclass(frozen=True, kw_only=True)
class MultiLabel(Objective):
    """A set of classes for each clip (data.label_sets), learnt by binary cross-entropy."""

    labels: ClassVar[Literal["one", "sets", "any"]] = "sets"
    headline: ClassVar[str] = "map"
    answers: ClassVar[Literal["class", "set", "score", "none"]] = "set"

    threshold: Annotated[
        float,
        Field(gt=0, lt=1, description="probability from which on a clip is taken to have a class: F1, and predict"),
    ] = 0.5

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Mean binary cross-entropy over examples and classes."""
        logits = step.forward(name, batch)
        # As written out, PyTorch can compute it for several clients at once.
        return batch.mean((F.softplus(logits) - logits * batch.y).mean(dim=1))

    def answer(self, outputs: Tensor) -> Tensor:
        """Probabilities: the sigmoid of each output."""
        return outputs.sigmoid()

    def chosen(self, answer: np.ndarray) -> np.ndarray:
        """Return the classes whose probability reaches the threshold."""
        return answer >= self.threshold

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Measure ``loss`` and ``scores`` of the mean probabilities of each clip."""
        probabilities, first = mean_over_clips(self.answer(outputs.double()), examples)
        truth = examples.targets(examples.labels[first]).astype(bool)
        right = np.where(truth, probabilities, 1 - probabilities)
        loss = -np.log(np.maximum(right, _SMALLEST)).mean(axis=1).sum()
        return {"loss": Ratio(float(loss), len(truth)), "scores": Scores(probabilities, truth, self.threshold)}
