"""The call of ``fit`` for one client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raydfl.data import Examples
from raydfl.training.plan import Plan
from raydfl.training.step import Loss, Step


@dataclass(frozen=True, eq=False)
class FitCall:
    """The arguments of ``fit``, with the settings in place of those that were not given."""

    step: Step
    losses: Sequence[Loss]
    models: Sequence[str]
    epochs: int
    plan: Plan | None
    rates: Mapping[str, float]
    """Learning rates by model, in place of the configuration's."""

    def data(self) -> Examples:
        """Return the examples that batches are drawn from."""
        return self.step.data.train if self.plan is None else self.plan.examples(self.step.data)
