"""A search: its trials' configurations, made of one YAML file and checked before the first trial starts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from raydfl.cluster.job import check_kept
from raydfl.core import seeds
from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.files import default_cache, write_durably
from raydfl.core.metrics import HIGHER_IS_BETTER, OF_CLIENTS
from raydfl.core.remote import check_path, is_uri
from raydfl.core.yaml import to_yaml
from raydfl.engine.config import Config, apply_overrides, make_config
from raydfl.engine.settings import TrackSettings
from raydfl.experiments.plan import (
    CHANGEABLE,
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


@dataclass(frozen=True)
class Trial:
    """One trial of a search: a whole federation in a folder of its own."""

    number: int
    """Counted from 0."""
    values: Values
    config: Config
    """With the run's folder and name in it."""
    parent: int | None = None
    """The trial whose state it goes on from; ``None``: it begins with round 0."""

    @property
    def name(self) -> str:
        """For people and folders: ``trial-007``."""
        return trial_name(self.number)

    @property
    def run_dir(self) -> Path:
        """The run's folder, there or to be made."""
        return Path(self.config.run.dir) / str(self.config.run.name)

    @property
    def text(self) -> str:
        """Its settings in one line: ``method.alpha=0.5 method.vl=0.1``."""
        return " ".join(f"{key}={label_of(value)}" for key, value in self.values.items())


def trial_name(number: int) -> str:
    """``trial-007``."""
    return f"trial-{number:03d}"


@dataclass(frozen=True)
class Search:
    """A search whose space was checked."""

    file: Path
    settings: SearchSettings
    folder: Path
    """Where trials, journal, tables and page lie."""
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
        """Where the search is mirrored: the trials' own ``track`` group."""
        plain = laid_over(dict(self.values), next(corners(self.settings)), "space")
        return make_config(apply_overrides(plain, self.overrides), str(self.file)).track

    @property
    def samples(self) -> int:
        """Trials; with pbt the members of the population."""
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
        """How many there will be; with pbt one for each member and turn."""
        return self.samples * len(self.turns)

    def output(self, name: str) -> Path:
        """A file of the search's results: ``output("search.html")``."""
        return self.folder / name

    def config_of(self, values: Values, number: int, rounds: int | None = None) -> Config:
        """A trial's configuration.

        Raises:
            ConfigError: the values do not make a valid one.
        """
        plain = laid_over(dict(self.values), values, "space")
        plain = apply_overrides(plain, self.overrides)
        own: Values = {"run.dir": str(self.folder), "run.name": trial_name(number), "track.mlflow": False}
        most = rounds if rounds is not None else self.settings.rounds
        if most is not None:
            own["train.rounds"] = most
        return make_config(laid_over(plain, own, "search"), str(self.file))

    def trial(self, number: int, values: Values, parent: int | None = None, rounds: int | None = None) -> Trial:
        """A trial with these values of the space."""
        return Trial(number, values, self.config_of(values, number, rounds), parent)

    def drawn(self, number: int) -> Values:
        """The values of a trial of searcher random or grid; of random ones, a setting's draws do not depend on the others."""
        space = self.settings.space
        if self.settings.searcher == "grid":
            combinations = itertools.product(*(domain.values for domain in space.values()))
            return dict(zip(space, next(itertools.islice(combinations, number, None)), strict=True))
        return {
            key: domain.draw(seeds.generator(self.settings.seed, number, "", f"search {key}"))
            for key, domain in space.items()
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the trials and what becomes of them, as plain data: a folder holds one such search."""
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
    """A search whose space is checked; no recording is looked at.

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
    return search


def corners(settings: SearchSettings) -> Iterator[Values]:
    """Values at the ends of all ranges, in every combination; where these are too many, the first, the last and some drawn ones."""
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
    _check_metric(search)
    if search.first.data.sites:
        raise ConfigError(
            f"{search.file}: data.sites: trials of a search share their resources and copy one another's folders, which data at "
            f"sites do not allow; compare settings with raydfl sweep, or leave data.sites out"
        )
    first = next(corners(search.settings))
    for key, domain in search.settings.space.items():
        ends = domain.ends()
        digests = [search.config_of({**first, key: end}, 0).digest() for end in ends]
        if len(ends) > 1 and len(set(digests)) < len(ends):
            why = (
                f"{key} is set on the command line"
                if any(text.partition("=")[0] == key for text in search.overrides)
                else f"{key} does not decide what is learned"
            )
            raise ConfigError(
                f"{search.file}: space.{key}: trials would differ in nothing: {why}; take it out of the space"
                + ("; how far trials go is rounds and scheduler" if key == "train.rounds" else "")
            )
    every, scheduler = search.first.evaluate.every, search.settings.scheduler
    if every > search.rounds and not isinstance(scheduler, NoScheduler):
        raise ConfigError(
            f"{search.file}: evaluate.every is {every} and trials have {search.rounds} rounds: nothing is known of a trial before "
            f"its end; lower evaluate.every"
        )
    if isinstance(scheduler, PopulationScheduler):
        _check_population(search, scheduler)


def _check_metric(search: Search) -> None:
    metric, config = search.settings.metric, search.first
    method = config.parts.method
    if metric.model is not None:
        check_known(metric.model, type(method).models, f"{search.file}: metric.model: there is no model")
    if type(method).evaluate is Method.evaluate:  # else the method measures what it likes
        known = [score + suffix for score in HIGHER_IS_BETTER for suffix in ("", *OF_CLIENTS)]
        check_known(metric.score, known, f"{search.file}: metric.score: nothing measures")
    if metric.split == "validation" and not any(data.split.validation for data in config.data.each.values()):
        raise ConfigError(
            f"{search.file}: metric.split is validation, but clients hold nothing out: data.split.validation is 0; set it, or take "
            f"split: test"
        )


def _check_population(search: Search, scheduler: PopulationScheduler) -> None:
    """Refuse what a copy cannot change: it would not fit the state that it goes on from."""
    if scheduler.interval >= search.rounds:
        raise ConfigError(
            f"{search.file}: scheduler.interval is {scheduler.interval} and trials have {search.rounds} rounds: there is no turn; "
            f"lower it"
        )
    if search.samples < 2:
        raise ConfigError(f"{search.file}: samples: scheduler pbt needs a population of at least 2")
    method = search.first.parts.method
    for key in search.settings.space:
        if not fits_state(key, method):
            raise ConfigError(
                f"{search.file}: space.{key}: scheduler pbt changes settings in the middle of a training, which {key} does not "
                f"allow; {CHANGEABLE}; take it out of the space, or take scheduler asha"
            )


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
