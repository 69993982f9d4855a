"""Assembly of a run's objects (method, rule, attack, architectures) from its configuration, once in each process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raydfl.attacks import Attack
from raydfl.core import registry
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.settings import FIRST_VIEW
from raydfl.engine.former_options import find_former_tuning, take_former_options
from raydfl.engine.groups import add_groups, find_group_rule
from raydfl.engine.settings import FineTuneSettings
from raydfl.methods import Method, WithViews
from raydfl.models import INIT_FROM, find_architecture, read_init_from
from raydfl.objectives import find_objective
from raydfl.rules import Rule

T = TypeVar("T")
ModelChoice = str | dict[str, Any] | list[str | dict[str, Any]]
"""Architecture of a model in a configuration: a name, a name with options, a list to draw from for each client, or
``{by, choices}``: a profile column and the architecture of each of its values."""


@dataclass(frozen=True)
class Components:
    """The objects of a configuration. They may be of users' classes, so they are not sent to other processes."""

    method: Method
    """Method with its objective, and with ``train.groups``."""
    rule: Rule
    """Aggregation rule of the method."""
    attack: Attack | None
    """``None``: every client is honest."""
    models: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]]
    """Architectures of each model with their options, in the method's order of models."""
    chosen_by: Mapping[str, tuple[str, tuple[str, ...]]]
    """Profile column that selects a model's architecture, and its values in the architectures' order. Models with a random
    choice are missing."""
    former: Mapping[str, Any]
    """Options of earlier versions under their former names, for digests."""
    fine_tune: FineTuneSettings
    """Fine-tuning in evaluations."""


def assemble(
    method: Mapping[str, Any],
    models: Mapping[str, ModelChoice],
    attack: Mapping[str, Any] | None = None,
    objective: Mapping[str, Any] | None = None,
    groups: str | Mapping[str, Any] | None = None,
    fine_tune: FineTuneSettings | None = None,
) -> Components:
    """Build the objects of a configuration.

    Args:
        method: Name and options.
        models: Architectures by model.
        attack: Name and options; ``None``: every client is honest.
        objective: Name and options; ``None``: classification.
        groups: ``train.groups``; ``None``: the method's default.
        fine_tune: ``evaluate.fine_tune``; ``None``: the method's default.

    Raises:
        ConfigError: A name or option is unknown, an option has a wrong type or value, or a user's file cannot be loaded in this
            process.
    """
    options, former = take_former_options(method)
    built = _build("raydfl.methods", Method, options, "method")
    if "tasks" in former and groups not in (None, former["tasks"]):
        raise ConfigError(
            f"method.tasks is {former['tasks']!r:.80}, but train.groups is {groups!r:.80}. Remove method.tasks, the former name of "
            f"train.groups"
        )
    groups = former.get("tasks", type(built).grouping) if groups is None else groups
    former = {name: value for name, value in {**former, "tasks": groups}.items() if (name, value) != ("tasks", "none")}
    choice = {"name": "classify"} if objective is None else objective
    object.__setattr__(built, "objective", find_objective(choice))  # not an option of the frozen method
    attackers = None if attack is None else _build("raydfl.attacks", Attack, attack, "attack")
    chosen_by, lists = _split_choices(_configure_copies(models, type(built).copies))
    architectures, rule = _read_architectures(_declare_models(built, models), lists), find_group_rule(groups)
    grouped = built if rule is None else add_groups(built, rule)
    tuning = find_former_tuning(built, former) if fine_tune is None else fine_tune
    return Components(grouped, built.built_rule, attackers, architectures, chosen_by, former, tuning)


def _declare_models(method: Method, configured: Iterable[str]) -> Mapping[str, str]:
    """Return the models of a run with their default architectures, in building order.

    A method with models on features has the configured encoders, or its own ones if the configuration lacks some of them. Its
    ``student`` is the first model.

    Raises:
        ConfigError: An encoder or the student is missing, or ``on_features`` has an unknown model.
    """
    own, last = type(method).models, type(method).on_features
    if not last:
        return own
    for name in last:
        if name not in own:
            cls = type(method).__name__
            raise ConfigError(f"{cls}.on_features: unknown model {name!r} in {cls}.models. {nearest(name, own)}")
    names = [name for name in configured if name not in last]
    encoders = {name: own.get(name, "crnn_lite") for name in names}
    if not names or set(names) < set(own):
        encoders = {name: architecture for name, architecture in own.items() if name not in last}
    if not encoders:
        raise ConfigError(
            f"{type(method).__name__}.models: all models are in on_features. Add a model that reads a view"
        )
    if len(encoders) < 2 and isinstance(method, WithViews):
        raise ConfigError(
            f"models: {', '.join(encoders)} is a single network, but this method needs a network for each of at least two views. "
            f"Set models='{{audio: crnn_lite, video: {{name: cnn_small, view: video}}}}'"
        )
    student = getattr(method, "student", None) or next(iter(encoders))
    if student not in encoders:
        raise ConfigError(f"method.student: unknown model {student!r}. {nearest(student, encoders)}")
    return {student: encoders.pop(student), **encoders, **{name: own[name] for name in last}}


def format_value(value: Any) -> str:
    """Write a profile value as a key of a configuration. A tuple is written as ``a+b``."""
    if isinstance(value, tuple):
        return "+".join(map(format_value, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _configure_copies(models: Mapping[str, ModelChoice], copies: Mapping[str, str]) -> dict[str, ModelChoice]:
    """Return the configured models, with the original's configuration for each copy.

    Raises:
        ConfigError: A copy has a configuration that differs from its original's.
    """
    configured = dict(models)
    for name, original in copies.items():
        if configured.get(name, models.get(original)) != models.get(original):
            raise ConfigError(
                f"models.{name} is {configured[name]!r:.80}, but it must have the architecture of models.{original} as its copy. "
                f"Remove models.{name}"
            )
        if original in models:
            configured[name] = models[original]
    return configured


def _split_choices(
    models: Mapping[str, ModelChoice],
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], dict[str, ModelChoice]]:
    """Return column and values of models with ``by``, and all models with a list in place of ``choices``."""
    chosen_by: dict[str, tuple[str, tuple[str, ...]]] = {}
    lists = dict(models)
    for name, value in models.items():
        if not (isinstance(value, dict) and ("by" in value or "choices" in value)):
            continue
        choices = value.get("choices")
        if value.keys() != {"by", "choices"} or not isinstance(value["by"], str) or not isinstance(choices, dict):
            raise ConfigError(
                f"models.{name}: {value!r:.80} does not select an architecture by profile. Write "
                f"{{by: COLUMN, choices: {{VALUE: ARCHITECTURE, ...}}}}"
            )
        chosen_by[name] = value["by"], tuple(map(format_value, choices))
        lists[name] = list(choices.values())
    return chosen_by, lists


def _build(package: str, base: type[T], setting: Mapping[str, Any], what: str) -> T:
    options = dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{what}: a name is missing. Choose one of {', '.join(registry.names(package))}")
    return registry.build(registry.find(package, name, base, what), options, what)


def split_view(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a model's options into its view and the options of its architecture."""
    own = dict(options)
    return own.pop("view", FIRST_VIEW), own


def _read_architectures(
    declared: Mapping[str, str], configured: Mapping[str, ModelChoice]
) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the architectures of each declared model, with the method's default for unconfigured models."""
    architectures: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, default in declared.items():
        where = f"models.{name}"
        value = configured.get(name, default)
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ConfigError(f"{where}: the list of architectures is empty. Add one, or remove {where}")
        architectures[name] = []
        for item in items:
            options: dict[str, Any] = {"name": item} if isinstance(item, str) else dict(item)
            architecture = options.pop("name", default if INIT_FROM in options else None)
            if not isinstance(architecture, str):
                raise ConfigError(f"{where}: an architecture's name is missing in {item!r}. Write {{name: ..., ...}}")
            find_architecture(architecture, where)
            if INIT_FROM in options:
                settings = read_init_from(options[INIT_FROM], f"{where}.{INIT_FROM}")
                options[INIT_FROM] = settings.model_dump(mode="json", exclude_defaults=True)
            architectures[name].append((architecture, options))
    return architectures
