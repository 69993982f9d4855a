"""A number of the record that a table shows, or that is searched for the best of."""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field

from raydfl.core.settings import Settings
from raydfl.engine import Config
from raydfl.runs.report import Key


class MetricSettings(Settings):
    """A number of the record that a table shows."""

    score: str = Field(
        "accuracy",
        description="accuracy, macro_f1, auc, loss or another metric of the record; not given: the headline of the runs' objective",
    )
    split: str = Field("test", description="what it was measured on: test, or validation (the clients' own hold-out)")
    model: str | None = Field(None, description="which model; null: the method's first, so FedMLAC's plug-in")
    label: str | None = Field(None, description="what the table calls it; null: made of the three above")

    @property
    def title(self) -> str:
        """The table's name for it."""
        where = "" if self.split == "test" else f", {self.split}"
        return self.label or f"{self.model + ' ' if self.model else ''}{self.score.replace('_', ' ')}{where}"

    @property
    def unit(self) -> str:
        """Label of an axis that shows it."""
        return self.title + (" (%)" if self.scale == 100 else "")

    @property
    def scale(self) -> float:
        """Factor to the unit of the table: shares in per cent, losses as they are."""
        return 1.0 if self.score.endswith("loss") else 100.0


Given = TypeVar("Given", bound=MetricSettings)


def for_objective(metric: Given, config: Config) -> Given:
    """Return a metric with the headline of a run's objective as its score, where none was given."""
    headline = config.parts.method.objective.headline
    if "score" in metric.model_fields_set or metric.score == headline:
        return metric
    return metric.model_copy(update={"score": headline})


def keys_of(config: Config, metric: MetricSettings) -> list[Key]:
    """Return what the record may call a metric, the one that counts first: of what clients measured their mean."""
    models = [metric.model] if metric.model else list(config.parts.models)[:1]
    names = [*(f"{model}/{metric.score}" for model in models), metric.score]
    return [(metric.split, key) for name in names for key in (f"{name}_client_mean", name)]
