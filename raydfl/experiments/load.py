"""Studies are read from their files, and every configuration is checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raydfl.core.errors import ConfigError
from raydfl.core.metrics import HARMONIC_MEAN, HIGHER_IS_BETTER, OF_CLIENTS
from raydfl.core.remote import is_uri
from raydfl.engine import apply_overrides, holds_out
from raydfl.experiments.files import (
    check_known,
    check_settings,
    describe_faults,
    find_folder,
    read_base,
    read_groups,
)
from raydfl.experiments.settings import FORMER, StudySettings, label_of
from raydfl.experiments.study import Study, Trial, corners
from raydfl.experiments.trial import CHANGEABLE, fits_state
from raydfl.methods import Method


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
    for message, wrong in faults.items():
        if wrong:
            raise ConfigError(f"{study.file}: {message}")
