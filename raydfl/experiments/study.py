"""A study: many runs described by one file, every configuration checked before the first run starts.

Words of this room. A choice of one label from every axis is a **cell**. A cell with one draw from the domains is a **contestant**.
A contestant is trained once for each value of the repeated setting: each of these runs is a **trial**. A **point** describes a
trial in plain values: the labels of its cell, its values of the domains, its repeat. Ray Tune passes points between processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from raydfl.core import seeds
from raydfl.core.errors import ConfigError
from raydfl.core.metrics import HARMONIC_MEAN, HIGHER_IS_BETTER, OF_CLIENTS
from raydfl.core.nested import get_path
from raydfl.core.remote import is_uri
from raydfl.engine import Config, apply_overrides, make_config
from raydfl.engine.storage import RunStore, read_rows, round_of, stored_about
from raydfl.experiments.files import (
    check_known,
    check_settings,
    describe_faults,
    find_folder,
    overlay,
    read_base,
    read_groups,
)
from raydfl.experiments.settings import FORMER, MetricSettings, StudySettings, label_of
from raydfl.methods import Method
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
        return describe_values(self.values)

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
        return list({trial.identity: trial for trial in reversed(self.trials)}.values())[::-1]

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
        values = {key: _plain(point[key]) for key in self.settings.domains}
        repeat = str(point.get("repeat", ""))
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
        if self.settings.rounds is not None:
            own["train.rounds"] = self.settings.rounds
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
        """Return a metric with the score and the split that it leaves open."""
        split = metric.split or ("validation" if self.settings.domains else "test")
        return for_objective(metric.model_copy(update={"split": split}), config)

    def _configure_patience(self, config: Config, metric: MetricSettings) -> Config:
        if config.run.stop is not None:
            raise ConfigError("patience is run.stop of all trials, and run.stop is set too; remove one of them")
        split, name = keys_of(config, metric)[1]  # the pooled metric
        stop = {"metric": f"{split} {name}", "mode": metric.best, "patience": self.settings.patience}
        return make_config(overlay(config.model_dump(mode="json"), {"run.stop": stop}, "patience"), str(self.file))


def describe_values(values: Mapping[str, Any]) -> str:
    """Return values of domains in one line: ``method.alpha=0.5 method.vl=0.1``."""
    return " ".join(f"{key}={label_of(value)}" for key, value in values.items())


def for_objective(metric: MetricSettings, config: Config) -> MetricSettings:
    """Return a metric with the headline of a run's objective as its score, where none was given."""
    headline = config.parts.method.objective.headline
    if "score" in metric.model_fields_set or metric.score == headline:
        return metric
    return metric.model_copy(update={"score": headline})


def keys_of(config: Config, metric: MetricSettings) -> list[Key]:
    """Return the names of a metric in the record, by preference. The mean over clients comes first."""
    models = [metric.model] if metric.model else list(config.parts.models)[:1]
    names = [*(f"{model}/{metric.score}" for model in models), metric.score]
    return [(metric.split or "test", key) for name in names for key in (f"{name}_client_mean", name)]


def _plain(value: Any) -> Any:
    """Return a value of numpy's as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _identity(config: Config) -> str:
    parts: list[Any] = [config.digest(), config.train.rounds, config.evaluate.model_dump(mode="json")]
    asked = config.run.model_dump(mode="json", include={"best", "stop"}, exclude_none=True)
    if asked:
        parts.append(asked)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _run_name(words: Sequence[str], config: Config, identity: str) -> str:
    """Return a readable name that ends in the identity; a run with another name from an earlier label or version keeps it."""
    folder = Path(config.run.dir)
    for found in sorted(folder.glob(f"*-{identity}")):
        if found.is_dir():
            return found.name
    former = folder / words[0]  # trial-007, of an earlier version
    if (former / "run.json").is_file() and stored_about(former).get("digest") == config.digest():
        return former.name
    return f"{re.sub(r'[^a-z0-9.=]+', '-', '-'.join(words).lower()).strip('-.')[:80]}-{identity}"


# -- reading ---------------------------------------------------------------------------------------------------------


def load_study(file: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Study:
    """Read a study and check all of its configurations; no recording is looked at.

    Args:
        file: the study's YAML file.
        overrides: ``key=value``: the study's own settings (``samples=20``), and settings of all runs (``train.cohort=5``).
        only: ``axis=label,label``: leave out the cells with other labels of that axis.

    Raises:
        ConfigError: the file, or a configuration, is not valid; faulty cells are named.
    """
    file = Path(file)
    own = [
        text for text in overrides if text.partition("=")[0].partition(".")[0] in {*StudySettings.model_fields, *FORMER}
    ]
    groups = apply_overrides(read_groups(file, StudySettings, FORMER, "jobs/tiny_sweep.yaml"), own)
    if is_uri(groups.get("dir")):
        raise ConfigError(f"dir: {groups['dir']} is a URI, but a study works in one folder; give an absolute path")
    settings = check_settings(groups, StudySettings, file)
    others = tuple(text for text in overrides if text not in own)
    chosen = _choose(settings, only)
    folder = find_folder(file, settings.dir, settings.settings, others)
    labels = [axis[label] for name, axis in settings.axes.items() for label in chosen[name]]
    named = {str(part["base"]) for part in (*labels, {"base": settings.base}) if part.get("base")}
    bases = {name: read_base((file.parent / name).resolve()) for name in named}
    study = Study(file, settings, folder, others, chosen, bases)
    if settings.domains:
        check_domains(study)
    return replace(study, trials=_make_trials(study))


def _choose(settings: StudySettings, only: Sequence[str]) -> dict[str, list[str]]:
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


def _make_trials(study: Study) -> tuple[Trial, ...]:
    """Return the trials of a study that are known beforehand.

    Raises:
        ConfigError: naming the cells whose configurations are not valid.
    """
    if study.settings.searcher == "optuna":
        return ()
    draws = [study.draw(number) for number in range(study.samples)] if study.settings.domains else [{}]
    found: list[tuple[int, Trial]] = []
    faults: dict[str, list[str]] = {}
    for labels in study.cells:
        try:
            for (place, repeat), draw in itertools.product(enumerate(study.repeats(labels)), draws):
                found.append((place, study.trial(study.point(labels, draw, repeat))))
        except ConfigError as error:
            faults.setdefault(str(error), []).append(", ".join(labels))
    if faults:
        count = sum(map(len, faults.values()))
        cells = f"{count} cell{'s' if count > 1 else ''}"
        raise ConfigError(describe_faults(f"{study.file}: {cells} cannot be run; nothing was started", faults, 3))
    return tuple(trial for _, trial in sorted(found, key=lambda pair: pair[0]))


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


def check_domains(study: Study) -> None:
    """Reject domains of settings that do not exist, do not matter, or do not fit together.

    Raises:
        ConfigError: naming file, values and what is wrong.
    """
    for values in corners(study.settings):
        try:
            study.at_corner(values)
        except ConfigError as error:
            text = ", ".join(f"{key}={label_of(value)}" for key, value in values.items())
            raise ConfigError(
                f"{study.file}: a trial with {text} cannot be run; nothing was started: {error}"
            ) from error
    settings, metric, config = study.settings, study.first.metric, study.first.config
    method, population = config.parts.method, settings.population
    if metric.model is not None:
        check_known(metric.model, config.parts.models, f"{study.file}: metric.model: there is no model")
    if type(method).evaluate is Method.evaluate:  # else the method measures what it likes
        known = [score + suffix for score in HIGHER_IS_BETTER for suffix in ("", *OF_CLIENTS, HARMONIC_MEAN)]
        check_known(metric.score, known, f"{study.file}: metric.score: nothing measures")
    every, rounds = config.evaluate.every, study.rounds
    faults = {
        "metric.split is validation, but clients hold nothing out: data.split.validation is 0; set it, or take split: test": (
            metric.split == "validation" and not any(data.split.validation for data in config.data.each.values())
        ),
        "data.sites: scheduler pbt copies run folders, but private models and data stay at the sites; take scheduler asha": (
            bool(config.data.sites) and population is not None
        ),
        f"evaluate.every is {every} and trials have {rounds} rounds: nothing is known of a trial before its end; lower "
        f"evaluate.every": every > rounds and settings.scheduler.name != "none",
    }
    for key, domain in settings.domains.items():
        lows = next(corners(settings))
        if len({study.at_corner({**lows, key: end}).config.digest() for end in domain.ends()}) < len(domain.ends()):
            given = any(text.partition("=")[0] == key for text in study.overrides)
            why = f"{key} is set on the command line" if given else f"{key} does not decide what is learned"
            more = "; the length of a trial is rounds and scheduler" if key == "train.rounds" else ""
            faults[f"domains.{key}: trials would not differ: {why}; take it out of the domains{more}"] = True
        if population is not None and not fits_state(key, method):
            faults[
                f"domains.{key}: scheduler pbt changes settings in the middle of a training, which {key} does not allow; "
                f"{CHANGEABLE}; take it out of the domains, or take scheduler asha"
            ] = True
    if population is not None:
        interval = population.interval
        faults |= {
            f"scheduler.interval is {interval} and trials have {rounds} rounds: there is no exchange; lower it": interval
            >= rounds,
            f"samples: scheduler pbt needs a population of at least 2, not {study.samples}": study.samples < 2,
        }
    for message, wrong in faults.items():
        if wrong:
            raise ConfigError(f"{study.file}: {message}")


# -- the state of runs -----------------------------------------------------------------------------------------------


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


_COUNTS = ("train.local_epochs", "train.batch_size")
CHANGEABLE = (
    f"it can change train.optimiser.*, {', '.join(_COUNTS)} and those fields of a method that are numbers with a decimal "
    f"point"
)
"""The settings for which :func:`fits_state` holds, in words."""


def fits_state(key: str, method: Method) -> bool:
    """Return whether a setting may change in the middle of a training: the state fits each of its values."""
    group, _, name = key.partition(".")
    fields = {item.name: item.type for item in dataclasses.fields(method)}
    rate = group == "method" and "float" in str(fields.get(name, ""))
    return rate or key in _COUNTS or (key.startswith("train.optimiser.") and key != "train.optimiser.name")
