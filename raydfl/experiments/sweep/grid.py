"""A sweep: a grid of runs from one YAML file, every configuration checked before the first run starts.

A file names a base configuration and axes. Each choice of one label from every axis is a **cell**; a cell is run once for each
value of the setting under ``repeat`` (seeds or folds), over which the table shows mean and spread. What a file may hold are the
fields of :class:`~raydfl.experiments.sweep.settings.SweepSettings`; docs/sweeps.md explains them with an example.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raydfl.core.errors import ConfigError
from raydfl.core.options import explain
from raydfl.engine import Config, apply_overrides, make_config
from raydfl.experiments.metric import MetricSettings, for_objective
from raydfl.experiments.plan import (
    Planned,
    check_known,
    checked,
    faults_text,
    folder_of,
    is_complete,
    label_of,
    laid_over,
    read_base,
    read_groups,
)
from raydfl.experiments.sweep.settings import SweepSettings, check_repeat

# -- cells -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CellRun(Planned):
    """One run of one cell."""

    labels: tuple[str, ...]
    """The cell: a label of each axis."""
    repeat: str
    """The value of the repeated setting, ``run.seed=1``."""
    metric: MetricSettings
    """The cell's headline."""
    identity: str
    """Digest of all that decides the numbers and what is measured: equal for equal runs, whatever they are called."""

    @property
    def name(self) -> str:
        """A name for people: ``FedAvg, clean, run.seed=1``."""
        return ", ".join((*self.labels, self.repeat))

    @property
    def finished(self) -> bool:
        """True when all rounds are done and what comes after them (the model, the report) is written."""
        return is_complete(self.run_dir, self.config) and (self.run_dir / "report.html").exists()


@dataclass(frozen=True)
class Sweep:
    """A sweep whose configurations are all valid."""

    file: Path
    settings: SweepSettings
    folder: Path
    """The folder of runs and tables."""
    runs: tuple[CellRun, ...]
    """All runs: the first repeat of every cell, then the second; what two cells share stands here twice, with one identity."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.settings.axes)

    @cached_property
    def cells(self) -> dict[tuple[str, ...], list[CellRun]]:
        """The runs of each cell, in the order of the axes."""
        found: dict[tuple[str, ...], list[CellRun]] = {}
        for run in self.runs:
            found.setdefault(run.labels, []).append(run)
        order = {labels: place for place, labels in enumerate(itertools.product(*self.settings.axes.values()))}
        return dict(sorted(found.items(), key=lambda item: order[item[0]]))

    @property
    def distinct(self) -> list[CellRun]:
        """The runs to be done: one for each identity."""
        return list({run.identity: run for run in reversed(self.runs)}.values())[::-1]

    def output(self, suffix: str) -> Path:
        """Return the path of a file of this sweep's results: ``output(".csv")``."""
        return self.folder / f"{self.file.stem}{suffix}"


def load_sweep(file: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Sweep:
    """Read a sweep and check all of its configurations; no recording is looked at.

    Args:
        file: the sweep's YAML file.
        overrides: ``key=value`` settings for every cell, over everything in the file.
        only: ``axis=label,label``: leave out the cells with other labels of that axis.

    Raises:
        ConfigError: the file, or the configuration of a cell, is not valid; faulty cells are named.
    """
    file = Path(file)
    settings = checked(read_groups(file, SweepSettings, "jobs/tiny_sweep.yaml"), SweepSettings, file)
    chosen = _chosen(settings, only)
    folder = folder_of(file, settings.dir, settings.settings, overrides)
    bases: dict[Path, dict[str, Any]] = {}
    runs: list[CellRun] = []
    faults: dict[str, list[str]] = {}
    for labels in itertools.product(*(chosen[name] for name in settings.axes)):
        try:
            runs += _runs_of(labels, settings, file, folder, overrides, bases)
        except ConfigError as error:
            faults.setdefault(str(error), []).append(", ".join(labels))
    if faults:
        count = sum(map(len, faults.values()))
        cells = f"{count} cell{'s' if count > 1 else ''}"
        raise ConfigError(faults_text(f"{file}: {cells} cannot be run; nothing was started", faults, 3))
    return Sweep(file, settings, folder, tuple(_by_repeat(runs)))


def _chosen(settings: SweepSettings, only: Sequence[str]) -> dict[str, list[str]]:
    chosen = {name: list(axis) for name, axis in settings.axes.items()}
    for text in only:
        name, equals, labels = text.partition("=")
        if not equals:
            raise ConfigError(f"--only {text!r} is not of the form axis=label,label")
        check_known(name, chosen, "--only: there is no axis")
        wanted = [label.strip() for label in labels.split(",")]
        for label in wanted:
            check_known(label, settings.axes[name], f"--only: axis {name!r} has no label")
        chosen[name] = [label for label in chosen[name] if label in wanted]
    return chosen


def _runs_of(
    labels: tuple[str, ...],
    settings: SweepSettings,
    file: Path,
    folder: Path,
    overrides: Sequence[str],
    bases: dict[Path, dict[str, Any]],
) -> Iterator[CellRun]:
    """Yield the runs of one cell, a run for each value of its repeated setting."""
    base, repeat, metric = settings.base, settings.repeat, settings.metric
    layers: list[tuple[str, Mapping[str, Any]]] = [("settings", settings.settings)]
    for (name, axis), label in zip(settings.axes.items(), labels, strict=True):
        part = axis[label].copy()
        where = f"axes.{name}.{label}"
        base = part.pop("base", base)
        if "repeat" in part:
            check_repeat(part["repeat"], f"{where}.repeat")
            repeat = part.pop("repeat")
        if "metric" in part:
            metric = _metric(part.pop("metric"), metric, where)
        layers.append((where, part))
    values: dict[str, Any] = {} if base is None else read_base(file.parent / base, bases)
    for where, layer in layers:
        values = laid_over(values, layer, where)
    setting, repeats = next(iter(repeat.items()))
    for value in repeats:
        own = laid_over(values, {str(setting): value}, "repeat")
        config = make_config(_settled(apply_overrides(own, overrides), settings, folder), str(file))
        if settings.summary == "chosen" and config.run.best is None:
            raise ConfigError("summary: chosen is the round that run.best chooses; set run.best in settings")
        identity = _identity(config)
        name = _run_name((*labels, f"{str(setting).rpartition('.')[2]}={label_of(value)}"), identity, folder)
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        repeated = f"{setting}={label_of(value)}"
        yield CellRun(
            labels=labels, repeat=repeated, metric=for_objective(metric, config), config=named, identity=identity
        )


def _metric(values: Any, default: MetricSettings, where: str) -> MetricSettings:
    merged = (
        {**default.model_dump(exclude={"label"}, exclude_unset=True), **values}
        if isinstance(values, Mapping)
        else values
    )
    try:
        return MetricSettings.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, f"{where}.metric", merged, MetricSettings)) from error


def _settled(values: dict[str, Any], settings: SweepSettings, folder: Path) -> dict[str, Any]:
    """Add what the sweep itself decides: where the runs lie and how many actors a cell has."""
    own = {"run.dir": str(folder), "run.name": None, "ray.actors": settings.cells.actors}
    return laid_over(values, own, "sweep")


def _identity(config: Config) -> str:
    parts: list[Any] = [config.digest(), config.train.rounds, config.evaluate.model_dump(mode="json")]
    asked = config.run.model_dump(mode="json", include={"best", "stop"}, exclude_none=True)
    if asked:
        parts.append(asked)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _run_name(words: Sequence[str], identity: str, folder: Path) -> str:
    """Return a readable name that ends in the identity; a run that has another name by an earlier label of the cell keeps it."""
    for found in sorted(folder.glob(f"*-{identity}")):
        if found.is_dir():
            return found.name
    return f"{re.sub(r'[^a-z0-9.=]+', '-', '-'.join(words).lower()).strip('-.')[:80]}-{identity}"


def _by_repeat(runs: Sequence[CellRun]) -> list[CellRun]:
    """Put the first run of every cell before the second of any: an unfinished table has something in every cell."""
    rank: dict[tuple[str, ...], int] = {}
    ranked = []
    for run in runs:
        rank[run.labels] = rank.get(run.labels, -1) + 1
        ranked.append((rank[run.labels], run))
    return [run for _, run in sorted(ranked, key=lambda pair: pair[0])]
