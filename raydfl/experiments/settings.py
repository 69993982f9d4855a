"""The contents of a study's file. docs/sweeps.md and docs/search.md explain them with examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.metrics import HIGHER_IS_BETTER, base_name
from raydfl.core.options import explain
from raydfl.core.settings import Settings
from raydfl.core.yaml import to_yaml
from raydfl.engine import apply_values
from raydfl.experiments.domains import Domain

_RENAMED = {"space": "domains", "reference": "control"}
FORMER = (*_RENAMED, "cells")
"""Keys of earlier versions."""
_WHOLE_GROUPS = ("train", "evaluate", "ray", "run", "track")
"""Groups that an axis would hardly mean to replace as a whole."""
_Checked = TypeVar("_Checked", bound=Settings)


def check_known(name: str, known: Iterable[str], what: str) -> None:
    """Reject a name that is not among the known ones.

    Raises:
        ConfigError: ``what``, the name, and the nearest known one.
    """
    if name not in known:
        raise ConfigError(f"{what} {name!r}; {nearest(name, known)}")


def check_settings(values: Any, settings: type[_Checked], file: Path | str, where: str = "") -> _Checked:
    """Return values as checked settings.

    Raises:
        ConfigError: a value is not valid.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, where, values, settings)}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def raise_first(faults: Mapping[str, object], where: str = "") -> None:
    """Raise the first message with a true value.

    Raises:
        ConfigError: the message, after ``where``.
    """
    for message, wrong in faults.items():
        if wrong:
            raise ConfigError(where + message)


def overlay(values: dict[str, Any], part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Lay settings over ``values`` by the command line's rule: a key is a path, whose value replaces the old one.

    Raises:
        ConfigError: a key's path leads through a value that is no group, or would replace a whole group.
    """
    for key in part:
        if key in _WHOLE_GROUPS and values.get(key):
            raise ConfigError(
                f"{where}: {key} would replace the whole group; write single settings, such as {key}.name: value"
            )
    try:
        return apply_values(values, part)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def label_of(value: Any) -> str:
    """Return a setting's value as a label."""
    return value if isinstance(value, str) else to_yaml(value)


def plain_value(value: Any) -> Any:
    """Return a value of numpy's as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


class MetricSettings(Settings):
    """A metric of a run's record."""

    score: str = Field(
        "accuracy",
        description="accuracy, macro_f1, auc, loss or another metric; without it the headline of the runs' objective",
    )
    split: str | None = Field(
        None,
        description="data that it is measured on: test, validation, server_validation, triggered; null: validation (the clients' "
        "held-out clips) in a study with domains, else test",
    )
    model: str | None = Field(None, description="which model; null: the method's first, so FedMLAC's plug-in")
    mode: Literal["max", "min"] | None = Field(
        None, description="whether the largest or the smallest is best; null: max of accuracies and F1, min of losses"
    )
    label: str | None = Field(None, description="its name in tables; null: made of the other keys")

    @property
    def title(self) -> str:
        """Its name in tables."""
        where = "" if self.split in (None, "test") else f", {self.split}"
        return self.label or f"{self.model + ' ' if self.model else ''}{self.score.replace('_', ' ')}{where}"

    @property
    def unit(self) -> str:
        """Label of an axis that shows it."""
        return self.title + (" (%)" if self.scale == 100 else "")

    @property
    def scale(self) -> float:
        """Factor to the unit of tables: fractions become per cent, losses stay as they are."""
        return 1.0 if self.score.endswith("loss") else 100.0

    @property
    def best(self) -> Literal["max", "min"]:
        """The mode, or that of the score."""
        return self.mode or ("max" if HIGHER_IS_BETTER.get(base_name(self.score), True) else "min")

    @property
    def sign(self) -> float:
        """Factor that makes larger values better ones."""
        return 1.0 if self.best == "max" else -1.0


class PaperSettings(Settings):
    """A paper's results, shown beside one's own."""

    source: str = Field(description="which table of which paper")
    note: str = Field("", description="what a reader must know to compare")
    values: dict[str, Any] = Field(
        description="by label of the first axis, of the second, and so on: 80.19 or '80.19±0.53', in the table's unit"
    )


class NoScheduler(Settings):
    """Every trial trains for all of its rounds."""

    name: Literal["none"] = Field("none", description="every trial trains for all of its rounds")


class AshaScheduler(Settings):
    """Asynchronous successive halving (L. Li and others, MLSys 2020), Ray Tune's AsyncHyperBandScheduler with one bracket."""

    name: Literal["asha"] = Field(description="stop trials that are behind at rising numbers of rounds")
    grace: int = Field(1, ge=1, description="rounds that every trial trains for")
    factor: float = Field(
        3.0,
        gt=1,
        description="one trial in this many continues after grace, grace * factor, grace * factor^2 ... rounds",
    )


class MedianScheduler(Settings):
    """The median rule of Google Vizier (D. Golovin and others, KDD 2017), Ray Tune's MedianStoppingRule."""

    name: Literal["median"] = Field(description="stop trials whose best score is worse than the median of the others")
    grace: int = Field(1, ge=1, description="rounds that every trial trains for")
    trials: int = Field(3, ge=1, description="trials that must have come as far before any is stopped")


class PopulationScheduler(Settings):
    """Population based training (M. Jaderberg and others, 2017), Ray Tune's PopulationBasedTraining with synch=True."""

    name: Literal["pbt"] = Field(description="the worst members of a population continue as changed copies of the best")
    interval: int = Field(ge=1, description="rounds between two exchanges")
    share: float = Field(
        0.25, gt=0, le=0.5, description="fraction of the members that copy, and of those that are copied"
    )
    factor: float = Field(1.2, gt=1, description="a copy's settings are multiplied or divided by this")
    resample: float = Field(0.25, ge=0, le=1, description="probability that a copy's setting is drawn again instead")


Scheduler = Annotated[NoScheduler | AshaScheduler | MedianScheduler | PopulationScheduler, Field(discriminator="name")]


class StudySettings(Settings):
    """The contents of a study's file."""

    title: str = Field(description="heading of the page, and of the table")
    question: str = Field("", description="the question that the study answers, in one sentence")
    note: str = Field("", description="a paragraph below the heading")
    base: Path | None = Field(None, description="a configuration that all runs start from, relative to the file")
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="settings of all runs, over the base: {train.rounds: 50} (without base: everything)",
    )
    axes: dict[str, dict[str, dict[str, Any]]] = Field(
        default_factory=dict,
        description="by name of the axis and label: settings, and base, repeat or metric for cells that need their own; a list of "
        "values in place of labels when the axis is named like a setting",
    )
    domains: dict[str, Domain] = Field(
        default_factory=dict,
        description="by setting, the domain that it is drawn from: {method.alpha: {uniform: [0.1, 0.9]}}",
    )
    repeat: dict[str, list[Any]] | None = Field(
        None,
        description="the one setting over whose values mean and spread are taken, {run.seed: [1, 2, 3]}; null: {run.seed: [1]}, "
        "with domains the seed of the configuration",
    )
    control: dict[str, str] = Field(
        default_factory=dict,
        description="labels of some axes: each cell is compared with the cell that has these labels, {method: FedAvg}",
    )
    metric: MetricSettings = Field(MetricSettings(), description="the headline, by which the best is chosen")
    also: list[MetricSettings] = Field(default_factory=list, description="further metrics for the table")
    summary: Literal["tail", "last", "best", "chosen"] | None = Field(
        None,
        description="which of a run's evaluations the headline is: the mean of the last ten (of all if fewer), the last, the best "
        "(which chooses on the measured data), or that in the round which run.best has chosen; null: tail, with domains last",
    )
    paper: PaperSettings | None = Field(None, description="a paper's results for the same cells")
    samples: int | None = Field(
        None, ge=1, description="draws from the domains; null: 10, or with searcher grid every combination"
    )
    searcher: Literal["random", "grid", "optuna"] = Field(
        "random",
        description="source of settings: random draws, every combination, or Optuna's TPE, which learns from earlier trials",
    )
    scheduler: Scheduler = Field(NoScheduler(), description="which trials are stopped early: none, asha, median or pbt")
    patience: int | None = Field(
        None,
        ge=1,
        description="run.stop of all trials: end those whose metric did not improve for this many evaluations",
    )
    rounds: int | None = Field(None, ge=1, description="train.rounds of all runs; null: that of the configuration")
    seed: int = Field(1, ge=0, description="seed of the draws; the runs' own seed is run.seed")
    dir: Path | None = Field(
        None,
        description="folder of the runs, which studies may share; null: run.dir in settings, or runs/ and the file's name",
    )
    parallel: int | None = Field(None, ge=1, description="runs at a time; null: as many as CPUs and GPUs allow")
    actors: int | None = Field(
        None,
        ge=0,
        description="client actors of each run; null: ray.actors in settings, else 0 (clients train in the run's own process)",
    )
    cpus: float = Field(1.0, gt=0, description="CPUs of a run's own process, beside those of its client actors")
    retries: int = Field(3, ge=0, description="times a run continues elsewhere after its process or node was lost")

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        """Accept the keys of earlier versions."""
        if not isinstance(values, Mapping):
            return values
        plain = dict(values)
        cells = plain.pop("cells", None)
        if not isinstance(cells, Mapping | None):
            raise ConfigError(f"cells is {cells!r}; it must be a group of settings, {{actors: 2}}")
        plain = {**(cells or {}), **plain}
        for former, name in _RENAMED.items():
            if former in plain:
                if name in plain:
                    raise ConfigError(f"{former} is the former name of {name}; remove {former}")
                plain[name] = plain.pop(former)
        return plain

    @field_validator("axes", mode="before")
    @classmethod
    def _labels(cls, axes: Any) -> Any:
        """Turn a list of values into labels; labels are text, and a label without settings changes nothing."""
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

    @field_validator("scheduler", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> StudySettings:
        raise_first({"give axes (a grid), domains (a search), or both": not self.axes and not self.domains})
        if self.repeat is not None:
            check_repeat(self.repeat, "repeat")
        for name, axis in self.axes.items():
            if not axis:
                raise ConfigError(f"axes.{name} has no labels")
            if name in (*self.domains, "repeat", "trial"):
                raise ConfigError(
                    f"axes.{name}: give the axis a name that is neither a key of domains nor repeat or trial"
                )
            for label, part in axis.items():
                if "repeat" in part:
                    check_repeat(part["repeat"], f"axes.{name}.{label}.repeat")
        for name, label in self.control.items():
            check_known(name, self.axes, "control: there is no axis")
            check_known(label, self.axes[name], f"control.{name}: there is no label")
        self.published()
        self._check_search()
        return self

    def _check_search(self) -> None:
        """Reject searchers and schedulers that do not fit the domains."""
        if not self.domains:
            scheduled = self.scheduler.name != "none"
            given = {"samples": self.samples, "scheduler": scheduled, "patience": self.patience}
            raise_first({f"{key} belongs to a search: add domains, or leave {key} out": given[key] for key in given})
            return
        pbt, grid, optuna = self.population is not None, self.searcher == "grid", self.searcher == "optuna"
        several = any(len(values) > 1 for values in (self.repeat or {}).values())
        faults: dict[str, object] = {}
        for key, domain in self.domains.items():
            faults |= {
                f"domains.{key}: searcher grid needs a list of values, {{grid: [...]}}, not {domain.kind}; or searcher: random":
                grid and not domain.listed,
                f"domains.{key}: grid needs searcher: grid; for searcher {self.searcher} write {{choice: [...]}}":
                not grid and domain.kind == "grid",
            }  # fmt: skip
        raise_first(faults | {
            "samples: searcher grid trains every combination; leave samples out": grid and self.samples,
            f"searcher: {self.searcher} does not fit scheduler pbt; take searcher: random": pbt and (grid or optuna),
            "patience does not fit scheduler pbt, whose members train for the same rounds": pbt and self.patience,
            "axes do not fit searcher optuna and scheduler pbt; search one cell at a time": (pbt or optuna) and self.axes,
            "repeat: searcher optuna and scheduler pbt train each trial once; give one value": (pbt or optuna) and several,
        })  # fmt: skip

    @property
    def population(self) -> PopulationScheduler | None:
        """The scheduler, where it is population based training."""
        return self.scheduler if isinstance(self.scheduler, PopulationScheduler) else None

    @property
    def sequential(self) -> bool:
        """True where a trial's settings depend on the results of others."""
        return self.searcher == "optuna" or self.population is not None

    @property
    def summarised(self) -> str:
        """The summary of a run's evaluations."""
        return self.summary or ("last" if self.domains else "tail")

    def published(self) -> dict[tuple[str, ...], tuple[float, float | None]]:
        """Return the paper's mean, and its spread where it gives one, by the labels of the cell."""
        return {} if self.paper is None else dict(_read_paper(self.paper.values, list(self.axes.items()), ()))


def _read_paper(
    node: Any, axes: Sequence[tuple[str, Mapping[str, Any]]], labels: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[float, float | None]]]:
    where = ".".join(("paper.values", *labels))
    if not axes:
        number = r"\d+\.?\d*|\.\d+"
        parts = re.fullmatch(rf"({number})(?: ?(?:±|\+-) ?({number}))?", str(node).strip())
        if parts is not None:
            yield labels, (float(parts[1]), None if parts[2] is None else float(parts[2]))
        elif node is not None:
            raise ConfigError(f"{where} is {node!r}; it must be a number, or mean and spread such as '80.19±0.53'")
        return
    name, known = axes[0]
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where} is {node!r}; it must be a group with labels of axis {name!r}: {', '.join(known)}")
    for label, inner in node.items():
        check_known(str(label), known, f"{where}: axis {name!r} has no label")
        yield from _read_paper(inner, axes[1:], (*labels, str(label)))


def check_repeat(repeat: Any, where: str) -> None:
    """Reject anything but one setting with different values.

    Raises:
        ConfigError: at ``where``.
    """
    fits = isinstance(repeat, Mapping) and len(repeat) == 1 and all(isinstance(v, list) and v for v in repeat.values())
    if not fits:
        raise ConfigError(
            f"{where} must be one setting with a list of values, such as {{run.seed: [1, 2, 3]}}, not {repeat!r}"
        )
    values = [label_of(value) for value in next(iter(repeat.values()))]
    if len(set(values)) < len(values):
        raise ConfigError(f"{where}: a value stands twice in {values}; the spread would be too small")
