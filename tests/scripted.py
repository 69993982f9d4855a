"""Methods with scripted accuracies, independent of their models."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from raydfl.core.types import Metrics, Ratio
from raydfl.data.examples import Examples
from raydfl.methods.fedper import FedPer
from raydfl.training import Step


@dataclass(frozen=True, kw_only=True)
class Scripted(FedPer):
    """FedPer with a personal output layer. Its accuracy after ``r`` rounds is entry ``r`` of the script."""

    script: tuple[float | None, ...] = (0.0,)
    """``None``: NaN; the last one also holds for all later rounds."""

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Return the scripted accuracy."""
        value = self.script[min(step.round_index, len(self.script) - 1)]
        return {"model/accuracy": Ratio(float("nan") if value is None else value, 1.0)}


@dataclass(frozen=True, kw_only=True)
class InPhases(Scripted):
    """Scripted in two phases with separate settings."""

    phases: ClassVar[tuple[str, ...]] = ("first", "second")
