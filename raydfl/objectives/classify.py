"""Classify: every clip is of one class. Cross-entropy; accuracy and the confusion matrix are measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.core.metrics import Average, classification_metrics
from raydfl.core.types import Batch, Metrics
from raydfl.data import Examples
from raydfl.objectives._objective import Objective
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class Classify(Objective):
    """One class for each clip, learnt by cross-entropy."""

    labels: ClassVar[Literal["one", "sets", "any"]] = "one"
    headline: ClassVar[str] = "accuracy"
    answers: ClassVar[Literal["class", "set", "score", "none"]] = "class"

    average: Annotated[
        Average, Field(description="what is averaged over a clip's segments: their probabilities, or their logits")
    ] = "probabilities"
    top_k: Annotated[
        int | None,
        Field(
            ge=1,
            description="also measured: the share of clips whose class is among so many most probable ones; null: not",
        ),
    ] = None

    def check(self, classes: Sequence[str], length: int | None) -> None:
        """Refuse a ``top_k`` that no answer could miss."""
        if self.top_k is not None and self.top_k >= len(classes):
            raise ConfigError(
                f"objective.top_k is {self.top_k}, and there are {len(classes)} classes, so that every answer would be right; "
                f"take at most {len(classes) - 1}"
            )

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Mean cross-entropy."""
        logits = step.forward(name, batch)
        return batch.cross_entropy(logits)

    def answer(self, outputs: Tensor) -> Tensor:
        """Probabilities: the softmax."""
        return outputs.softmax(dim=1)

    def averages_logits(self) -> bool:
        """Return whether that was chosen."""
        return self.average == "logits"

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Measure ``loss``, ``accuracy``, ``top_k_accuracy`` and ``confusion`` of each clip, from the mean over its segments."""
        classes = outputs.shape[1]
        return classification_metrics(outputs, examples.labels, examples.clips, classes, self.average, self.top_k)
