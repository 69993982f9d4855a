"""Studies are read from their files, and every configuration and all recordings are checked before the first run starts."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from raydfl.core.errors import ConfigError, InputError, ResourcesError, nearest
from raydfl.core.metrics import HARMONIC_MEAN, HIGHER_IS_BETTER, OF_CLIENTS
from raydfl.core.nested import get_path
from raydfl.core.options import path_options
from raydfl.core.remote import check_path, is_uri
from raydfl.core.yaml import read_yaml
from raydfl.data import build_population, find_dataset, place_of
from raydfl.data.features import RunChunks
from raydfl.engine import Clients, Config, apply_overrides, holds_out
from raydfl.experiments.settings import (
    FORMER,
    StudySettings,
    check_known,
    check_settings,
    label_of,
    overlay,
    raise_first,
)
from raydfl.experiments.study import Study, Trial, corners
from raydfl.methods import Method
from raydfl.runs import Progress

_LISTED = 10
"""Messages that a message about several runs repeats."""
_COUNTS = ("train.local_epochs", "train.batch_size")
CHANGEABLE = (
    f"it can change train.optimiser.*, {', '.join(_COUNTS)} and those fields of a method that are numbers with a decimal "
    f"point"
)
"""The settings for which :func:`fits_state` holds, in words."""


def load_study(file: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Study:
    """Read a study and check all of its configurations; no recording is looked at.

    Args:
        file: the study's YAML file.
        overrides: ``key=value``: the study's own settings (``samples=20``), and settings of all runs (``train.cohort=5``).
        only: ``axis=label,label``: leave out the cells with other labels of that axis.

    Raises:
        ConfigError: the file, or a configuration, is not valid; faulty cells are named.
    """
    file, known = Path(file), {*StudySettings.model_fields, *FORMER}
    own = [text for text in overrides if text.partition("=")[0].partition(".")[0] in known]
    others = tuple(text for text in overrides if text not in own)
    groups = apply_overrides(_read_groups(file), own)
    if is_uri(groups.get("dir")):
        raise ConfigError(f"dir: {groups['dir']} is a URI, but a study works in one folder; give an absolute path")
    settings = check_settings(groups, StudySettings, file)
    chosen = _choose(settings, only)
    labels = [axis[label] for name, axis in settings.axes.items() for label in chosen[name]]
    named = {str(part["base"]) for part in (*labels, {"base": settings.base}) if part.get("base")}
    bases = {name: _read_base((file.parent / name).resolve()) for name in named}
    study = Study(file, settings, _find_folder(file, settings, others), others, chosen, bases)
    if settings.domains:
        check_domains(study)
    return replace(study, trials=_make_trials(study))


def _read(path: Path, before: str, after: str) -> Any:
    try:
        return read_yaml(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{before}{reason}{after}") from error


def _read_groups(file: Path) -> dict[str, Any]:
    """Return the contents of a study's file, whose keys must be fields of the settings."""
    advice = "; give a YAML file, such as jobs/tiny_sweep.yaml (raydfl init writes it)"
    values = _read(file, f"cannot read {file}: ", advice)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold the groups {', '.join(StudySettings.model_fields)}")
    for key in values:
        if key not in (*StudySettings.model_fields, *FORMER):
            hint = nearest(str(key), StudySettings.model_fields)
            own = f"; settings of the runs go below settings: or into {key}=... on the command line"
            raise ConfigError(f"{file}: unknown key {key!r}; {hint}{own if key in Config.model_fields else ''}")
    return values


def _read_base(path: Path) -> dict[str, Any]:
    values = _read(path, f"the base configuration {path} cannot be read: ", "; correct base")
    if not isinstance(values, dict):
        raise ConfigError(f"the base configuration {path} must hold groups of settings")
    return values


def _find_folder(file: Path, settings: StudySettings, overrides: Sequence[str]) -> Path:
    """Return the folder of a study's runs: run.dir of the command line, dir, run.dir in settings, or runs/ and the file's name."""
    given = [
        get_path(apply_overrides({}, overrides), "run.dir"),
        settings.dir,
        get_path(overlay({}, settings.settings, "settings"), "run.dir"),
        Path("runs") / file.stem,
    ]
    folder = next(each for each in given if each is not None)
    check_path(str(folder))
    if is_uri(folder):
        raise ConfigError(f"dir: {folder} is a URI, but all runs of {file} are in one folder; give an absolute path")
    return Path(folder).expanduser().resolve()


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
        ConfigError: naming the cells that make no valid configuration.
    """
    if study.settings.sequential:
        return ()
    draws = [study.draw(number) for number in range(study.samples)] if study.settings.domains else [{}]
    found: list[tuple[int, Trial]] = []
    faults = defaultdict[str, list[str]](list)
    for labels in study.cells:
        try:
            for (place, repeat), draw in itertools.product(enumerate(study.repeats(labels)), draws):
                found.append((place, study.trial(study.point(labels, draw, repeat))))
        except ConfigError as error:
            faults[str(error)].append(", ".join(labels))
    if faults:
        count = sum(map(len, faults.values()))
        heading = f"{study.file}: {count} cell{'s' if count > 1 else ''} cannot be run; nothing was started"
        raise ConfigError(_describe_faults(heading, faults, 3))
    return tuple(trial for _, trial in sorted(found, key=lambda pair: pair[0]))


def _describe_faults(heading: str, faults: Mapping[str, Sequence[str]], named: int = 1) -> str:
    """Return what is wrong with several runs in a few lines.

    Args:
        faults: the names of runs by message.
        named: how many of them are named.
    """
    lines = [heading]
    for message, names in list(faults.items())[:_LISTED]:
        more = f" and {len(names) - named} more" if len(names) > named else ""
        lines.append(f"  {'; '.join(names[:named])}{more}: {message}")
    if len(faults) > _LISTED:
        lines.append(f"  and {len(faults) - _LISTED} more messages")
    return "\n".join(lines)


# -- domains ---------------------------------------------------------------------------------------------------------


def fits_state(key: str, method: Method) -> bool:
    """Return whether a setting may change in the middle of a training: the state fits each of its values."""
    group, _, name = key.partition(".")
    kinds = {item.name: item.type for item in fields(method)}
    rate = group == "method" and "float" in str(kinds.get(name, ""))
    return rate or key in _COUNTS or (key.startswith("train.optimiser.") and key != "train.optimiser.name")


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
            metric.split == "validation"
            and not any(holds_out(data, "validation") for data in config.data.each.values())
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
    raise_first(faults, f"{study.file}: ")


# -- recordings ------------------------------------------------------------------------------------------------------


def _unprepared(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials whose recordings are looked at here: a begun run has its population, and sites prepare their own."""
    return [each for each in trials if not each.config.data.sites and not (each.run_dir / "run.json").exists()]


def prepare(trials: Sequence[Trial], progress: Progress, run_chunks: RunChunks | None = None) -> None:
    """Compute the features of the trials, each once, and check that recordings and splits suffice.

    Raises:
        InputError: naming the trials whose recordings cannot be used.
    """
    known: dict[str, int] = {}
    faults = defaultdict[str, list[str]](list)
    for trial in _unprepared(trials):
        config = trial.config
        parts = [each and each.model_dump(mode="json") for each in (config.data, config.train.clients)]
        key = json.dumps([*parts, config.run.seed], sort_keys=True)
        try:
            if key not in known:
                population = build_population(
                    config.data, config.run.seed, progress, run_chunks, labels_needed=config.labels_needed
                )
                known[key] = Clients(population, config).eligible
            config.train.cohort_size(known[key])
        except ResourcesError:
            raise
        except InputError as error:
            faults[str(error)].append(trial.name)
    if faults:
        heading = f"{sum(map(len, faults.values()))} of {len(trials)} runs cannot be done; nothing was started"
        raise InputError(_describe_faults(heading, faults))


def check_data_sets(trials: Sequence[Trial]) -> None:
    """Check that the files and folders of the trials' data sets exist, without reading any. Begun runs and URIs are skipped.

    Raises:
        InputError: naming the missing paths, each with the trials that need it.
    """
    faults = defaultdict[str, list[str]](list)
    for trial in _unprepared(trials):
        for part, settings in trial.config.data.each.items():
            dataset, where = find_dataset(settings.name), place_of(part)
            for option in path_options(dataset):
                path = (settings.model_extra or {}).get(option)
                if path is not None and not is_uri(path) and not os.path.exists(path):  # noqa: PTH110  (pathlib's may raise)
                    source = f" The set is at {dataset.card.url}." * bool(dataset.card.url)
                    message = f"{dataset.card.title}: {where}.{option} {path} does not exist. Correct {where}.{option}.{source}"
                    faults[message].append(trial.name)
    if faults:
        count = len(set().union(*faults.values()))
        raise InputError(_describe_faults(f"{count} of {len(trials)} runs have no recordings", faults))
