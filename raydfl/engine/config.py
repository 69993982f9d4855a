"""The configuration of a run: typed, validated, read from YAML with ``key=value`` overrides.

Options of methods, data sets and models are the fields of their classes. The remaining groups are in raydfl/training/settings.py,
raydfl/engine/settings.py and the rooms that use them. ``raydfl config FILE`` prints the resolved configuration with the meaning,
unit and range of each field.
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

from raydfl.core.errors import ConfigError, nearest, translate_failures
from raydfl.core.ops import differing_kernels
from raydfl.core.options import explain, plain
from raydfl.core.settings import Settings
from raydfl.core.yaml import read_yaml
from raydfl.data import KNOWN, DataSettings, Population, ProfileSettings
from raydfl.engine.assembly import Components, ModelChoice, assemble, format_value, split_view
from raydfl.engine.baselines import expand_baseline
from raydfl.engine.block_size import check_block
from raydfl.engine.digest import drop_neutral, hash_values, select_decisive
from raydfl.engine.fleet_support import check_fleet
from raydfl.engine.groups import Grouped
from raydfl.engine.named_files import check_encoder, check_same_files, hash_named_files, resolve_paths
from raydfl.engine.needs import check_needs
from raydfl.engine.overrides import apply_overrides
from raydfl.engine.phases import Phases
from raydfl.engine.privacy_settings import PrivacySettings, check_privacy
from raydfl.engine.selection import Selection, check_begins, check_measured, holds_out
from raydfl.engine.settings import EvaluateSettings, RaySettings, RunSettings, TrackSettings
from raydfl.engine.software import check_same_software, describe_software, describe_user
from raydfl.models import INIT_FROM, check_model
from raydfl.training import PhaseSettings, TrainSettings, check_device

_FILES = "_files_at_start"
"""Attribute of a pickled configuration: :meth:`Config.files` of the process that started the run."""


_SOFTWARE = "_software_at_start"
"""Attribute of a pickled configuration: the software of the machine that started the run."""
_USER = "_user_at_start"
"""Attribute of a pickled configuration: the user who started the run."""
_log = logging.getLogger(__name__)


class Config(Settings):
    """Configuration of a run: method, models, data, training, evaluation and resources."""

    method: dict[str, Any] = Field(description="Federated method: its name and its hyperparameters.")
    models: dict[str, ModelChoice] = Field(
        default_factory=dict,
        description="Architecture of each model of the method: a name, {name, options ...}, or a list of architectures that are "
        "assigned to clients at random.",
    )
    objective: dict[str, Any] = Field(
        default_factory=lambda: {"name": "classify"},
        description="Learning objective: its name (classify ...) and its options.",
    )
    data: DataSettings
    attack: dict[str, Any] | None = Field(
        None, description="Simulated attack: its name and its options. null: every client is honest."
    )
    train: TrainSettings = TrainSettings()
    privacy: PrivacySettings = PrivacySettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    ray: RaySettings = RaySettings()
    run: RunSettings = RunSettings()
    track: TrackSettings = TrackSettings()

    @field_validator("method", "objective", "attack", mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_groups(self) -> Config:
        self.check_needs({})
        if self.ray.actors == 0 or self.ray.gpus == 0 or self.ray.cpu_actors:  # some clients train on the CPU
            check_device(self.train.precision, torch.device("cpu"))
        declared = self.components.models
        _check_known(self.models, declared, f"models: {self.method['name']}")
        for data in self.data.each.values():
            self._check_models(data)
        profiles = [data.profile for data in self.data.each.values()]
        for name, (column, keys) in self.components.chosen_by.items():
            _check_choices(f"models.{name}", column, keys, profiles, list(self.data.parts))
        rates = {f"phases.{phase}.": own.optimiser.models or {} for phase, own in self.train.phases.items()}
        for place, models in {"": self.train.optimiser.models, **rates}.items():
            _check_known(models, declared, f"train.{place}optimiser.models: {self.method['name']}")
        for criteria in self.make_selection().wanted.values():
            for setting, criterion in criteria:
                check_measured(setting, criterion, self.evaluate, self.data.each.values())
        if (
            self.train.phases
            and isinstance(self.components.method, Grouped)
            and not type(self.components.method).phases
        ):
            raise ConfigError(
                "train.phases: with train.groups a run has the phases of its method only. Remove train.phases, or set "
                "train.groups to none"
            )
        check_begins(self.phases, self.train, self.run.best, self.evaluate.interval)
        check_block(self.train, self.components)
        check_privacy(self.privacy, self.components, self.data, self.train, self.evaluate, self.run)
        check_fleet(self.train, self.evaluate, self.ray, self.run, self.components)
        self._check_reference()
        return self

    def _check_reference(self) -> None:
        """Reject ``run.reference`` with parts, sites or several models."""
        wanted = self.run.reference
        if wanted is None or not (wanted.pooled or wanted.local):
            return
        if self.data.parts or self.data.sites:
            raise ConfigError("run.reference: the data have parts or sites. Set run.reference=null.")
        if [*self.components.models] != ["model"]:
            raise ConfigError(
                f"run.reference: the method {self.method['name']!r} does not train a single model named model. Set "
                f"run.reference=null."
            )

    @property
    def phases(self) -> Phases:
        """The phases of the run with the first round of each."""
        return Phases.from_settings(type(self.components.method).phases, self.train, self.method["name"])

    def check_needs(self, pools: Mapping[str, Sequence[str]]) -> None:
        """Reject a configuration that does not meet the declared needs.

        Args:
            pools: Names of the training pools by part, for parts whose clips are assigned. A table of clips may name pools.

        Raises:
            ConfigError: A need is not met. The message describes the first conflict.
        """
        method, rule, attack = self.components.method, self.components.rule, self.components.attack
        phases = [self.train.resolve_phase(name) for name in self.phases.names]
        names = self.method["name"], self.objective["name"], str((self.attack or {}).get("name"))
        check_needs(names, method, attack, rule, self.data, self.train.clients, phases, pools)

    def make_selection(self, population: Population | None = None) -> Selection:
        """Create the selection of ``run.best`` and ``run.stop`` before the first round.

        Args:
            population: Population of the run, to look up whether the server has validation data. ``None``: infer it from the
                settings.

        Raises:
            ConfigError: A phase does not exist, or the direction of a metric is unknown.
        """
        model, headline = next(iter(self.components.models), ""), self.components.method.objective.headline
        if population is None:
            validates = any(holds_out(data, "server_validation") for data in self.data.each.values())
        else:
            validates = any(part.has_validation for part in population.parts.values())
        validation = "server_validation" if self.evaluate.server and validates else "validation"
        return Selection.from_settings(self.run, self.phases, model, headline, validation, self.method["name"])

    def _check_models(self, data: DataSettings) -> None:
        """Reject networks that cannot read their view, and views without a model."""
        read, views = set(self.components.method.needs.views), data.all_views
        for name, choices in self.components.models.items():
            for architecture, options in choices:
                if name in type(self.components.method).on_features:
                    check_model(architecture, options, 1, None, f"models.{name}")
                    continue
                view, own = split_view({key: value for key, value in options.items() if key != INIT_FROM})
                read.add(view)
                if view not in views:
                    raise ConfigError(
                        f"models.{name}.view: unknown view {view!r}. Choose one of data.views, or omit it to read data.features. "
                        f"{nearest(str(view), data.views)}"
                    )
                source = views[view]
                frames, cut = source.features.frames, source.pipeline.cut
                if data.segment is not None:  # the length of a segment is not that of the features
                    frames = None
                if frames is not None and cut is not None:
                    frames = min(frames, cut)
                check_encoder(architecture, own, source.features, f"models.{name}", f"{source.where}.features")
                check_model(architecture, own, source.pipeline.shape(source.features.bands), frames, f"models.{name}")
        for name in data.views:
            if name not in read:
                raise ConfigError(
                    f"data.views: no model reads the view {name!r}. Set models.NAME.view={name}, or remove the view"
                )

    @functools.cached_property
    def components(self) -> Components:
        """The objects of this configuration, built once in each process.

        Raises:
            ConfigError: A process that received the configuration cannot load a user's file.
        """
        return assemble(
            self.method, self.models, self.attack, self.objective, self.train.groups, self.evaluate.fine_tune
        )

    def __getstate__(self) -> dict[Any, Any]:
        # Classes of users' files cannot be unpickled in a process without these files, so each process builds its own components.
        state = super().__getstate__()
        state["__dict__"] = {key: value for key, value in state["__dict__"].items() if key != "components"}
        state["__dict__"].setdefault(_FILES, self.files() if "components" in self.__dict__ else {})
        state["__dict__"].setdefault(_SOFTWARE, describe_software())
        state["__dict__"].setdefault(_USER, self.started_by)
        return state

    @property
    def started_by(self) -> str:
        """User and machine of the process that started the run, as this process states them."""
        return self.__dict__.get(_USER) or describe_user()

    def check_files(self) -> None:
        """Verify that the files and folders in options have the same content as on the starting machine.

        Raises:
            ConfigError: The content of a file or folder differs. The message names the first one.
        """
        if self.__dict__.get(_FILES):
            check_same_files(self.__dict__[_FILES], self.files())

    def check_software(self) -> None:
        """Compare the software of this machine with the run's first machine.

        Raises:
            ConfigError: raydfl, the version of PyTorch, or the availability of the compiled operators differs.
        """
        if _SOFTWARE in self.__dict__:
            check_same_software(self.__dict__[_SOFTWARE])

    def check_kernels(self) -> None:
        """Warn if this machine's CPU kernels differ from the starting machine's, because the last digits may then differ."""
        differing = differing_kernels(self.__dict__.get(_SOFTWARE, {}))
        if differing:
            _log.warning(
                "raydfl on %s and on the starting machine of the run use different CPU kernels (%s). The last digits of the models "
                "depend on each client's worker. Equal bits need equal CPUs",
                platform.node(),
                differing,
            )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with validated groups in place of some groups."""
        copied = super().model_copy(update=update, deep=deep)
        if not {"method", "models", "attack", "objective", "train", "evaluate"}.isdisjoint(update or {}):
            copied.__dict__.pop("components", None)  # the cached components were built from the old groups
        return copied

    @property
    def labels_needed(self) -> bool:
        """True if the objective learns from labels. Each class then needs training clips."""
        return self.components.method.objective.labels != "any"

    def files(self) -> dict[str, tuple[str, str]]:
        """Return the files and encoder folders of options: path and content digest by the option's place."""
        return hash_named_files(self.components, self.data)

    def digest(self) -> str:
        """Hash all settings that affect results. Configurations with equal digests give the same bits.

        The hash excludes resources, the number of rounds, the evaluation and the trackers.
        """
        decisive = self.model_dump(mode="json", exclude={"evaluate", "ray", "run", "track"})
        # Includes defaults, so that an explicit default gives the same digest.
        method = drop_neutral(self.method["name"], plain(self.components.method))
        decisive["method"] = {"name": self.method["name"], **method, **self.components.former}
        del decisive["train"]["groups"]  # former has it under its former name
        decisive["models"] = self.components.models
        decisive["objective"] = {
            "name": self.objective["name"],
            **drop_neutral(self.objective["name"], plain(self.components.method.objective)),
        }
        if self.components.chosen_by:
            decisive["chosen_by"] = self.components.chosen_by
        attack = self.components.attack
        if attack is not None:
            decisive["attack"] = {"name": (self.attack or {})["name"], **plain(attack)}
        decisive = select_decisive(decisive, self.data)
        decisive["train"].pop("rounds")
        if any(self.phases.names):
            decisive["train"]["phases"] = [
                (name, first, self.train.phases.get(name, PhaseSettings()).dump_deciding())
                for name, first in zip(self.phases.names, self.phases.first, strict=True)
            ]
            decisive |= self._dump_phase_criteria()
        if self.train.deadline is None:
            del decisive["train"]["late"]  # has no effect without a deadline
        decisive["seed"] = self.run.seed
        decisive["threads"] = self.ray.threads  # the order of a parallel sum affects its last bits
        return hash_values(decisive, self.files())

    def _dump_phase_criteria(self) -> dict[str, Any]:
        """Return the criteria that end phases or select their starting checkpoint, with the evaluation's settings."""
        best = any(phase.begin == "best" for phase in self.train.phases.values())
        groups = {"stop": self.run.stop, "best": self.run.best if best else None}
        criteria = {name: group.model_dump(mode="json") for name, group in groups.items() if group is not None}
        for limit in ("epsilon", "seconds"):  # Phases exclude privacy, and seconds end no phase before the training.
            criteria.get("stop", {}).pop(limit, None)
        if self.run.stop is not None and self.run.stop.goal is None:
            del criteria["stop"]["goal"]  # Earlier versions had no goal.
        return {**criteria, "evaluate": self.evaluate.model_dump(mode="json")} if criteria else {}


Settings.tree = Config


def _check_known(names: Iterable[str], models: Iterable[str], where: str) -> None:
    """Reject unknown names of models."""
    for name in names:
        if name not in models:
            raise ConfigError(f"{where} has no model {name!r}. {nearest(name, models)}")


def _check_choices(
    where: str,
    column: str,
    keys: Sequence[str],
    profiles: Sequence[Mapping[str, ProfileSettings]],
    parts: Sequence[str],
) -> None:
    """Reject a choice of architectures by an unknown profile column, or with missing or unused values.

    Args:
        where: Place of the model in the configuration.
        column: Profile column that selects the architecture.
        keys: Values of the column with an architecture.
        profiles: Profile settings of each part.
        parts: Names of the parts.

    Raises:
        ConfigError: The column is unknown, a value has no architecture, or an architecture has no client.
    """
    for profile in profiles:
        if column not in profile and column not in KNOWN:
            raise ConfigError(
                f"{where}.by: the clients' profiles have no column {column!r}. {nearest(column, [*profile, *KNOWN])}"
            )
    dealt = [profile[column].values if column in profile else () for profile in profiles]
    values = list(parts) if column == "part" else [format_value(value) for group in dealt for value in group]
    for value in values:
        if value not in keys:
            raise ConfigError(f"{where}.choices: no architecture for {column} {value!r}. {nearest(value, keys)}")
    known = column == "part" or all(dealt)  # the values of a manifest column are known only after its clients are read
    for key in keys if known else ():
        if key not in values:
            raise ConfigError(f"{where}.choices: no client has {column} {key!r}. {nearest(key, values)}")


def make_config(values: Any, where: str = "configuration") -> Config:
    """Build and validate a configuration from plain data.

    Args:
        values: Groups of settings, as in a YAML file.
        where: Source of the values, for messages.

    Raises:
        ConfigError: A setting is unknown, has a wrong type or value, or contradicts another setting.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} is {'empty' if values is None else f'{str(values)[:60]!r}'}. Write the groups "
            f"{', '.join(Config.model_fields)}; method and data are required"
        )
    try:
        resolved = resolve_paths(expand_baseline(values))
        return Config.model_validate(resolved)
    except ValidationError as error:
        raise ConfigError(explain(error, "", resolved, Config)) from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load a configuration from a YAML file.

    Args:
        path: The file.
        overrides: Settings that replace those of the file, as ``train.rounds=50``.

    Raises:
        ConfigError: The file is missing, unreadable or not a valid configuration.
    """
    path = Path(path)

    def make_error(reason: str) -> ConfigError:
        advice = "Give a readable text file, such as jobs/quickstart.yaml" if path.is_file() else _suggest_file(path)
        return ConfigError(f"cannot read the configuration {path}: {reason}. {advice}")

    with translate_failures(make_error):
        values = read_yaml(path)
    return make_config(apply_overrides(values, overrides) if isinstance(values, dict) else values, str(path))


def _suggest_file(path: Path) -> str:
    """Suggest a remedy for a missing configuration file."""
    if (path / "config.yaml").exists():
        return f"It is a run directory. Resume it with: raydfl resume {path}"
    if "=" in path.name:
        return "Give the file as the first argument, and settings after it"
    files = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = nearest(path.name, files) if files else ""
    return (
        hint
        if hint.startswith("Did you mean")
        else "Give a YAML file, such as jobs/quickstart.yaml (raydfl init writes it)"
    )
