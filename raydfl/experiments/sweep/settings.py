"""The contents of a sweep's file; docs/sweeps.md explains it with an example."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from raydfl.core.errors import ConfigError
from raydfl.core.settings import Settings
from raydfl.experiments.metric import MetricSettings
from raydfl.experiments.plan import StudySettings, check_known, label_of


class PaperSettings(Settings):
    """A paper's numbers, shown beside one's own."""

    source: str = Field(description="which table of which paper")
    note: str = Field("", description="what a reader must know to compare")
    values: dict[str, Any] = Field(
        description="by label of the first axis, of the second, and so on: 80.19 or '80.19±0.53', in the table's unit"
    )


class CellSettings(Settings):
    """Resources that one running cell takes of the machine or cluster."""

    actors: int = Field(
        0,
        ge=0,
        description="client actors of each cell; 0: its clients train one after another in the cell's own process",
    )
    cpus: float = Field(1.0, gt=0, description="CPUs of a cell's own process")
    retries: int = Field(3, ge=0, description="times a cell goes on elsewhere after its process or node was lost")


class SweepSettings(StudySettings):
    """The contents of a sweep's file."""

    axes: dict[str, dict[str, dict[str, Any]]] = Field(
        min_length=1,
        description="by name of the axis and label: settings, and base, repeat or metric for cells that need their own; a list of "
        "values in place of labels when the axis is called like a setting",
    )
    repeat: dict[str, list[Any]] = Field(
        default_factory=lambda: {"run.seed": [1]},
        min_length=1,
        max_length=1,
        description="the one setting over whose values mean and spread are taken: {run.seed: [1, 2, 3]}",
    )
    metric: MetricSettings = Field(MetricSettings(), description="the headline")
    also: list[MetricSettings] = Field(default_factory=list, description="further numbers for the table")
    summary: Literal["tail", "last", "best", "chosen"] = Field(
        "tail",
        description="what of a run's evaluations the headline is: the mean of the last ten (of all if fewer), the last, the best "
        "(which chooses on the test data), or that in the round which run.best has chosen",
    )
    reference: dict[str, str] = Field(
        default_factory=dict,
        description="the label of some axes from whose cell the drop is measured, {condition: clean}",
    )
    paper: PaperSettings | None = Field(None, description="a paper's numbers for the same cells")
    cells: CellSettings = CellSettings()

    @field_validator("axes", mode="before")
    @classmethod
    def _labels(cls, axes: Any) -> Any:
        """Make a list of values labels; labels are text; a label without settings changes nothing."""
        if not isinstance(axes, Mapping):
            return axes
        plain: dict[str, Any] = {}
        for name, axis in axes.items():
            if isinstance(axis, list):
                plain[str(name)] = {label_of(value): {str(name): value} for value in axis}
            elif isinstance(axis, Mapping):
                plain[str(name)] = {str(label): part if part is not None else {} for label, part in axis.items()}
            else:
                plain[str(name)] = axis
        return plain

    @field_validator("repeat")
    @classmethod
    def _some_values(cls, repeat: dict[str, list[Any]]) -> dict[str, list[Any]]:
        check_repeat(repeat, "repeat")
        return repeat

    @model_validator(mode="after")
    def _parts_fit(self) -> SweepSettings:
        for name, axis in self.axes.items():
            if not axis:
                raise ConfigError(f"axes.{name} has no labels")
        for name, label in self.reference.items():
            check_known(name, self.axes, "reference: there is no axis")
            check_known(label, self.axes[name], f"reference.{name}: there is no label")
        if self.paper is not None:
            self.published()
        return self

    def published(self) -> dict[tuple[str, ...], tuple[float, float | None]]:
        """Return the paper's mean, and its spread where it gives one, by the labels of the cell."""
        found: dict[tuple[str, ...], tuple[float, float | None]] = {}
        if self.paper is not None:
            _collect(self.paper.values, list(self.axes.items()), (), found)
        return found


def _collect(
    node: Any,
    axes: Sequence[tuple[str, Mapping[str, Any]]],
    labels: tuple[str, ...],
    found: dict[tuple[str, ...], tuple[float, float | None]],
) -> None:
    where = ".".join(("paper.values", *labels))
    if not axes:
        if node is not None:
            found[labels] = _number(node, where)
        return
    name, known = axes[0]
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where} is {node!r}; it must be a group with labels of axis {name!r}: {', '.join(known)}")
    for label, inner in node.items():
        check_known(str(label), known, f"{where}: axis {name!r} has no label")
        _collect(inner, axes[1:], (*labels, str(label)), found)


def _number(value: Any, where: str) -> tuple[float, float | None]:
    number = r"\d+\.?\d*|\.\d+"
    parts = re.fullmatch(rf"({number})(?: ?(?:±|\+-) ?({number}))?", str(value).strip())
    if parts is None:
        raise ConfigError(f"{where} is {value!r}; it must be a number, or mean and spread such as '80.19±0.53'")
    return float(parts[1]), None if parts[2] is None else float(parts[2])


def check_repeat(repeat: Any, where: str) -> None:
    """Refuse what is not one setting with different values.

    Raises:
        ConfigError: at ``where``.
    """
    if (
        not isinstance(repeat, Mapping)
        or len(repeat) != 1
        or not all(isinstance(v, list) and v for v in repeat.values())
    ):
        raise ConfigError(
            f"{where} must be one setting with a list of values, such as {{run.seed: [1, 2, 3]}}, not {repeat!r}"
        )
    values = [label_of(value) for value in next(iter(repeat.values()))]
    if len(set(values)) < len(values):
        raise ConfigError(f"{where}: a value stands twice in {values}; the spread would be too small")
