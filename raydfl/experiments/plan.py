"""Configurations of sweeps, searches and trials of one's own Tuner, and whether their recordings can be used."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.compute as pc
from pydantic import Field, ValidationError

from raydfl.core.errors import ConfigError, InputError, ResourcesError, nearest
from raydfl.core.options import explain, path_options
from raydfl.core.remote import is_uri
from raydfl.core.settings import Settings
from raydfl.core.yaml import parse_yaml, to_yaml
from raydfl.data import build_population, find_dataset
from raydfl.data.features import RunChunks
from raydfl.engine import Clients, Config, apply_overrides, apply_values
from raydfl.engine.storage import RunStore, read_rows, round_of
from raydfl.methods import Method
from raydfl.runs import Progress

_LISTED = 10
"""Messages that a message about several runs repeats."""
_WHOLE_GROUPS = ("train", "evaluate", "ray", "run", "track")
"""Groups that an axis would hardly mean to replace as a whole."""


class StudySettings(Settings):
    """Settings that the files of sweeps and of searches both have."""

    title: str = Field(description="heading of the page, and of the table")
    note: str = Field("", description="a paragraph below the heading")
    base: Path | None = Field(None, description="a configuration that all runs start from, relative to the file")
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="settings of all runs, over the base: {train.rounds: 50} (without base: everything)",
    )
    dir: Path | None = Field(
        None,
        description="folder of the runs, which sweeps may share; null: run.dir in settings, or runs/ and the file's name",
    )


def check_known(name: str, known: Iterable[str], what: str) -> None:
    """Refuse a name that is not among the known ones.

    Raises:
        ConfigError: ``what``, the name, and the nearest known one.
    """
    if name not in known:
        raise ConfigError(f"{what} {name!r}; {nearest(name, known)}")


def label_of(value: Any) -> str:
    """Return a setting's value as a label."""
    return value if isinstance(value, str) else to_yaml(value)


def read_groups(file: Path, settings: type[Settings], example: str) -> dict[str, Any]:
    """Return the contents of a file, whose keys must be fields of ``settings``.

    Args:
        example: a file of that kind, for messages.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an unknown key.
    """
    advice = f"; give a YAML file, such as {example} (raydfl init writes it)"
    values = _read_yaml(file, f"cannot read {file}: ", advice)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold the groups {', '.join(settings.model_fields)}")
    for key in values:
        if key not in settings.model_fields:
            hint = nearest(str(key), settings.model_fields)
            own = f"; settings of the runs go below settings: or into {key}=... on the command line"
            raise ConfigError(f"{file}: unknown key {key!r}; {hint}{own if key in Config.model_fields else ''}")
    return values


_Checked = TypeVar("_Checked", bound=Settings)


def checked(values: dict[str, Any], settings: type[_Checked], file: Path) -> _Checked:
    """Return the settings that a file holds.

    Raises:
        ConfigError: one of them is not as it should be.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, '', values, settings)}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read_yaml(path: Path, before: str, after: str) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{before}{reason}{after}") from error
    return parse_yaml(text, str(path))


def read_base(path: Path, bases: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """Return the base configuration as plain data, each file read once.

    Raises:
        ConfigError: it cannot be read, or holds no groups.
    """
    path = path.resolve()
    if path not in bases:
        values = _read_yaml(path, f"the base configuration {path} cannot be read: ", "; correct base")
        if not isinstance(values, dict):
            raise ConfigError(f"the base configuration {path} must hold groups of settings")
        bases[path] = values
    return bases[path]


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


def laid_over(values: dict[str, Any], part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Lay ``part``'s settings over ``values`` by the command line's rule: a key is a path, whose value takes the old one's place.

    Raises:
        ConfigError: a key goes through what is no group, or would replace a whole one.
    """
    for key in part:
        if key in _WHOLE_GROUPS and values.get(key):
            raise ConfigError(
                f"{where}: {key} would replace the whole group; write single settings, such as {key}.name: value"
            )
    try:
        return apply_values(values, part)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


# -- recordings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run that shall be done."""

    config: Config
    """With the run's folder and name in it."""

    @property
    def name(self) -> str:
        """A name for people."""
        raise NotImplementedError

    @property
    def run_dir(self) -> Path:
        """The run's folder, there or to be made."""
        return Path(self.config.run.dir) / str(self.config.run.name)


def prepare(runs: Sequence[Planned], progress: Progress, run_chunks: RunChunks | None = None) -> None:
    """Make the features that the runs need, each once, and find out what recordings or splits do not allow.

    Raises:
        InputError: naming the cells whose recordings cannot be used.
    """
    known: dict[str, int] = {}
    faults: dict[str, list[str]] = {}
    for each in runs:
        if (each.run_dir / "run.json").exists():
            continue  # it has its population, and whatever is missing it says itself
        if each.config.data.sites:
            continue  # its recordings are not here: each site prepares its own when the run begins
        chosen = each.config.train.clients
        described = [
            each.config.data.model_dump(mode="json"),
            None if chosen is None else chosen.model_dump(mode="json"),
        ]
        key = json.dumps([*described, each.config.run.seed], sort_keys=True)
        try:
            if key not in known:
                settings, needed = each.config, each.config.labels_needed
                population = build_population(
                    settings.data, settings.run.seed, progress, run_chunks, labels_needed=needed
                )
                known[key] = Clients(population, settings).eligible
            each.config.train.cohort_size(known[key])
        except ResourcesError:
            raise
        except InputError as error:
            faults.setdefault(str(error), []).append(each.name)
    if faults:
        count = sum(map(len, faults.values()))
        raise InputError(faults_text(f"{count} of {len(runs)} runs cannot be done; nothing was started", faults, 1))


def check_data_sets(runs: Sequence[Planned]) -> None:
    """Check that the files and folders of the runs' data sets exist, without reading any. Begun runs and URIs are skipped.

    Raises:
        InputError: naming the missing paths, each with the runs that need it.
    """
    faults: dict[str, list[str]] = {}
    for each in runs:
        data = each.config.data
        if data.sites or (each.run_dir / "run.json").exists():
            continue  # recordings at sites are checked there; a begun run has its list of clips
        for part, settings in data.each.items():
            dataset, where = find_dataset(settings.name), f"data.parts.{part}" if part else "data"
            for option in path_options(dataset):
                path = (settings.model_extra or {}).get(option)
                if path is not None and not is_uri(path) and not os.path.exists(path):  # noqa: PTH110  (pathlib's may raise)
                    source = f" The set is at {dataset.card.url}." * bool(dataset.card.url)
                    message = f"{dataset.card.title}: {where}.{option} {path} does not exist. Correct {where}.{option}.{source}"
                    faults.setdefault(message, []).append(each.name)
    if faults:
        count = len(set().union(*faults.values()))
        raise InputError(faults_text(f"{count} of {len(runs)} runs have no recordings", faults, 1))


def faults_text(heading: str, faults: Mapping[str, Sequence[str]], named: int) -> str:
    """Return what is wrong with several runs in a few lines.

    Args:
        faults: by message, whom it is about.
        named: of them that are named.
    """
    lines = [heading]
    for message, names in list(faults.items())[:_LISTED]:
        more = f" and {len(names) - named} more" if len(names) > named else ""
        lines.append(f"  {'; '.join(names[:named])}{more}: {message}")
    if len(faults) > _LISTED:
        lines.append(f"  and {len(faults) - _LISTED} more messages")
    return "\n".join(lines)


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


# -- going on from a state -----------------------------------------------------------------------------------------

_COUNTS = ("train.local_epochs", "train.batch_size")
CHANGEABLE = (
    f"it can change train.optimiser.*, {', '.join(_COUNTS)} and those fields of a method that are numbers with a decimal "
    f"point"
)
"""Says for what :func:`fits_state` holds."""


def fits_state(key: str, method: Method) -> bool:
    """Return whether a setting may change in the middle of a training: whatever its value is, it fits the state."""
    group, _, name = key.partition(".")
    fields = {item.name: item.type for item in dataclasses.fields(method)}
    rate = group == "method" and "float" in str(fields.get(name, ""))
    return rate or key in _COUNTS or (key.startswith("train.optimiser.") and key != "train.optimiser.name")
