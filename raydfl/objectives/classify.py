"""Classify: single-label classification with cross-entropy."""

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
    """Classification of each clip into one class, trained with cross-entropy."""

    labels: ClassVar[Literal["one", "sets", "any"]] = "one"
    headline: ClassVar[str] = "accuracy"
    answers: ClassVar[Literal["class", "set", "score", "none"]] = "class"

    average: Annotated[
        Average, Field(description="Quantity averaged over the segments of a clip: probabilities or logits.")
    ] = "probabilities"
    top_k: Annotated[
        int | None,
        Field(
            ge=1,
            description="Also report top-k accuracy for this k. null: only accuracy.",
        ),
    ] = None

    def check(self, classes: Sequence[str], length: int | None) -> None:
        """Check that ``top_k`` is below the number of classes."""
        if self.top_k is not None and self.top_k >= len(classes):
            raise ConfigError(
                f"objective.top_k is {self.top_k}, but with {len(classes)} classes every answer would be correct. Use at most "
                f"{len(classes) - 1}."
            )

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean cross-entropy."""
        logits = step.forward(name, batch)
        return batch.cross_entropy(logits)

    def answer(self, outputs: Tensor) -> Tensor:
        """Compute probabilities with a softmax."""
        return outputs.softmax(dim=1)

    def averages_logits(self) -> bool:
        """Return true if the option ``average`` is "logits"."""
        return self.average == "logits"

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Compute ``loss``, ``accuracy``, ``top_k_accuracy`` and ``confusion`` over clips."""
        classes = outputs.shape[1]
        return classification_metrics(outputs, examples.labels, examples.clips, classes, self.average, self.top_k)
