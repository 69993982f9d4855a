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

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import explain
from raydfl.core.remote import is_uri
from raydfl.core.settings import Settings
from raydfl.core.yaml import parse_yaml, to_yaml
from raydfl.engine.config import Config, apply_overrides, make_config
from raydfl.experiments.sweep.settings import MetricSettings, SweepSettings, check_known, check_repeat, label_of

_LISTED = 10
"""Faulty cells that a message names."""
_WHOLE_GROUPS = ("train", "evaluate", "ray", "run", "track")
"""Groups that an axis would hardly mean to replace as a whole."""


# -- cells -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellRun:
    """One run of one cell."""

    labels: tuple[str, ...]
    """The cell: a label of each axis."""
    repeat: str
    """The value of the repeated setting, ``run.seed=1``."""
    metric: MetricSettings
    """The cell's headline."""
    config: Config
    """With the run's folder and name in it."""
    identity: str
    """Digest of all that decides the numbers and what is measured: equal for equal runs, whatever they are called."""

    @property
    def name(self) -> str:
        """For people: ``FedAvg, clean, run.seed=1``."""
        return ", ".join((*self.labels, self.repeat))

    @property
    def run_dir(self) -> Path:
        """The run's folder, there or to be made."""
        return Path(self.config.run.dir) / str(self.config.run.name)


@dataclass(frozen=True)
class Sweep:
    """A sweep whose configurations are all valid."""

    file: Path
    settings: SweepSettings
    folder: Path
    """Where the runs and tables lie."""
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
        """A file of this sweep's results: ``output(".csv")``."""
        return self.folder / f"{self.file.stem}{suffix}"


def load_sweep(file: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Sweep:
    """A sweep with all of its configurations; no recording is looked at.

    Args:
        file: the sweep's YAML file.
        overrides: ``key=value`` settings for every cell, over everything in the file.
        only: ``axis=label,label``: leave out the cells with other labels of that axis.

    Raises:
        ConfigError: the file, or the configuration of a cell, is not valid; faulty cells are named.
    """
    file = Path(file)
    values = read_groups(file, SweepSettings, "jobs/tiny_sweep.yaml")
    try:
        settings = SweepSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, '', values, SweepSettings)}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
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
        raise ConfigError(_faults(faults, file))
    return Sweep(file, settings, folder, tuple(_by_repeat(runs)))


def read_groups(file: Path, settings: type[Settings], example: str) -> dict[str, Any]:
    """The contents of a file, whose keys must be fields of ``settings``.

    Args:
        example: a file of that kind, for messages.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an unknown key.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"cannot read {file}: {reason}; give a YAML file, such as {example} (raydfl init writes it)"
        ) from error
    values = parse_yaml(text, str(file))
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold the groups {', '.join(settings.model_fields)}")
    for key in values:
        if key not in settings.model_fields:
            hint = nearest(str(key), settings.model_fields)
            own = f"; settings of the runs go below settings: or into {key}=... on the command line"
            raise ConfigError(f"{file}: unknown key {key!r}; {hint}{own if key in Config.model_fields else ''}")
    return values


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


def folder_of(file: Path, own: Path | None, settings: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    """Return where the runs of a file lie: run.dir of the command line, or as below, or runs/ and the file's name.

    Args:
        file: of a sweep or a search.
        own: its ``dir``, which goes before run.dir in ``settings``.
        settings: its settings of all runs.
        overrides: settings from the command line.

    Raises:
        ConfigError: it is a URI.
    """
    asked = [
        _run_dir(apply_overrides({}, overrides)),
        own,
        _run_dir(laid_over({}, settings, "settings")),
        Path("runs") / file.stem,
    ]
    folder = next(given for given in asked if given is not None)
    if is_uri(folder):
        raise ConfigError(
            f"run.dir: {folder} is a URI, but all runs of {file} lie in one folder; give an absolute path"
        )
    return Path(folder).expanduser().resolve()


def _run_dir(values: Mapping[str, Any]) -> str | None:
    group = values.get("run")
    found = group.get("dir") if isinstance(group, Mapping) else None
    return None if found is None else str(found)


def _runs_of(
    labels: tuple[str, ...],
    settings: SweepSettings,
    file: Path,
    folder: Path,
    overrides: Sequence[str],
    bases: dict[Path, dict[str, Any]],
) -> Iterator[CellRun]:
    """The runs of one cell, a run for each value of its repeated setting."""
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
        identity = _identity(config)
        name = _run_name((*labels, f"{str(setting).rpartition('.')[2]}={label_of(value)}"), identity, folder)
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        yield CellRun(labels, f"{setting}={label_of(value)}", metric, named, identity)


def read_base(path: Path, bases: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """The base configuration as plain data, each file read once.

    Raises:
        ConfigError: it cannot be read, or holds no groups.
    """
    path = path.resolve()
    if path not in bases:
        try:
            values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"the base configuration {path} cannot be read: {reason}; correct base") from error
        if not isinstance(values, dict):
            raise ConfigError(f"the base configuration {path} must hold groups of settings")
        bases[path] = values
    return bases[path]


def _metric(values: Any, default: MetricSettings, where: str) -> MetricSettings:
    merged = {**default.model_dump(exclude={"label"}), **values} if isinstance(values, Mapping) else values
    try:
        return MetricSettings.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, f"{where}.metric", merged, MetricSettings)) from error


def laid_over(values: dict[str, Any], part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``part``'s settings over ``values`` by the command line's rule: a key is a path, and its value takes the place of the old.

    Raises:
        ConfigError: a key goes through what is no group, or would replace a whole one.
    """
    for key in part:
        if key in _WHOLE_GROUPS and values.get(key):
            raise ConfigError(
                f"{where}: {key} would replace the whole group; write single settings, such as {key}.name: value"
            )
    try:
        return apply_overrides(values, [f"{key}={to_yaml(value)}" for key, value in part.items()])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _settled(values: dict[str, Any], settings: SweepSettings, folder: Path) -> dict[str, Any]:
    """With what the sweep itself decides: where the runs lie and how many actors a cell has."""
    own = {"run.dir": str(folder), "run.name": None, "ray.actors": settings.cells.actors}
    return laid_over(values, own, "sweep")


def _identity(config: Config) -> str:
    parts = [config.digest(), config.train.rounds, config.evaluate.model_dump(mode="json")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _run_name(words: Sequence[str], identity: str, folder: Path) -> str:
    """A readable name that ends in the identity; a run that has another name by an earlier label of the cell keeps it."""
    for found in sorted(folder.glob(f"*-{identity}")):
        if found.is_dir():
            return found.name
    return f"{re.sub(r'[^a-z0-9.=]+', '-', '-'.join(words).lower()).strip('-.')[:80]}-{identity}"


def _by_repeat(runs: Sequence[CellRun]) -> list[CellRun]:
    """The first run of every cell before the second of any: an unfinished table has something in every cell."""
    rank: dict[tuple[str, ...], int] = {}
    ranked = []
    for run in runs:
        rank[run.labels] = rank.get(run.labels, -1) + 1
        ranked.append((rank[run.labels], run))
    return [run for _, run in sorted(ranked, key=lambda pair: pair[0])]


def _faults(faults: Mapping[str, Sequence[str]], file: Path) -> str:
    count = sum(len(cells) for cells in faults.values())
    lines = [f"{file}: {count} cell{'s' if count > 1 else ''} cannot be run; nothing was started"]
    for message, cells in list(faults.items())[:_LISTED]:
        more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
        lines.append(f"  {'; '.join(cells[:3])}{more}: {message}")
    if len(faults) > _LISTED:
        lines.append(f"  and {len(faults) - _LISTED} more messages")
    return "\n".join(lines)
