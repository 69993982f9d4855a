"""The call of ``fit`` for one client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydfl.data import Examples
from raydfl.training.plan import Plan
from raydfl.training.step import Loss, Step


@dataclass(frozen=True, eq=False)
class FitCall:
    """Arguments of ``fit``, with omitted ones filled in from the settings."""

    step: Step
    losses: Sequence[Loss]
    models: Sequence[str]
    epochs: int
    plan: Plan | None
    rates: Mapping[str, float]
    """Learning rates by model, overriding the configuration."""

    def select_examples(self) -> Examples:
        """Select the training examples: the pools of the plan, or ``step.data.train`` without a plan."""
        return self.step.data.train if self.plan is None else self.plan.examples(self.step.data)
