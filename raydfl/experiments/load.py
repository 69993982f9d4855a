"""Loading of studies: read the file, and check all configurations and recordings before the first run starts."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from raydfl.controls import TESTS
from raydfl.core.errors import ConfigError, InputError, ResourcesError, nearest, translate_failures
from raydfl.core.metrics import HARMONIC_MEAN, HIGHER_IS_BETTER, OF_CLIENTS
from raydfl.core.nested import get_path
from raydfl.core.options import path_options
from raydfl.core.remote import check_path, is_uri
from raydfl.core.users_code import is_users
from raydfl.core.yaml import read_yaml
from raydfl.data import build_population, find_dataset, place_of
from raydfl.data.features import RunChunks
from raydfl.engine import Clients, Config, apply_overrides, holds_out, is_evaluated, personal_name
from raydfl.experiments.contestants import Contestant
from raydfl.experiments.protocol import LABELS, TRIALS, drop_replaced, is_untrained
from raydfl.experiments.results import collect
from raydfl.experiments.settings import (
    FORMER,
    StudySettings,
    check_known,
    check_settings,
    label_of,
    overlay,
    raise_first,
)
from raydfl.experiments.state import StudyState
from raydfl.experiments.study import Study, Trial, Tuned
from raydfl.methods import Method
from raydfl.runs import Progress

_LISTED = 10
"""Maximum messages in an error about several runs."""
_COUNTS = ("train.local_epochs", "train.batch_size")
CHANGEABLE = f"A trial can change train.optimiser.*, {', '.join(_COUNTS)} and fields of a method with the type float."
"""Description of the settings that :func:`fits_state` accepts."""


def load_study(file: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Study:
    """Load a study and check all of its configurations, without reading recordings.

    Args:
        file: The study's YAML file.
        overrides: ``key=value`` for settings of the study (``samples=20``) and settings of all runs (``train.cohort=5``).
        only: ``axis=label,label`` restricts an axis to these labels.

    Returns:
        The study with all trials that are known in advance.

    Raises:
        ConfigError: The file or a configuration is not valid. The message names the invalid cells.
    """
    file, known = Path(file), {*StudySettings.model_fields, *FORMER}
    study_overrides = [text for text in overrides if text.partition("=")[0].partition(".")[0] in known]
    run_overrides = tuple(text for text in overrides if text not in study_overrides)
    groups = apply_overrides(_read_groups(file), study_overrides)
    if is_uri(groups.get("dir")):
        raise ConfigError(f"dir: {groups['dir']} is a URI, but a study needs a local folder. Set an absolute path.")
    settings = check_settings(groups, StudySettings, file)
    chosen = _choose(settings, only)
    labels = [axis[label] for name, axis in settings.axes.items() for label in chosen[name]]
    names = {str(part["base"]) for part in (*labels, {"base": settings.base}) if part.get("base")}
    bases = {name: _read_base((file.parent / name).resolve()) for name in names}
    study = Study(file, settings, _find_folder(file, settings, run_overrides), run_overrides, chosen, bases)
    if settings.domains:
        check_domains(study)
    if settings.tuned is not None:
        study = _take_tuned_settings(study, file.parent / settings.tuned)
    study = replace(study, trials=_make_trials(study))
    for trial in {trial.labels: trial for trial in study.trials or [study.first]}.values():
        check_scores(study, trial)
    if settings.confirmatory:
        check_protocol(study)
    return study


def _read(path: Path, before: str, after: str) -> Any:
    with translate_failures(lambda reason: ConfigError(f"{before}{reason}{after}")):
        return read_yaml(path)


def _read_groups(file: Path) -> dict[str, Any]:
    """Read a study's file, and check its keys."""
    advice = ". Pass a YAML file, such as jobs/tiny_sweep.yaml (raydfl init writes it)."
    values = _read(file, f"cannot read {file}: ", advice)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must be a mapping with the keys {', '.join(StudySettings.model_fields)}.")
    for key in values:
        if key not in (*StudySettings.model_fields, *FORMER):
            hint = nearest(str(key), StudySettings.model_fields)
            advice = f" Write settings of the runs below settings:, or pass {key}=... on the command line."
            raise ConfigError(f"{file}: unknown key {key!r}. {hint}{advice if key in Config.model_fields else ''}")
    return values


def _read_base(path: Path) -> dict[str, Any]:
    values = _read(path, f"the base configuration {path} cannot be read: ", ". Correct base.")
    if not isinstance(values, dict):
        raise ConfigError(f"the base configuration {path} must be a mapping with groups of settings.")
    return values


def _find_folder(file: Path, settings: StudySettings, overrides: Sequence[str]) -> Path:
    """Find the folder of a study: run.dir of the command line, dir, run.dir in settings, or runs/ and the file's name."""
    candidates = [
        get_path(apply_overrides({}, overrides), "run.dir"),
        settings.dir,
        get_path(overlay({}, settings.settings, "settings"), "run.dir"),
        Path("runs") / file.stem,
    ]
    folder = next(candidate for candidate in candidates if candidate is not None)
    check_path(str(folder))
    if is_uri(folder):
        raise ConfigError(f"dir: {folder} is a URI, but all runs of {file} need a local folder. Set an absolute path.")
    return Path(folder).expanduser().resolve()


def _choose(settings: StudySettings, only: Sequence[str]) -> dict[str, list[str]]:
    chosen = {name: list(axis) for name, axis in settings.axes.items()}
    for text in only:
        name, equals, labels = text.partition("=")
        if not equals:
            raise ConfigError(f"--only {text!r} is not of the form axis=label,label.")
        check_known(name, chosen, "--only: there is no axis")
        selected = [labels] if labels in settings.axes[name] else [label.strip() for label in labels.split(",")]
        for label in selected:
            check_known(label, settings.axes[name], f"--only: axis {name!r} has no label")
        chosen[name] = [label for label in chosen[name] if label in selected]
    return chosen


def _make_trials(study: Study) -> tuple[Trial, ...]:
    """Make all trials of a study that are known in advance.

    Raises:
        ConfigError: The configuration of a cell is not valid.
    """
    if study.settings.sequential:
        return ()
    numbers = range(study.samples)
    trials: list[tuple[int, Trial]] = []
    faults = defaultdict[str, list[str]](list)
    for labels in study.cells:
        try:
            draws = [study.draw(number, labels) for number in numbers] if study.settings.domains else [{}]
            of_cell = [
                (index, study.trial(study.point(labels, draw, repeat)))
                for (index, repeat), draw in itertools.product(enumerate(study.repeats(labels)), draws)
            ]
            _check_draws(study, [trial for _, trial in of_cell])
            trials += of_cell
        except ConfigError as error:
            faults[str(error)].append(", ".join(labels))
    if faults:
        count = sum(map(len, faults.values()))
        heading = f"{study.file}: {count} cell{'s' if count > 1 else ''} cannot be run. No run was started."
        raise ConfigError(_describe_faults(heading, faults, 3))
    return tuple(trial for _, trial in sorted(trials, key=lambda pair: pair[0]))


def _check_draws(study: Study, trials: Sequence[Trial]) -> None:
    """Check for equal draws of a cell. They would give a contestant fewer trials than its rivals."""
    draws = dict[tuple[str, str], Trial]()
    for trial in trials if study.settings.searcher == "grid" else ():
        other = draws.setdefault((trial.identity, trial.repeat), trial)
        if other is not trial:
            raise ConfigError(
                f"domains: {other.draw} ({other.text}) and {trial.draw} ({trial.text}) have equal results. Remove the setting "
                f"without effect."
            )


def _describe_faults(heading: str, faults: Mapping[str, Sequence[str]], named: int = 1) -> str:
    """Describe the faults of several runs in a few lines.

    Args:
        heading: The first line.
        faults: Names of runs by message.
        named: Maximum number of names per message.
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
    """Return whether a setting can change during training, because the state fits all of its values."""
    group, _, name = key.partition(".")
    kinds = {item.name: item.type for item in fields(method)}
    rate = group == "method" and "float" in str(kinds.get(name, ""))
    return rate or key in _COUNTS or (key.startswith("train.optimiser.") and key != "train.optimiser.name")


def check_domains(study: Study) -> None:
    """Reject domains of settings that do not exist, have no effect, or contradict each other.

    Raises:
        ConfigError: A domain, the metric or the scheduler is not valid.
    """
    for values in study.corners():
        try:
            study.make_corner_trial(values)
        except ConfigError as error:
            text = ", ".join(f"{key}={label_of(value)}" for key, value in values.items())
            raise ConfigError(
                f"{study.file}: a trial with {text} cannot be run, so no run was started: {error}"
            ) from error
    settings, metric, config = study.settings, study.first.metric, study.first.config
    method, population = config.components.method, settings.population
    every, rounds = config.evaluate.interval, study.rounds
    faults = {
        "metric.split is validation, but data.split.validation is 0, so no clips are held out. Set it, or set split: test.": (
            metric.split == "validation"
            and not any(holds_out(data, "validation") for data in config.data.each.values())
        ),
        "data.sites: scheduler pbt copies run folders, but private models and data stay at the sites. Use scheduler: asha.": (
            bool(config.data.sites) and population is not None
        ),
        f"evaluate.every is {every}, but trials have {rounds} rounds, so a scheduler sees no score before the end. Lower "
        f"evaluate.every.": every > rounds and settings.scheduler.name != "none",
    }
    for key, domain in settings.domains.items():
        lows = next(study.corners())
        if len({study.make_corner_trial({**lows, key: end}).config.digest() for end in domain.ends()}) < len(
            domain.ends()
        ):
            overridden = any(text.partition("=")[0] == key for text in study.overrides)
            why = f"{key} is set on the command line" if overridden else f"{key} does not affect results"
            more = " Set the length of trials with rounds and scheduler." if key == "train.rounds" else ""
            faults[f"domains.{key}: trials would not differ, because {why}. Remove it from the domains.{more}"] = True
        if population is not None and not fits_state(key, method):
            faults[
                f"domains.{key}: scheduler pbt changes settings during training, which {key} does not allow. {CHANGEABLE} "
                f"Remove {key} from the domains, or use scheduler: asha."
            ] = True
    if population is not None:
        interval = population.interval
        faults |= {
            f"scheduler.interval is {interval}, but trials have {rounds} rounds, so members would never exchange. Lower "
            f"interval.": interval >= rounds,
            f"samples: scheduler pbt needs a population of at least 2, not {study.samples}.": study.samples < 2,
        }
    raise_first(faults, f"{study.file}: ")


def check_scores(study: Study, trial: Trial) -> None:
    """Check that the runs of a trial measure the models and scores of its metrics.

    A method's own evaluation, a user's objective, and other splits, such as ``server``, may measure any score.

    Raises:
        ConfigError: A metric's score or model does not exist. The message names the cell and the setting.
    """
    components = trial.config.components
    where = ": ".join(filter(None, (str(study.file), ", ".join(trial.labels))))
    models = list(components.models)
    if components.fine_tune.epochs:
        models += [personal_name(name, len(components.models)) for name in components.models]
    known = [score + end for score in HIGHER_IS_BETTER for end in ("", *OF_CLIENTS, HARMONIC_MEAN)]
    if trial.metric.model is not None:
        check_known(trial.metric.model, models, f"{where}: metric.model: there is no model")
    metrics = [("metric", trial.metric)]
    metrics += [("also", study.resolve(metric, trial.config)) for metric in study.settings.also]
    if study.settings.plateau and study.settings.plateau.score:
        metrics.append(("plateau", study.make_plateau_metric(trial)))
    method = components.method
    if type(method).evaluate is not Method.evaluate or is_users(type(method.objective).__module__):
        return
    for setting, metric in metrics:
        if metric.split in TESTS:
            check_known(metric.score, known, f"{where}: {setting}.score: nothing measures")


# -- protocol --------------------------------------------------------------------------------------------------------


def _take_tuned_settings(study: Study, path: Path) -> Study:
    """Return the study with the best settings of a search. A control's own settings take precedence."""
    search, best = _read_tuned(study, path)
    tuned = {}
    for labels, contestant in best.items():
        by_axis, values = dict(zip(study.axes, labels, strict=True)), dict(contestant.values)
        own = contestant.labels == tuple(by_axis[name] for name in search.axes)
        for name in study.settings.trained_controls:
            if LABELS[name] in labels and LABELS[name] not in contestant.labels:
                values = drop_replaced(values, name, study.settings.controls[name])
        domains = search.settings.get_domains(contestant.labels)
        extreme = [key for key, domain in domains.items() if domain.is_extreme(contestant.values[key])]
        repeats = len(search.repeats(contestant.labels))
        tuned[labels] = Tuned(values, extreme, contestant.learned, own, search.samples, repeats)
    return replace(study, tuned=tuned)


def _read_tuned(study: Study, path: Path) -> tuple[Study, dict[tuple[str, ...], Contestant]]:
    """Read the best draw of each contestant from the results of a search.

    Returns:
        The search, and the best draws by the labels of the study's cells. Trained controls that the search lacks have the draw of
        the study's control.

    Raises:
        ConfigError: The search does not fit the study, is unfinished, or has unequal numbers of trials.
    """
    search = load_study(path, [text for text in study.overrides if not text.startswith("run.name")])
    where = f"{study.file}: tuned: {path.name}"
    tuning, values = search.settings, search.first.config.model_dump(mode="json")
    repeats = [repeat for labels in search.cells for repeat in search.repeats(labels).values()]
    reported = [
        key
        for key, repeated in (study.settings.repeat or {"run.seed": [1]}).items()
        if not {label_of(repeat.get(key, _get_value(values, key))) for repeat in repeats}.isdisjoint(
            map(label_of, repeated)
        )
    ]
    raise_first({
        f"{where} has no domains, so it tunes nothing. Name the file of a search.": not tuning.domains,
        f"{where} has axes that this study lacks: {', '.join(set(search.axes) - set(study.axes))}. Remove them.": (
            not set(search.axes) <= set(study.axes)
        ),
        f"{where} tunes on the test data. Set metric.split: validation there.": (
            bool(tuning.domains) and search.first.metric.split in ("test", "client_test")
        ),
        f"{where} tunes with a value of {', '.join(reported)} that this study repeats. Choose a different value there.": (
            bool(reported)
        ),
    })  # fmt: skip
    if study.settings.confirmatory and search.samples < TRIALS:
        advice = "List more values in its domains." if tuning.searcher == "grid" else "Raise samples there."
        raise ConfigError(
            f"{where} has {search.samples} trials per contestant, but the protocol requires {TRIALS}. {advice}"
        )
    results = collect(search, StudyState.read(search))
    finished = {
        labels: [
            contestant for contestant in results.contestants if contestant.labels == labels and contestant.complete
        ]
        for labels in search.cells
    }
    counts = {", ".join(labels) or search.settings.title: len(contestants) for labels, contestants in finished.items()}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(
            f"{where} has unequal or missing trials ({listed}). Each contestant needs as many as its rivals. Run raydfl study "
            f"{path} first."
        )
    (fewest,) = set(counts.values())
    if study.settings.confirmatory and fewest < TRIALS:
        raise ConfigError(
            f"{where} has {fewest} finished trials per contestant, but the protocol requires {TRIALS}. Run raydfl study {path} "
            f"first."
        )
    axis, controls = study.contestants_axis, [LABELS[name] for name in study.settings.trained_controls]
    best = {}
    for labels in study.cells:
        by_axis = dict(zip(study.axes, labels, strict=True))
        if by_axis.get(axis) in controls and axis in search.axes and by_axis[axis] not in tuning.axes[axis]:
            by_axis[axis] = study.settings.control[axis]
        key = tuple(by_axis[name] for name in search.axes)
        if key not in finished:
            raise ConfigError(f"{where} has no label {', '.join(key)}. Add it to the axes of the search.")
        best[labels] = finished[key][0]
    return search, best


def _get_value(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a setting such as ``run.seed`` in nested settings, or ``None``."""
    group, _, rest = key.partition(".")
    value = values.get(group)
    return _get_value(value, rest) if rest and isinstance(value, Mapping) else value


def check_protocol(study: Study) -> None:
    """Check the configurations of a confirmatory study.

    Raises:
        ConfigError: A score is not comparable, or the plateau's score is not measured.
    """
    trials = [trial for trial in study.trials if not is_untrained(trial.labels)]
    cadences = {
        f"{trial.config.train.rounds} rounds, evaluated every {trial.config.evaluate.interval}": trial.name
        for trial in trials
    }
    listed = "; ".join(f"{name}: {cadence}" for cadence, name in cadences.items())
    splits = {trial.metric.split for trial in trials}
    measured = all(
        _measures_plateau(study, trial) for trial in trials if study.find_control(trial.labels) == trial.labels
    )
    on_clips = splits <= set(TESTS)
    rule = study.settings.plateau
    units = {trial.labels: trial.metric.unit for trial in trials}
    incomparable = [
        f"{trial.name} ({trial.metric.unit}) with its control ({units[control]})"
        for trial in trials
        if (control := study.find_control(trial.labels)) in units and units[control] != trial.metric.unit
    ]
    faults = {
        f"evaluations differ ({listed}), so means of the last evaluations are not comparable. Set equal train.rounds and "
        f"evaluate.every.": len(cadences) > 1,
        "plateau: the rule needs held-out data and their evaluation. Set data.split.validation and evaluate.clients: cohort or "
        "all, or for models at the server data.split.server_validation and evaluate.server: true.": not measured,
        f"plateau: {study.first.metric.score} is not measured on held-out data. Set plateau.score, for example to accuracy.": (
            not on_clips and rule is not None and rule.score is None
        ),
        "controls.fedavg_fine_tuned is measured on the clients' own clips. Set metric.split: client_test or validation.": (
            "fedavg_fine_tuned" in study.settings.controls and splits & {"test", "server_validation"}
        ),
        f"metric: no difference follows from scores of different names: {'; '.join(incomparable[:1])}. Set metric.label, the "
        f"name of all compared scores.": bool(incomparable),
    }  # fmt: skip
    raise_first(faults, f"{study.file}: ")


def _measures_plateau(study: Study, trial: Trial) -> bool:
    """Return whether a trial evaluates its models on the held-out data of the plateau's score."""
    split, data = str(study.make_plateau_metric(trial).split), trial.config.data.each.values()
    return is_evaluated(split, trial.config.evaluate) and any(holds_out(part, split) for part in data)


# -- recordings ------------------------------------------------------------------------------------------------------


def _select_unprepared(trials: Sequence[Trial]) -> list[Trial]:
    """Select trials that need their recordings here: no existing or finished run, and no data at sites."""
    return [
        trial
        for trial in trials
        if not trial.config.data.sites and not trial.finished and not (trial.run_dir / "run.json").exists()
    ]


def prepare(trials: Sequence[Trial], progress: Progress, run_chunks: RunChunks | None = None) -> None:
    """Compute the features of all trials without duplicates, and check that each trial has enough clients.

    Args:
        trials: Trials to prepare.
        progress: Shows the progress.
        run_chunks: Computes chunks of features; ``None``: in local processes.

    Raises:
        InputError: The recordings of a trial cannot be used.
    """
    known: dict[str, int] = {}
    faults = defaultdict[str, list[str]](list)
    for trial in _select_unprepared(trials):
        config = trial.config
        parts = [group and group.model_dump(mode="json") for group in (config.data, config.train.clients)]
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
        heading = f"{sum(map(len, faults.values()))} of {len(trials)} runs have unusable data. No run was started."
        raise InputError(_describe_faults(heading, faults))


def check_data_sets(trials: Sequence[Trial]) -> None:
    """Check that all files and folders of the trials' data sets exist. Skip URIs and data of existing runs.

    Raises:
        InputError: A path is missing. The message names the trials.
    """
    faults = defaultdict[str, list[str]](list)
    for trial in _select_unprepared(trials):
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
