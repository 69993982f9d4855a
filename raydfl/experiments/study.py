"""A study: many runs described by one file, every configuration checked before the first run starts.

Words of this room. A choice of one label from every axis is a **cell**. A cell with one draw from the domains is a **contestant**.
A contestant is trained once for each value of the repeated setting: each of these runs is a **trial**. A **point** describes a
trial in plain values: the labels of its cell, its values of the domains, its repeat. Ray Tune passes points between processes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from raydfl.core import seeds
from raydfl.core.errors import ConfigError
from raydfl.core.nested import get_path
from raydfl.engine import Config, apply_overrides, make_config
from raydfl.engine.storage import RunStore, read_about, read_rows, round_of
from raydfl.experiments.settings import MetricSettings, StudySettings, check_settings, label_of, overlay, plain_value
from raydfl.runs.report import Key

_CORNERS = 32
"""Corners of the domains that are checked; of more, this many are drawn."""
_SAMPLES = 10
"""Draws where the file does not give their number."""
Point = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a study."""

    point: Point
    labels: tuple[str, ...]
    """The cell: a label of each axis."""
    values: Mapping[str, Any]
    """The draw: a value of each domain, by setting."""
    draw: str
    """The draw's name, ``trial-007``; empty in a study without domains."""
    repeat: str
    """The value of the repeated setting, ``run.seed=1``; empty: nothing is repeated."""
    metric: MetricSettings
    """The cell's headline."""
    config: Config
    """With the run's folder and name in it."""
    identity: str
    """Digest of all that decides the results and what is measured: equal for equal runs, whatever they are called."""

    @property
    def name(self) -> str:
        """A name for people: ``FedAvg, clean, run.seed=1``."""
        return ", ".join(filter(None, (*self.labels, self.draw, self.repeat)))

    @property
    def text(self) -> str:
        """The draw in one line: ``method.alpha=0.5 method.vl=0.1``."""
        return " ".join(f"{key}={describe_value(value)}" for key, value in self.values.items())

    @property
    def run_dir(self) -> Path:
        """The run's folder, which may not exist yet."""
        return Path(self.config.run.dir) / str(self.config.run.name)

    @property
    def keys(self) -> list[Key]:
        """Names of the headline in the record, by preference. The mean over clients comes first where clients measured it."""
        return keys_of(self.config, self.metric)

    @property
    def finished(self) -> bool:
        """True when all rounds are done and the model and the report are written."""
        return is_complete(self.run_dir, self.config) and (self.run_dir / "report.html").exists()


@dataclass(frozen=True)
class Study:
    """A study whose configurations are all valid."""

    file: Path
    settings: StudySettings
    folder: Path
    """The folder of runs and tables."""
    overrides: tuple[str, ...] = ()
    """Settings of the command line, for all runs."""
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Labels of the axes that are looked at."""
    bases: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Base configurations, by their names in the file."""
    trials: tuple[Trial, ...] = ()
    """All trials that are known beforehand: the first repeat of every contestant, then the second, and so on. With optuna none is
    known, and with pbt the first members are. Trials with equal configurations have equal identities."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.settings.axes)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The labels of each cell, in the order of the axes."""
        return list(itertools.product(*(self.only.get(name, list(axis)) for name, axis in self.settings.axes.items())))

    @property
    def samples(self) -> int:
        """Number of draws from the domains; 1 without domains."""
        domains = self.settings.domains
        if self.settings.searcher == "grid" or not domains:
            return math.prod(len(domain.values) for domain in domains.values())
        return self.settings.samples or _SAMPLES

    @property
    def distinct(self) -> list[Trial]:
        """The trials to be trained: one for each identity."""
        return distinct(self.trials)

    @cached_property
    def first(self) -> Trial:
        """A trial at a corner of the domains, for what all trials have in common."""
        return self.at_corner(next(corners(self.settings)))

    def at_corner(self, values: Mapping[str, Any]) -> Trial:
        """Return the trial with these values in the first cell."""
        labels = self.cells[0]
        return self.trial(self.point(labels, values, next(iter(self.repeats(labels)))))

    @property
    def rounds(self) -> int:
        """Most rounds of a trial."""
        return self.first.config.train.rounds

    @property
    def total(self) -> int:
        """Number of trials."""
        return len(self.distinct) or self.samples

    def output(self, suffix: str) -> Path:
        """Return the path of a file of the study's results: ``output(".csv")``."""
        return self.folder / f"{self.file.stem}{suffix}"

    def draw(self, number: int) -> Point:
        """Return a draw from the domains, with its number. A setting's values do not depend on the other settings."""
        domains = self.settings.domains
        if self.settings.searcher == "grid":
            combinations = itertools.product(*(domain.values for domain in domains.values()))
            values = dict(zip(domains, next(itertools.islice(combinations, number, None)), strict=True))
        else:
            values = {
                key: domain.draw(seeds.generator(self.settings.seed, number, "", f"search {key}"))
                for key, domain in domains.items()
            }
        return {"trial": number, **values}

    # -- configurations ----------------------------------------------------------------------------------------------

    def repeats(self, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return, by text, the setting and value of each repeat of a cell."""
        repeat = self._own(labels, "repeat", self.settings.repeat)
        if repeat is None:
            repeat = {} if self.settings.domains else {"run.seed": [1]}
        found = {f"{key}={label_of(value)}": {key: value} for key, values in repeat.items() for value in values}
        return found or {"": {}}

    def _own(self, labels: Sequence[str], key: str, default: Any) -> Any:
        """Return what the last label of a cell gives for ``base``, ``repeat`` or ``metric``."""
        parts = [axis[label] for axis, label in zip(self.settings.axes.values(), labels, strict=True)]
        return next((part[key] for part in reversed(parts) if key in part), default)

    def point(self, labels: Sequence[str], draw: Mapping[str, Any], repeat: str) -> Point:
        """Return the point of a trial."""
        return {**dict(zip(self.axes, labels, strict=True)), **draw, **({"repeat": repeat} if repeat else {})}

    def trial(self, point: Mapping[str, Any], trial_id: str = "") -> Trial:
        """Return the trial of a point.

        Args:
            trial_id: Ray Tune's, which names the folder of a member of a population: its settings change.

        Raises:
            ConfigError: the point makes no valid configuration.
        """
        labels = tuple(str(point[name]) for name in self.axes)
        values = {key: plain_value(point[key]) for key in self.settings.domains}
        repeat = str(point.get("repeat") or next(iter(self.repeats(labels))))
        layers = [("settings", self.settings.settings)]
        for (name, axis), label in zip(self.settings.axes.items(), labels, strict=True):
            own = {key: value for key, value in axis[label].items() if key not in ("base", "repeat", "metric")}
            layers.append((f"axes.{name}.{label}", own))
        layers += [("domains", values), ("repeat", self.repeats(labels)[repeat])]
        base = self._own(labels, "base", self.settings.base)
        config = self._configure({} if base is None else self.bases[str(base)], layers)
        metric = self._metric(labels, config)
        if self.settings.patience is not None:
            config = self._configure_patience(config, metric)
        identity = _identity(config)
        draw = f"trial-{point['trial']:03d}" if "trial" in point else "trial" * bool(values)
        key, equals, value = repeat.partition("=")
        words = [*labels, draw, f"{key.rpartition('.')[2]}{equals}{value}"]
        member = bool(trial_id) and self.settings.population is not None
        name = f"trial-{trial_id}" if member else _run_name([*filter(None, words)], config, identity)
        return Trial(
            point=dict(point),
            labels=labels,
            values=values,
            draw=name if draw == "trial" or member else draw,
            repeat=repeat,
            metric=metric,
            config=config.model_copy(update={"run": config.run.model_copy(update={"name": name})}),
            identity=name if member else identity,
        )

    def _configure(self, base: dict[str, Any], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Config:
        values, explicit = base, dict[str, Any]()
        for where, layer in layers:
            values = overlay(values, layer, where)
            explicit = overlay(explicit, layer, where)
        values = apply_overrides(values, self.overrides)
        actors = self.settings.actors
        if actors is None:
            actors = get_path(apply_overrides(explicit, self.overrides), "ray.actors") or 0
        own = {"run.dir": str(self.folder), "run.name": None, "ray.actors": actors}
        own |= {} if self.settings.rounds is None else {"train.rounds": self.settings.rounds}
        config = make_config(overlay(values, own, "study"), str(self.file))
        if self.settings.summarised == "chosen" and config.run.best is None:
            raise ConfigError("summary: chosen is the round that run.best chooses; set run.best in settings")
        return config

    def _metric(self, labels: Sequence[str], config: Config) -> MetricSettings:
        """Return the headline of a cell, with its score and split."""
        default, given = self.settings.metric, self._own(labels, "metric", {})
        if isinstance(given, Mapping):
            given = {**default.model_dump(exclude_unset=True, exclude={"label"} if given else set()), **given}
        where = ".".join(("axes", *labels, "metric"))
        return self.resolve(check_settings(given, MetricSettings, self.file, where), config)

    def resolve(self, metric: MetricSettings, config: Config) -> MetricSettings:
        """Return a metric with the split and the score that it leaves open; the score is the headline of the runs' objective."""
        own = {"split": metric.split or ("validation" if self.settings.domains else "test")}
        if "score" not in metric.model_fields_set:
            own["score"] = config.parts.method.objective.headline
        return metric.model_copy(update=own)

    def _configure_patience(self, config: Config, metric: MetricSettings) -> Config:
        if config.run.stop is not None:
            raise ConfigError("patience is run.stop of all trials, and run.stop is set too; remove one of them")
        split, name = keys_of(config, metric)[1]  # the pooled metric
        stop = {"metric": f"{split} {name}", "mode": metric.best, "patience": self.settings.patience}
        return make_config(overlay(config.model_dump(mode="json"), {"run.stop": stop}, "patience"), str(self.file))


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """Return the first trial of each identity."""
    return list({trial.identity: trial for trial in reversed(trials)}.values())[::-1]


def describe_value(value: Any) -> str:
    """Return a value of a domain as text, a number with few digits."""
    return f"{value:.4g}" if isinstance(value, float) else label_of(value)


def keys_of(config: Config, metric: MetricSettings) -> list[Key]:
    """Return the names of a metric in the record, by preference. The mean over clients comes first."""
    models = [metric.model] if metric.model else list(config.parts.models)[:1]
    names = [*(f"{model}/{metric.score}" for model in models), metric.score]
    return [(metric.split or "test", key) for name in names for key in (f"{name}_client_mean", name)]


def _identity(config: Config) -> str:
    parts: list[Any] = [config.digest(), config.train.rounds, config.evaluate.model_dump(mode="json")]
    parts += filter(None, [config.run.model_dump(mode="json", include={"best", "stop"}, exclude_none=True)])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _run_name(words: Sequence[str], config: Config, identity: str) -> str:
    """Return a readable name that ends in the identity; a run with another name from an earlier label or version keeps it."""
    folder = Path(config.run.dir)
    found = [each.name for each in sorted(folder.glob(f"*-{identity}")) if each.is_dir()]
    if found:
        return found[0]
    former = folder / words[0]  # trial-007, of an earlier version
    if (former / "run.json").is_file() and read_about(former).get("digest") == config.digest():
        return former.name
    return f"{re.sub(r'[^a-z0-9.=]+', '-', '-'.join(words).lower()).strip('-.')[:80]}-{identity}"


def corners(settings: StudySettings) -> Iterator[dict[str, Any]]:
    """Yield values at the ends of all domains, in every combination; of too many, the first, the last and some drawn ones."""
    ends = {key: domain.ends() for key, domain in settings.domains.items()}
    if math.prod(map(len, ends.values())) <= _CORNERS:
        for chosen in itertools.product(*ends.values()):
            yield dict(zip(ends, chosen, strict=True))
        return
    lows = {key: values[0] for key, values in ends.items()}
    yield lows
    yield {key: values[-1] for key, values in ends.items()}
    for key, values in ends.items():  # so that every end of every domain is checked
        for value in values:
            yield {**lows, key: value}
    rng = seeds.generator(settings.seed, 0, "", "search corners")
    for _ in range(_CORNERS):
        yield {key: values[int(rng.integers(len(values)))] for key, values in ends.items()}


def is_complete(folder: Path, config: Config) -> bool:
    """Return whether a run folder has all rounds of its configuration, or ``run.stop`` has ended the training there."""
    done = rounds_done(folder)
    if done >= config.train.rounds:
        return True
    where = (pc.field("metric") == "stopped") & (pc.field("client") == "") & (pc.field("round") == done)
    return config.run.stop is not None and done > 0 and read_rows(folder, done, where=where).num_rows > 0


def rounds_done(folder: Path) -> int:
    """Return the rounds that a run folder has committed; 0 where no run has begun."""
    latest = RunStore(folder).latest() if (folder / "run.json").exists() else None
    return 0 if latest is None else round_of(latest)
