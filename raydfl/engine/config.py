"""The configuration of a run: typed, validated, read from YAML with ``key=value`` overrides.

Options of methods, data sets and models are the fields of their classes, the other groups are in raydfl/training/settings.py,
raydfl/engine/settings.py and beside what they set. ``raydfl config FILE`` prints the resolved configuration with the meaning, unit
and range of each field.
"""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, ValidationError, field_validator, model_validator

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.ops import differing_kernels, kernels
from raydfl.core.options import explain, plain
from raydfl.core.settings import Settings
from raydfl.core.yaml import read_yaml
from raydfl.data import KNOWN, DataSettings, Population, ProfileSettings
from raydfl.engine.assembly import ModelChoice, Parts, assemble, split_view, text_of
from raydfl.engine.digest import drop_neutral, hash_values, select_decisive
from raydfl.engine.named_files import absolute, check_encoder, check_same_files, named_files
from raydfl.engine.needs import check_needs
from raydfl.engine.overrides import apply_overrides
from raydfl.engine.phases import Phases
from raydfl.engine.selection import Selection, check_begins, check_measured, holds_out
from raydfl.engine.settings import EvaluateSettings, RaySettings, RunSettings, TrackSettings
from raydfl.models import INIT_FROM, check_model
from raydfl.training import PhaseSettings, TrainSettings, check_device

_FILES = "_files_at_start"
"""Where a configuration that travels holds what :meth:`Config.files` was in the process that it comes from."""


_KERNELS = "_kernels_at_start"
"""Likewise: the kernels of that machine."""
_log = logging.getLogger(__name__)


class Config(Settings):
    """Everything that decides a run."""

    method: dict[str, Any] = Field(description="name, and the method's own hyperparameters")
    models: dict[str, ModelChoice] = Field(
        default_factory=dict,
        description="architecture of each model of the method: a name, {name, options ...}, or a list that clients draw from",
    )
    objective: dict[str, Any] = Field(
        default_factory=lambda: {"name": "classify"},
        description="what is learnt: name (classify ...), and the objective's own options",
    )
    data: DataSettings
    attack: dict[str, Any] | None = Field(
        None, description="simulated attackers: name, and the attack's own options; null: every client is honest"
    )
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    ray: RaySettings = RaySettings()
    run: RunSettings = RunSettings()
    track: TrackSettings = TrackSettings()

    @field_validator("method", "objective", "attack", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        self.check_needs({})
        if self.ray.actors == 0 or self.ray.gpus == 0 or self.ray.cpu_actors:
            check_device(self.train.precision, torch.device("cpu"))
        declared = self.parts.models
        _check_known(self.models, declared, f"models: {self.method['name']}")
        for data in self.data.each.values():
            self._models_fit(data)
        profiles = [data.profile for data in self.data.each.values()]
        for name, (column, keys) in self.parts.chosen_by.items():
            _check_choices(f"models.{name}", column, keys, profiles, list(self.data.parts))
        rates = {f"phases.{phase}.": own.optimiser.models or {} for phase, own in self.train.phases.items()}
        for place, of_models in {"": self.train.optimiser.models, **rates}.items():
            _check_known(of_models, declared, f"train.{place}optimiser.models: {self.method['name']}")
        for criteria in self.make_selection().wanted.values():
            for setting, criterion in criteria:
                check_measured(setting, criterion, self.evaluate, self.data.each.values())
        check_begins(self.phases, self.train, self.run.best, self.evaluate.every)
        return self

    @property
    def phases(self) -> Phases:
        """The phases of the method, and in which round each begins."""
        return Phases.from_settings(type(self.parts.method).phases, self.train, self.method["name"])

    def check_needs(self, pools: Mapping[str, Sequence[str]]) -> None:
        """Refuse a configuration that does not meet the declared needs.

        Args:
            pools: of parts whose clips are assigned, by the part's name. A user's table of clips may name them.

        Raises:
            ConfigError: naming the first conflict.
        """
        method, rule, attack = self.parts.method, self.parts.rule, self.parts.attack
        phases = [self.train.resolve_phase(name) for name in self.phases.names]
        names = self.method["name"], self.objective["name"], str((self.attack or {}).get("name"))
        check_needs(names, method, attack, rule, self.data, self.train.clients, phases, pools)

    def make_selection(self, population: Population | None = None) -> Selection:
        """Return the comparison of rounds that ``run.best`` and ``run.stop`` ask for, before the first round.

        Args:
            population: of the run: it shows whether the server has validation data. ``None``: it does if the settings allow it.

        Raises:
            ConfigError: they do not fit the method, or it is not known which values are better.
        """
        model, headline = next(iter(self.parts.models), ""), self.parts.method.objective.headline
        if population is None:
            validates = any(holds_out(data, "server_validation") for data in self.data.each.values())
        else:
            validates = any(part.has_validation for part in population.parts.values())
        validation = "server_validation" if self.evaluate.server and validates else "validation"
        return Selection.from_settings(self.run, self.phases, model, headline, validation, self.method["name"])

    def _models_fit(self, data: DataSettings) -> None:
        """Refuse networks that cannot read their views, and views that nobody reads."""
        read, views = set(self.parts.method.needs.views), data.all_views
        for name, choices in self.parts.models.items():
            for architecture, options in choices:
                if name in type(self.parts.method).on_features:
                    check_model(architecture, options, 1, None, f"models.{name}")
                    continue
                view, own = split_view({key: value for key, value in options.items() if key != INIT_FROM})
                read.add(view)
                if view not in views:
                    raise ConfigError(
                        f"models.{name}.view: there is no view {view!r} in data.views (a model without view reads data.features); "
                        f"{nearest(str(view), data.views)}"
                    )
                seen = views[view]
                frames, cut = seen.features.frames, seen.pipeline.cut
                if data.segment is not None:
                    frames = None
                if frames is not None and cut is not None:
                    frames = min(frames, cut)
                check_encoder(architecture, own, seen.features, f"models.{name}", f"{seen.where}.features")
                check_model(architecture, own, seen.pipeline.shape(seen.features.bands), frames, f"models.{name}")
        for name in data.views:
            if name not in read:
                raise ConfigError(
                    f"data.views: no model reads the view {name!r}; set models.NAME.view={name}, or leave it out"
                )

    @functools.cached_property
    def parts(self) -> Parts:
        """The objects that this configuration describes, built once in each process.

        Raises:
            ConfigError: in a process that got a configuration from another one: it cannot load a user's file.
        """
        return assemble(
            self.method, self.models, self.attack, self.objective, self.train.groups, self.evaluate.fine_tune
        )

    def __getstate__(self) -> dict[Any, Any]:
        # A description travels; each process loads users' files and builds for itself.
        state = super().__getstate__()
        state["__dict__"] = {key: value for key, value in state["__dict__"].items() if key != "parts"}
        state["__dict__"].setdefault(_FILES, self.files() if "parts" in self.__dict__ else {})
        state["__dict__"].setdefault(_KERNELS, kernels())
        return state

    def check_files(self) -> None:
        """Refuse files and folders named by options whose content is not what it is where this configuration comes from.

        Raises:
            ConfigError: naming the first; in a process that got the configuration from another one, on another node it may be.
        """
        if self.__dict__.get(_FILES):
            check_same_files(self.__dict__[_FILES], self.files())

    def check_kernels(self) -> None:
        """Warn if training on a CPU gives other last digits here than on the machine that this configuration comes from."""
        differing = differing_kernels(self.__dict__.get(_KERNELS, {}))
        if differing:
            _log.warning(
                "raydfl on %s has other kernels than where the run was started (%s): the last digits of the models depend on which "
                "worker trains a client; use equal CPUs, and install the same raydfl on every node",
                platform.node(),
                differing,
            )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some groups replaced by checked ones."""
        copied = super().model_copy(update=update, deep=deep)
        if not {"method", "models", "attack", "objective", "train", "evaluate"}.isdisjoint(update or {}):
            copied.__dict__.pop("parts", None)  # built of what was replaced
        return copied

    @property
    def labels_needed(self) -> bool:
        """True where the objective learns from labels, so that each class has to have training clips."""
        return self.parts.method.objective.labels != "any"

    def files(self) -> dict[str, tuple[str, str]]:
        """Return the files that options name, and folders of encoders: by the option's place, path and digest of the content."""
        return named_files(self.parts, self.data)

    def digest(self) -> str:
        """Identify what decides the numbers of a run: two configurations with equal digests give the same bits.

        Left out: where and on what the run is computed, how far it goes, and what is measured and tracked.
        """
        parts = self.model_dump(mode="json", exclude={"evaluate", "ray", "run", "track"})
        # With the options that were not given, so that writing a default down changes nothing.
        parts["method"] = {"name": self.method["name"], **plain(self.parts.method), **self.parts.former}
        del parts["train"]["groups"]  # it is in parts.former
        parts["models"] = self.parts.models
        parts["objective"] = {
            "name": self.objective["name"],
            **drop_neutral(self.objective["name"], plain(self.parts.method.objective)),
        }
        if self.parts.chosen_by:
            parts["chosen_by"] = self.parts.chosen_by
        attack = self.parts.attack
        if attack is not None:
            parts["attack"] = {"name": (self.attack or {})["name"], **plain(attack)}
        parts = select_decisive(parts, self.data)
        parts["train"].pop("rounds")
        if type(self.parts.method).phases:
            parts["train"]["phases"] = [
                (name, first, self.train.phases.get(name, PhaseSettings()).dump_deciding())
                for name, first in zip(self.phases.names, self.phases.first, strict=True)
            ]
            parts |= self._choosing()
        if self.train.deadline is None:
            del parts["train"]["late"]  # nobody is
        parts["seed"] = self.run.seed
        parts["threads"] = self.ray.threads
        return hash_values(parts, self.files())

    def _choosing(self) -> dict[str, Any]:
        """Return what decides where phases begin, and with which round's models, where rounds are compared for that."""
        best = any(phase.begin == "best" for phase in self.train.phases.values())
        asked = {"stop": self.run.stop, "best": self.run.best if best else None}
        found = {name: group.model_dump(mode="json") for name, group in asked.items() if group is not None}
        return {**found, "evaluate": self.evaluate.model_dump(mode="json")} if found else {}


Settings.tree = Config


def _check_known(names: Iterable[str], models: Iterable[str], where: str) -> None:
    """Refuse the name of a model that the method does not have."""
    for name in names:
        if name not in models:
            raise ConfigError(f"{where} has no model {name!r}; {nearest(name, models)}")


def _check_choices(
    where: str,
    column: str,
    keys: Sequence[str],
    profiles: Sequence[Mapping[str, ProfileSettings]],
    parts: Sequence[str],
) -> None:
    """Refuse an architecture chosen by a column that clients do not have, or a value of it without an architecture.

    Args:
        profiles: of each part.

    Raises:
        ConfigError: naming it.
    """
    for profile in profiles:
        if column not in profile and column not in KNOWN:
            raise ConfigError(
                f"{where}.by: clients have no {column!r} in their profile; {nearest(column, [*profile, *KNOWN])}"
            )
    dealt = [profile[column].values if column in profile else () for profile in profiles]
    values = list(parts) if column == "part" else [text_of(value) for each in dealt for value in each]
    for value in values:
        if value not in keys:
            raise ConfigError(f"{where}.choices: no architecture for {column} {value!r}; {nearest(value, keys)}")
    known = column == "part" or all(dealt)  # what a column of the manifest says is known only when its clients are
    for key in keys if known else ():
        if key not in values:
            raise ConfigError(f"{where}.choices: no client is dealt {column} {key!r}; {nearest(key, values)}")


def make_config(values: Any, where: str = "configuration") -> Config:
    """Return a checked configuration from plain data.

    Raises:
        ConfigError: anything that is not as it should be, with its place, the value and what to do.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} is {'empty' if values is None else f'{str(values)[:60]!r}'}; it must hold the groups "
            f"{', '.join(Config.model_fields)}, of which method and data are needed"
        )
    try:
        checked = absolute(values)
        return Config.model_validate(checked)
    except ValidationError as error:
        raise ConfigError(explain(error, "", checked, Config)) from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a YAML file, with overrides.

    Raises:
        ConfigError: the file is missing, unreadable or not a valid configuration.
    """
    path = Path(path)
    try:
        values = read_yaml(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        missing = isinstance(error, (FileNotFoundError, IsADirectoryError))
        advice = _instead_of(path) if missing else "give a text file that you may read, such as jobs/quickstart.yaml"
        raise ConfigError(f"cannot read the configuration {path}: {reason}; {advice}") from error
    return make_config(apply_overrides(values, overrides) if isinstance(values, dict) else values, str(path))


def _instead_of(path: Path) -> str:
    """Say what to do about a configuration that is not there."""
    if (path / "config.yaml").exists():
        return f"it is a run directory, to go on with it: raydfl resume {path}"
    if "=" in path.name:
        return "the first argument must be the file, settings come after it"
    there = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = nearest(path.name, there) if there else ""
    return (
        hint
        if hint.startswith("did you mean")
        else "give a YAML file, such as jobs/quickstart.yaml (raydfl init writes it)"
    )
