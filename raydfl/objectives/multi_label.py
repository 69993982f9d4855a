"""Multi-label classification, with a set of classes for each clip.

The loss of a clip is the binary cross-entropy, averaged over the classes. The metrics are average precision (mAP), AUC, and F1
at a threshold, each averaged over the classes.
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
"""Lower bound of probabilities in the loss of a clip, which averages the probabilities of segments."""


@dataclass(frozen=True, kw_only=True)
class MultiLabel(Objective):
    """Multi-label classification (data.label_sets), trained with binary cross-entropy."""

    labels: ClassVar[Literal["one", "sets", "any"]] = "sets"
    headline: ClassVar[str] = "map"
    answers: ClassVar[Literal["class", "set", "score", "none"]] = "set"

    threshold: Annotated[
        float,
        Field(gt=0, lt=1, description="Minimum probability of a predicted class, for F1 and predict."),
    ] = 0.5

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean binary cross-entropy over examples and classes."""
        logits = step.forward(name, batch)
        # Written out, because PyTorch can batch these operations over clients.
        return batch.mean((F.softplus(logits) - logits * batch.y).mean(dim=1))

    def answer(self, outputs: Tensor) -> Tensor:
        """Compute probabilities with a sigmoid."""
        return outputs.sigmoid()

    def chosen(self, answer: np.ndarray) -> np.ndarray:
        """Choose the classes with a probability of at least the threshold."""
        return answer >= self.threshold

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Compute ``loss`` and ``scores`` from the mean probabilities of each clip."""
        probabilities, first = mean_over_clips(self.answer(outputs.double()), examples)
        truth = examples.targets(examples.labels[first]).astype(bool)
        likelihoods = np.where(truth, probabilities, 1 - probabilities)
        loss = -np.log(np.maximum(likelihoods, _SMALLEST)).mean(axis=1).sum()
        return {"loss": Ratio(float(loss), len(truth)), "scores": Scores(probabilities, truth, self.threshold)}
