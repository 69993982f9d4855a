"""A study: many runs described by a file. All configurations are checked before the first run starts.

Terms of this room: a **cell** is a choice of a label from every axis. A **contestant** is a cell with a draw from the domains. A
contestant is trained once for each value of the repeated setting, and each of these runs is a **trial**. A **point** describes a
trial in plain values: the labels of its cell, its draw, its repeat. Ray Tune passes points between processes.
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
from raydfl.core.options import path_options
from raydfl.core.part_names import qualify
from raydfl.data import find_dataset
from raydfl.engine import Config, apply_overrides, holds_out, make_config
from raydfl.engine.storage import RunStore, read_about, read_rows, round_of
from raydfl.experiments.domains import Domain
from raydfl.experiments.settings import MetricSettings, StudySettings, check_settings, label_of, overlay, plain_value
from raydfl.runs.report import Key

_CORNERS = 32
"""Maximum number of checked corners of the domains. If the domains have more, this number is drawn."""
_SAMPLES = 10
"""Default number of draws."""
_NOT_SETTINGS = ("base", "repeat", "metric", "domains")
"""Keys of a label that are not settings of its runs."""
Point = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of a study."""

    point: Point
    labels: tuple[str, ...]
    """The cell: a label of each axis."""
    values: Mapping[str, Any]
    """The draw: a value of each domain, by setting."""
    draw: str
    """Name of the draw, ``trial-007``; empty without domains."""
    repeat: str
    """Value of the repeated setting, ``run.seed=1``; empty without a repeated setting."""
    metric: MetricSettings
    """The cell's headline."""
    config: Config
    """Configuration with the run's folder and name."""
    identity: str
    """Digest of all settings that affect results and measurements. Equal runs have equal digests under any name."""
    result: tuple[str, str] = ("", "")
    """Identity and configuration digest of the JSON file. They do not depend on the places of the data sets."""
    result_file: Path | None = None
    """JSON file of the run's result; ``None``: results stay in the run's folder."""

    @property
    def name(self) -> str:
        """Name for tables and messages: ``FedAvg, clean, run.seed=1``."""
        return ", ".join(filter(None, (*self.labels, self.draw, self.repeat)))

    @property
    def text(self) -> str:
        """The draw on a single line: ``method.alpha=0.5 method.vl=0.1``."""
        return " ".join(f"{key}={describe_value(value)}" for key, value in self.values.items())

    @property
    def run_dir(self) -> Path:
        """Path of the run's folder."""
        return Path(self.config.run.dir) / str(self.config.run.name)

    @property
    def keys(self) -> list[list[Key]]:
        """Names of the headline in the metrics table, by preference: a single name, or a name for each part of the data."""
        keys = list_keys(self.config, self.metric)
        return [names for key in keys for names in ([key], list_part_keys(self.config, key))]

    @property
    def finished(self) -> bool:
        """True if all rounds are completed, and model and report, or the JSON file, are written."""
        if self.result_file is not None and self.result_file.exists():
            return True
        return is_complete(self.run_dir, self.config) and (self.run_dir / "report.html").exists()


@dataclass(frozen=True)
class Tuned:
    """Settings of a cell from a search."""

    values: Mapping[str, Any]
    """Settings of the best draw."""
    extreme: Sequence[str] = ()
    """Settings whose best value is the smallest or the largest of the search."""
    learned: bool = True
    """Whether the best draw learned in the search."""
    own: bool = True
    """Whether the search has the cell. Otherwise the cell is a trained control with the settings of the study's control."""
    draws: int = 0
    """Number of draws of the search."""
    repeats: int = 1
    """Number of repeats of a draw."""


@dataclass(frozen=True)
class Study:
    """A study with valid configurations."""

    file: Path
    settings: StudySettings
    folder: Path
    """Folder of runs and tables."""
    overrides: tuple[str, ...] = ()
    """Settings of the command line for all runs."""
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Selected labels by axis."""
    bases: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Base configurations by their names in the file."""
    tuned: Mapping[tuple[str, ...], Tuned] = field(default_factory=dict)
    """Tuned settings by the labels of a cell."""
    trials: tuple[Trial, ...] = ()
    """All planned trials: the first repeat of every contestant, then the second, and so on. With optuna the tuple is empty, and
    with pbt it has the first members. Trials with equal configurations have equal identities."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.settings.axes)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Labels of each cell, in the order of the axes."""
        return list(itertools.product(*(self.only.get(name, list(axis)) for name, axis in self.settings.axes.items())))

    @property
    def contestants_axis(self) -> str:
        """Name of the axis of contestants: the axis of ``control``, or the last axis. Empty without axes."""
        return next(iter(self.settings.control), self.axes[-1] if self.axes else "")

    def get_data_labels(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the labels of a cell without the contestant's label. They determine the data."""
        axis = self.contestants_axis
        return tuple(label for name, label in zip(self.axes, labels, strict=True) if name != axis)

    def find_control(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the labels of the control of a cell."""
        return tuple(self.settings.control.get(name, label) for name, label in zip(self.axes, labels, strict=True))

    @property
    def comparisons(self) -> int:
        """Planned number of comparisons of a cell with its control."""
        cells = itertools.product(*self.settings.axes.values()) if self.settings.control else ()
        return sum(self.find_control(labels) != labels for labels in cells)

    def list_pairs(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """List the labels of the further pairs of cells to compare, of the whole study: the first minus the second."""
        pairs, cells = [], [*itertools.product(*self.settings.axes.values())]
        for first, second in self.settings.compare:
            for labels in cells:
                by_axis = dict(zip(self.axes, labels, strict=True))
                pair = tuple({**by_axis, **first}.values()), tuple({**by_axis, **second}.values())
                if pair not in pairs:
                    pairs.append(pair)
        return pairs

    @property
    def samples(self) -> int:
        """Number of draws from the domains; 1 without domains."""
        domains = self.settings.get_domains(self.cells[0])  # of equal size in all cells
        if self.settings.searcher == "grid" or not domains:
            return math.prod(len(domain.values) for domain in domains.values())
        return self.settings.samples or _SAMPLES

    @property
    def distinct(self) -> list[Trial]:
        """Planned trials without duplicates."""
        return distinct(self.trials)

    @cached_property
    def first(self) -> Trial:
        """A trial at a corner of the domains, used for the common settings of all trials."""
        return self.make_corner_trial(next(self.corners()))

    def make_corner_trial(self, values: Mapping[str, Any]) -> Trial:
        """Make a trial of the first cell with these values of the domains."""
        labels = self.cells[0]
        return self.trial(self.point(labels, values, next(iter(self.repeats(labels)))))

    @property
    def rounds(self) -> int:
        """Number of rounds of a complete trial."""
        return self.first.config.train.rounds

    @property
    def total(self) -> int:
        """Number of trials."""
        return len(self.distinct) or self.samples

    @property
    def results_folder(self) -> Path | None:
        """Folder of the JSON files; ``None``: results stay in the folders of the runs."""
        return None if self.settings.results is None else (self.file.parent / self.settings.results).resolve()

    @property
    def only_some(self) -> bool:
        """True if only some labels of an axis are selected."""
        return any(list(self.only.get(name, axis)) != list(axis) for name, axis in self.settings.axes.items())

    def output(self, suffix: str) -> Path:
        """Return the path of an output file of the study: ``output(".csv")``."""
        return self.folder / f"{self.file.stem}{suffix}"

    def corners(self) -> Iterator[dict[str, Any]]:
        """Yield combinations of the ends of the first cell's domains."""
        return corners(self.settings.get_domains(self.cells[0]), self.settings.seed)

    @cached_property
    def searched(self) -> dict[str, Domain]:
        """All domains, of the study and of its labels. The values of different labels are joined."""
        searched = dict(self.settings.domains)
        for labels in itertools.product(*self.settings.axes.values()):
            for key, domain in self.settings.get_domains(labels).items():
                known = searched.get(key, domain)
                if known != domain:
                    values = [*known.values, *(value for value in domain.values if value not in known.values)]
                    numbers = all(isinstance(value, int | float) for value in values)
                    known = Domain(grid=sorted(values, key=None if numbers else label_of))
                searched[key] = known
        return searched

    def draw(self, number: int, labels: Sequence[str] = ()) -> Point:
        """Draw values from the domains of a cell. The values of a setting are independent of all further domains.

        Args:
            number: Number of the draw, from 0.
            labels: Labels of the cell. Empty: the first cell.
        """
        domains = self.settings.get_domains(labels or self.cells[0])
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
        """Return the setting and value of each repeat of a cell, by their text ``run.seed=1``."""
        repeat = self._get_cell_value(labels, "repeat", self.settings.repeat)
        if repeat is None:
            repeat = {} if self.settings.domains else {"run.seed": [1]}
        repeats = {f"{key}={label_of(value)}": {key: value} for key, values in repeat.items() for value in values}
        return repeats or {"": {}}

    def _get_cell_value(self, labels: Sequence[str], key: str, default: Any) -> Any:
        """Return ``base``, ``repeat`` or ``metric`` of a cell. The label of the last axis takes precedence."""
        parts = [axis[label] for axis, label in zip(self.settings.axes.values(), labels, strict=True)]
        return next((part[key] for part in reversed(parts) if key in part), default)

    def point(self, labels: Sequence[str], draw: Mapping[str, Any], repeat: str) -> Point:
        """Make the point of a trial."""
        return {**dict(zip(self.axes, labels, strict=True)), **draw, **({"repeat": repeat} if repeat else {})}

    def trial(self, point: Mapping[str, Any], trial_id: str = "") -> Trial:
        """Make the trial of a point.

        Args:
            point: Labels, draw and repeat.
            trial_id: Ray Tune's id. It names the folder of a member of a population, whose settings change.

        Raises:
            ConfigError: The configuration of the point is not valid.
        """
        labels = tuple(str(point[name]) for name in self.axes)
        values = {key: plain_value(point[key]) for key in self.settings.get_domains(labels)}
        repeat = str(point.get("repeat") or next(iter(self.repeats(labels))))
        layers = [("settings", self.settings.settings)]
        for (name, axis), label in zip(self.settings.axes.items(), labels, strict=True):
            layer = {key: value for key, value in axis[label].items() if key not in _NOT_SETTINGS}
            layers.append((f"axes.{name}.{label}", layer))
        layers += [
            ("tuned", dict(self.tuned[labels].values) if labels in self.tuned else {}),
            ("domains", values),
            ("repeat", self.repeats(labels)[repeat]),
        ]
        base = self._get_cell_value(labels, "base", self.settings.base)
        config = self._configure({} if base is None else self.bases[str(base)], layers)
        if not isinstance(config.evaluate.every, int):
            raise ConfigError(
                "evaluate.every.seconds: a study compares equal rounds. Set evaluate.every to a number of rounds."
            )
        metric = self._make_metric(labels, config)
        if self.settings.patience is not None:
            config = self._configure_patience(config, metric)
        identity = _compute_identity(config)
        draw = f"trial-{point['trial']:03d}" if "trial" in point else "trial" * bool(values)
        key, equals, value = repeat.partition("=")
        words = [*labels, draw, f"{key.rpartition('.')[2]}{equals}{value}"]
        member = bool(trial_id) and self.settings.population is not None
        name = f"trial-{trial_id}" if member else _make_run_name([*filter(None, words)], config, identity)
        folder, result, result_file = self.results_folder, (identity, config.digest()), None
        if folder is not None:
            portable = _remove_places(config)
            result = (_compute_identity(portable), portable.digest())
            stem = name.removesuffix(f"-{identity}")
            result_file = next(iter(sorted(folder.glob(f"*-{result[0]}.json"))), folder / f"{stem}-{result[0]}.json")
        return Trial(
            result=result,
            result_file=result_file,
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
        last = {"run.dir": str(self.folder), "run.name": None, "ray.actors": actors}
        last |= {} if self.settings.rounds is None else {"train.rounds": self.settings.rounds}
        config = make_config(overlay(values, last, "study"), str(self.file))
        if self.settings.summarised == "chosen" and config.run.best is None:
            raise ConfigError("summary: chosen needs run.best, which selects the round. Set run.best in settings.")
        return config

    def _make_metric(self, labels: Sequence[str], config: Config) -> MetricSettings:
        """Return the headline of a cell with its score and split."""
        default, metric = self.settings.metric, self._get_cell_value(labels, "metric", {})
        if isinstance(metric, Mapping):
            changed = {"score", "split"}.intersection(metric)  # a label names a score on a split, of any model
            metric = {**default.model_dump(exclude_unset=True, exclude={"label"} if changed else set()), **metric}
        where = ".".join(("axes", *labels, "metric"))
        return self.resolve(check_settings(metric, MetricSettings, self.file, where), config)

    def resolve(self, metric: MetricSettings, config: Config) -> MetricSettings:
        """Complete a metric: set a missing split, and take a missing score from the objective's headline."""
        changes = {"split": metric.split or ("validation" if self.settings.domains else "test")}
        if "score" not in metric.model_fields_set:
            changes["score"] = config.components.method.objective.headline
        return metric.model_copy(update=changes)

    def make_plateau_metric(self, trial: Trial) -> MetricSettings:
        """Return the plateau's score on held-out data: the server's if it has any, except for a headline on clients' own clips."""
        server = any(holds_out(data, "server_validation") for data in trial.config.data.each.values())
        personal = trial.metric.split in ("client_test", "validation")  # the server may lack such a model
        split = "server_validation" if server and not personal else "validation"
        score = self.settings.plateau.score if self.settings.plateau else None
        own = {"score": score, "mode": None} if score else {}
        return trial.metric.model_copy(update={"split": split, "label": None, **own})

    def _configure_patience(self, config: Config, metric: MetricSettings) -> Config:
        if config.run.stop is not None:
            raise ConfigError("patience sets run.stop of all trials, but run.stop is set too. Remove one of them.")
        split, name = list_keys(config, metric)[1]  # The pooled metric.
        stop = {"metric": f"{split} {name}", "mode": metric.best, "patience": self.settings.patience}
        return make_config(overlay(config.model_dump(mode="json"), {"run.stop": stop}, "patience"), str(self.file))


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """Return the first trial of each identity."""
    return list({trial.identity: trial for trial in reversed(trials)}.values())[::-1]


def describe_value(value: Any) -> str:
    """Format a value of a domain, with few digits."""
    return f"{value:.4g}" if isinstance(value, float) else label_of(value)


def list_keys(config: Config, metric: MetricSettings) -> list[Key]:
    """List the names of a metric in the metrics table by preference. The mean over clients is first."""
    models = [metric.model] if metric.model else list(config.components.models)[:1]
    names = [*(f"{model}/{metric.score}" for model in models), metric.score]
    return [(metric.split or "test", key) for name in names for key in (f"{name}_client_mean", name)]


def list_part_keys(config: Config, key: Key) -> list[Key]:
    """List the names of a metric in each part of ``data.parts``. A study takes the mean over the parts."""
    return [(key[0], qualify(part, ":", key[1])) for part in config.data.each]


def _compute_identity(config: Config) -> str:
    parts: list[Any] = [config.digest(), config.train.rounds, config.evaluate.model_dump(mode="json")]
    parts += filter(None, [config.run.model_dump(mode="json", include={"best", "stop"}, exclude_none=True)])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _remove_places(config: Config) -> Config:
    """Replace the paths of data sets, which differ between machines, by the names of their options."""
    values = config.model_dump(mode="json")
    for part, settings in config.data.each.items():
        for group in (values["data"], *([values["data"]["parts"][part]] if part else [])):
            for option in path_options(find_dataset(settings.name)):
                if group.get(option) is not None:
                    group[option] = f"/{option}"  # absolute: a relative path would become one of the working folder
    return make_config(values)


def _make_run_name(words: Sequence[str], config: Config, identity: str) -> str:
    """Make a readable name that ends in the identity, or reuse the name of an existing run with this identity."""
    folder = Path(config.run.dir)
    names = [path.name for path in sorted(folder.glob(f"*-{identity}")) if path.is_dir()]
    if names:
        return names[0]
    former = folder / words[0]  # An earlier version named it trial-007, without the identity.
    if (former / "run.json").is_file() and read_about(former).get("digest") == config.digest():
        return former.name
    return f"{re.sub(r'[^a-z0-9.=]+', '-', '-'.join(words).lower()).strip('-.')[:80]}-{identity}"


def corners(domains: Mapping[str, Domain], seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield combinations of the ends of all domains.

    With too many combinations, yield a subset: the first, the last, each end of each domain, and random combinations.

    Args:
        domains: Domains by setting.
        seed: Seed of the random combinations.
    """
    ends = {key: domain.ends() for key, domain in domains.items()}
    if math.prod(map(len, ends.values())) <= _CORNERS:
        for chosen in itertools.product(*ends.values()):
            yield dict(zip(ends, chosen, strict=True))
        return
    lows = {key: values[0] for key, values in ends.items()}
    yield lows
    yield {key: values[-1] for key, values in ends.items()}
    for key, values in ends.items():
        for value in values:
            yield {**lows, key: value}
    rng = seeds.generator(seed, 0, "", "search corners")
    for _ in range(_CORNERS):
        yield {key: values[int(rng.integers(len(values)))] for key, values in ends.items()}


def is_complete(folder: Path, config: Config) -> bool:
    """Return whether a run has completed all rounds of its configuration, or was ended by ``run.stop``."""
    done = count_rounds(folder)
    if done >= config.train.rounds:
        return True
    where = (pc.field("metric") == "stopped") & (pc.field("client") == "") & (pc.field("round") == done)
    return config.run.stop is not None and done > 0 and read_rows(folder, done, where=where).num_rows > 0


def count_rounds(folder: Path) -> int:
    """Return the number of committed rounds in a run folder; 0 without a run."""
    latest = RunStore(folder).latest() if (folder / "run.json").exists() else None
    return 0 if latest is None else round_of(latest)
