"""A search: its trials' configurations, made of one YAML file and checked before the first trial starts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from raydfl.cluster import check_kept
from raydfl.core import seeds
from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.files import default_cache, write_durably
from raydfl.core.metrics import HARMONIC_MEAN, HIGHER_IS_BETTER, OF_CLIENTS
from raydfl.core.remote import check_path, is_uri
from raydfl.core.yaml import to_yaml
from raydfl.engine import Config, TrackSettings, apply_overrides, make_config
from raydfl.experiments.metric import for_objective
from raydfl.experiments.plan import (
    CHANGEABLE,
    Planned,
    check_known,
    checked,
    fits_state,
    folder_of,
    label_of,
    laid_over,
    read_base,
    read_groups,
)
from raydfl.experiments.search.settings import NoScheduler, PopulationScheduler, SearchSettings
from raydfl.methods import Method

_CORNERS = 32
"""Corners of the space that are checked; of larger spaces so many are drawn."""
_SAMPLES = 10
"""Trials where the file does not say how many."""
Values = dict[str, Any]
"""A trial's settings of the space, by key."""


@dataclass(frozen=True, kw_only=True)
class Trial(Planned):
    """One trial of a search: a whole federation in a folder of its own."""

    number: int
    """Counted from 0."""
    values: Values
    parent: int | None = None
    """The trial whose state it goes on from; ``None``: it begins with round 0."""

    @property
    def name(self) -> str:
        """A name for people and folders: ``trial-007``."""
        return trial_name(self.number)


def trial_name(number: int) -> str:
    """Return a trial's name: ``trial-007``."""
    return f"trial-{number:03d}"


@dataclass(frozen=True)
class Search:
    """A search whose space was checked."""

    file: Path
    settings: SearchSettings
    folder: Path
    """The folder of trials, journal, tables and page."""
    overrides: tuple[str, ...]
    """Settings of the command line, for all trials."""
    values: Mapping[str, Any]
    """The configuration that all trials share, as plain data."""

    @cached_property
    def first(self) -> Config:
        """The configuration of a corner of the space: what all trials have in common is in it."""
        return self.config_of(next(corners(self.settings)), 0)

    @property
    def track(self) -> TrackSettings:
        """Settings of the search's own tracking: the trials' own ``track`` group."""
        return self._made(next(corners(self.settings)), {}).track

    @property
    def samples(self) -> int:
        """Number of trials; with pbt the members of the population."""
        if self.settings.searcher == "grid":
            return math.prod(len(domain.values) for domain in self.settings.space.values())
        return self.settings.samples or _SAMPLES

    @property
    def rounds(self) -> int:
        """Most rounds of a trial."""
        return self.first.train.rounds

    @property
    def turns(self) -> list[int]:
        """Rounds after which trials end: with pbt those of each turn, else the last one."""
        scheduler = self.settings.scheduler
        if not isinstance(scheduler, PopulationScheduler):
            return [self.rounds]
        return [*range(scheduler.interval, self.rounds, scheduler.interval), self.rounds]

    @property
    def trials(self) -> int:
        """Number of trials in all; with pbt one for each member and turn."""
        return self.samples * len(self.turns)

    def output(self, name: str) -> Path:
        """Return the path of a file of the search's results: ``output("search.html")``."""
        return self.folder / name

    def config_of(self, values: Values, number: int, rounds: int | None = None) -> Config:
        """Return a trial's configuration.

        Raises:
            ConfigError: the values do not make a valid one.
        """
        own: Values = {"run.dir": str(self.folder), "run.name": trial_name(number), "track.mlflow": False}
        most = rounds if rounds is not None else self.settings.rounds
        if most is not None:
            own["train.rounds"] = most
        return self._made(values, own)

    def _made(self, values: Values, own: Values) -> Config:
        plain = apply_overrides(laid_over(dict(self.values), values, "space"), self.overrides)
        return make_config(laid_over(plain, own, "search"), str(self.file))

    def trial(self, number: int, values: Values, parent: int | None = None, rounds: int | None = None) -> Trial:
        """Make a trial with these values of the space."""
        config = self.config_of(values, number, rounds)
        return Trial(number=number, values=values, config=config, parent=parent)

    def drawn(self, number: int) -> Values:
        """Return the values of a trial of searcher random or grid; a setting's random draws do not depend on the others."""
        space = self.settings.space
        if self.settings.searcher == "grid":
            combinations = itertools.product(*(domain.values for domain in space.values()))
            return dict(zip(space, next(itertools.islice(combinations, number, None)), strict=True))
        return {
            key: domain.draw(seeds.generator(self.settings.seed, number, "", f"search {key}"))
            for key, domain in space.items()
        }

    @property
    def foreseen(self) -> list[Trial]:
        """Trials that need no result of another one; with Optuna, the corners of the space in their place."""
        optuna = self.settings.searcher == "optuna"
        values = corners(self.settings) if optuna else map(self.drawn, range(self.samples))
        return [self.trial(number, each) for number, each in enumerate(values)]

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the trials and what becomes of them, as plain data: a folder holds one such search."""
        settings = self.settings.model_dump(
            mode="json", include={"metric", "scheduler", "searcher", "patience", "seed"}
        )
        settings["metric"].pop("label")
        space = {key: {domain.kind: list(domain.values)} for key, domain in self.settings.space.items()}
        if isinstance(self.settings.scheduler, PopulationScheduler) or self.settings.searcher == "grid":
            settings["samples"] = self.samples
        corner = self.first
        return {
            **settings,
            "space": space,
            "rounds": self.rounds,
            "evaluate.every": corner.evaluate.every,
            "configuration": corner.digest(),
        }


# -- reading ---------------------------------------------------------------------------------------------------------


def load_search(file: str | Path, overrides: Sequence[str] = ()) -> Search:
    """Read a search and check its space; no recording is looked at.

    Args:
        file: the search's YAML file.
        overrides: ``key=value``: the search's own settings (``samples=20``), and settings of all trials (``train.cohort=5``).

    Raises:
        ConfigError: the file is not valid, or the space holds settings that do not exist or do not fit.
    """
    file = Path(file)
    own = [text for text in overrides if text.partition("=")[0].partition(".")[0] in SearchSettings.model_fields]
    groups = apply_overrides(read_groups(file, SearchSettings, "tune/tiny.yaml"), own)
    if is_uri(groups.get("dir")):
        raise ConfigError(f"dir: {groups['dir']} is a URI, but a search works in one folder; give an absolute path")
    check_path(str(groups.get("dir")))
    settings = checked(groups, SearchSettings, file)
    others = tuple(text for text in overrides if text not in own)
    folder = folder_of(file, settings.dir, settings.settings, others)
    values = {} if settings.base is None else read_base(file.parent / settings.base, {})
    values = laid_over(values, settings.settings, "settings")
    search = Search(file, settings, folder, others, values)
    _check(search)
    metric = for_objective(settings.metric, search.first)
    return (
        search
        if metric is settings.metric
        else replace(search, settings=settings.model_copy(update={"metric": metric}))
    )


def corners(settings: SearchSettings) -> Iterator[Values]:
    """Yield values at the ends of all ranges, in every combination; of too many, the first, the last and some drawn ones."""
    ends = {key: domain.ends() for key, domain in settings.space.items()}
    if math.prod(map(len, ends.values())) <= _CORNERS:
        for chosen in itertools.product(*ends.values()):
            yield dict(zip(ends, chosen, strict=True))
        return
    lows = {key: values[0] for key, values in ends.items()}
    yield lows
    yield {key: values[-1] for key, values in ends.items()}
    for key, values in ends.items():  # so that no end of any range is left out
        for value in values:
            yield {**lows, key: value}
    rng = seeds.generator(settings.seed, 0, "", "search corners")
    for _ in range(_CORNERS):
        yield {key: values[int(rng.integers(len(values)))] for key, values in ends.items()}


def _check(search: Search) -> None:
    """Refuse a space whose settings do not exist, do not matter, or do not fit together.

    Raises:
        ConfigError: naming file, values and what is wrong.
    """
    for values in corners(search.settings):
        try:
            search.config_of(values, 0)
        except ConfigError as error:
            text = ", ".join(f"{key}={label_of(value)}" for key, value in values.items())
            raise ConfigError(
                f"{search.file}: a trial with {text} cannot be run; nothing was started: {error}"
            ) from error
    settings, config = search.settings, search.first
    metric, method, scheduler = settings.metric, config.parts.method, settings.scheduler
    if metric.model is not None:
        check_known(metric.model, config.parts.models, f"{search.file}: metric.model: there is no model")
    if type(method).evaluate is Method.evaluate:  # else the method measures what it likes
        known = [score + suffix for score in HIGHER_IS_BETTER for suffix in ("", *OF_CLIENTS, HARMONIC_MEAN)]
        check_known(metric.score, known, f"{search.file}: metric.score: nothing measures")
    every, rounds = config.evaluate.every, search.rounds
    faults = {
        "metric.split is validation, but clients hold nothing out: data.split.validation is 0; set it, or take split: test": (
            metric.split == "validation" and not any(data.split.validation for data in config.data.each.values())
        ),
        "data.sites: scheduler pbt copies run folders, but private models and data stay at the sites; take scheduler asha": (
            bool(config.data.sites) and isinstance(scheduler, PopulationScheduler)
        ),
        f"evaluate.every is {every} and trials have {rounds} rounds: nothing is known of a trial before its end; lower "
        f"evaluate.every": every > rounds and not isinstance(scheduler, NoScheduler),
    }
    for key, domain in settings.space.items():
        ends = domain.ends()
        first = next(corners(settings))
        if len({search.config_of({**first, key: end}, 0).digest() for end in ends}) < len(ends):
            given = any(text.partition("=")[0] == key for text in search.overrides)
            why = f"{key} is set on the command line" if given else f"{key} does not decide what is learned"
            more = "; how far trials go is rounds and scheduler" if key == "train.rounds" else ""
            faults[f"space.{key}: trials would differ in nothing: {why}; take it out of the space{more}"] = True
    if isinstance(
        scheduler, PopulationScheduler
    ):  # a copy cannot change what does not fit the state that it goes on from
        faults |= {
            f"scheduler.interval is {scheduler.interval} and trials have {rounds} rounds: there is no turn; lower it": (
                scheduler.interval >= rounds
            ),
            f"samples: scheduler pbt needs a population of at least 2, not {search.samples}": search.samples < 2,
        } | {
            f"space.{key}: scheduler pbt changes settings in the middle of a training, which {key} does not allow; {CHANGEABLE}; "
            f"take it out of the space, or take scheduler asha": not fits_state(key, method)
            for key in settings.space
        }
    for message, wrong in faults.items():
        if wrong:
            raise ConfigError(f"{search.file}: {message}")


# -- the folder ------------------------------------------------------------------------------------------------------


def claim(search: Search) -> None:
    """Make the search's folder, or make sure that it is this search's.

    Raises:
        ConfigError: what it would hold would be lost with the temporary folder of a job.
        RunDirectoryError: it holds another search; what differs is named.
        ResourcesError: the disk is full or the folder cannot be written.
    """
    check_kept({"dir": search.folder, "data.cache": search.first.data.cache or default_cache()})
    path = search.output("search.json")
    if search.output("run.json").exists():
        raise RunDirectoryError(f"{search.folder} is the folder of a run; give the search another folder with dir=...")
    mine = json.loads(json.dumps(search.identity))
    if path.exists():
        try:
            there = json.loads(path.read_text(encoding="utf-8"))["identity"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(
                f"{path} is damaged; restore it from a copy, or give the search another folder with dir=..."
            ) from error
        different = [key for key in {**mine, **there} if mine.get(key) != there.get(key)]
        if different:
            parts = [f"{key}: {to_yaml(there.get(key))} there, {to_yaml(mine.get(key))} here" for key in different[:5]]
            raise RunDirectoryError(
                f"{search.folder} holds another search ({'; '.join(parts)}); give this one another folder with dir=..., or remove "
                f"that one"
            )
        return
    write_durably(path, json.dumps({"title": search.settings.title, "identity": mine}, indent=2).encode())
