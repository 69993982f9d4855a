"""Assembling: what a configuration describes, built once in each process that needs it."""

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
"""How a configuration says which architecture a model has: a name, a name with options, several that clients draw from, or
``{by, choices}``: what of a client's profile says which."""


@dataclass(frozen=True)
class Parts:
    """The objects that a configuration describes. It may hold classes of users' files, so it never travels between processes."""

    method: Method
    """With its objective, and with groups of clients where there are some."""
    rule: Rule
    """With which the method aggregates."""
    attack: Attack | None
    """``None``: every client is honest."""
    models: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]]
    """For every model of the method, in its order: the architectures that clients have, with their options."""
    chosen_by: Mapping[str, tuple[str, tuple[str, ...]]]
    """For models whose architecture a client's profile says and no draw: what of it, and the values in the architectures' order."""
    former: Mapping[str, Any]
    """Options of earlier versions, by their names then, as digests have them."""
    fine_tune: FineTuneSettings
    """The fine-tuning of an evaluation."""


def assemble(
    method: Mapping[str, Any],
    models: Mapping[str, ModelChoice],
    attack: Mapping[str, Any] | None = None,
    objective: Mapping[str, Any] | None = None,
    groups: str | Mapping[str, Any] | None = None,
    fine_tune: FineTuneSettings | None = None,
) -> Parts:
    """Build what the groups of a configuration describe; every class that they name is loaded.

    Args:
        method: name and options, like the others.
        models: architectures by model.
        attack: ``None``: every client is honest.
        objective: ``None``: classification.
        groups: ``train.groups``; ``None``: the method's own.
        fine_tune: ``evaluate.fine_tune``; ``None``: the method's own.

    Raises:
        ConfigError: an unknown name, an option that is unknown, of the wrong type or out of range, or a user's file that cannot be
            loaded in this process.
    """
    options, former = take_former_options(method)
    built = _build("raydfl.methods", Method, options, "method")
    if "tasks" in former and groups not in (None, former["tasks"]):
        raise ConfigError(
            f"method.tasks is {former['tasks']!r:.80} and train.groups is {groups!r:.80}; remove method.tasks, which is the former "
            f"name of train.groups"
        )
    groups = former.get("tasks", type(built).grouping) if groups is None else groups
    former = {name: value for name, value in {**former, "tasks": groups}.items() if (name, value) != ("tasks", "none")}
    chosen = {"name": "classify"} if objective is None else objective
    object.__setattr__(built, "objective", find_objective(chosen))  # not an option of the frozen method
    attackers = None if attack is None else _build("raydfl.attacks", Attack, attack, "attack")
    chosen_by, lists = _chosen_by(_with_copies(models, type(built).copies))
    chosen_models, rule = _models(_declare_models(built, models), lists), find_group_rule(groups)
    whole = built if rule is None else add_groups(built, rule)
    tuning = find_former_tuning(built, former) if fine_tune is None else fine_tune
    return Parts(whole, built.built_rule, attackers, chosen_models, chosen_by, former, tuning)


def _declare_models(method: Method, configured: Iterable[str]) -> Mapping[str, str]:
    """Return the models of a run, in building order, each with its architecture where none is configured.

    Those of a method with models on features are the configured encoders, or its own where fewer are configured; its ``student``
    is the first.

    Raises:
        ConfigError: an encoder or the student is missing, or one of ``on_features`` is no model.
    """
    own, last = type(method).models, type(method).on_features
    if not last:
        return own
    for name in last:
        if name not in own:
            cls = type(method).__name__
            raise ConfigError(f"{cls}.on_features: there is no model {name!r} in {cls}.models; {nearest(name, own)}")
    encoders = [name for name in configured if name not in last]
    given = {name: own.get(name, "crnn_lite") for name in encoders}
    if not encoders or set(encoders) < set(own):
        given = {name: architecture for name, architecture in own.items() if name not in last}
    if not given:
        raise ConfigError(f"{type(method).__name__}.models: all are in on_features; add a model that reads a view")
    if len(given) < 2 and isinstance(method, WithViews):
        raise ConfigError(
            f"models: {', '.join(given)} alone; this method needs at least two networks, one for each view: "
            f"models='{{audio: crnn_lite, video: {{name: cnn_small, view: video}}}}'"
        )
    student = getattr(method, "student", None) or next(iter(given))
    if student not in given:
        raise ConfigError(f"method.student: there is no model {student!r}; {nearest(student, given)}")
    return {student: given.pop(student), **given, **{name: own[name] for name in last}}


def text_of(value: Any) -> str:
    """Return a value of a profile as a configuration has it for a key; of several values ``a+b``."""
    if isinstance(value, tuple):
        return "+".join(map(text_of, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with_copies(models: Mapping[str, ModelChoice], copies: Mapping[str, str]) -> dict[str, ModelChoice]:
    """Return the configured models, copies with what is configured for their originals.

    Raises:
        ConfigError: a copy is configured as something else.
    """
    found = dict(models)
    for name, original in copies.items():
        if found.get(name, models.get(original)) != models.get(original):
            raise ConfigError(
                f"models.{name}: {found[name]!r:.80}; it is a copy of models.{original} and has its architecture; leave "
                f"models.{name} out"
            )
        if original in models:
            found[name] = models[original]
    return found


def _chosen_by(
    models: Mapping[str, ModelChoice],
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], dict[str, ModelChoice]]:
    """Return for models with ``by`` what stands there and the choices' keys, and all models with lists of choices."""
    chosen: dict[str, tuple[str, tuple[str, ...]]] = {}
    lists = dict(models)
    for name, value in models.items():
        if not (isinstance(value, dict) and ("by" in value or "choices" in value)):
            continue
        choices = value.get("choices")
        if value.keys() != {"by", "choices"} or not isinstance(value["by"], str) or not isinstance(choices, dict):
            raise ConfigError(
                f"models.{name}: {value!r:.80}; an architecture by profile is {{by: NAME, choices: {{VALUE: ARCHITECTURE, ...}}}}"
            )
        chosen[name] = value["by"], tuple(map(text_of, choices))
        lists[name] = list(choices.values())
    return chosen, lists


def _build(package: str, base: type[T], setting: Mapping[str, Any], what: str) -> T:
    options = dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{what}: a name is missing; known: {', '.join(registry.names(package))}")
    return registry.build(registry.find(package, name, base, what), options, what)


def split_view(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the view that a model reads, and the options of its architecture."""
    own = dict(options)
    return own.pop("view", FIRST_VIEW), own


def _models(
    declared: Mapping[str, str], configured: Mapping[str, ModelChoice]
) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the architectures of each declared model; of one that is not configured, the method's own."""
    chosen: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, default in declared.items():
        where = f"models.{name}"
        value = configured.get(name, default)
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ConfigError(f"{where}: the list of architectures is empty")
        chosen[name] = []
        for item in items:
            options: dict[str, Any] = {"name": item} if isinstance(item, str) else dict(item)
            architecture = options.pop("name", default if INIT_FROM in options else None)
            if not isinstance(architecture, str):
                raise ConfigError(f"{where}: an architecture's name is missing in {item!r}")
            find_architecture(architecture, where)
            if INIT_FROM in options:
                settings = read_init_from(options[INIT_FROM], f"{where}.{INIT_FROM}")
                options[INIT_FROM] = settings.model_dump(mode="json", exclude_defaults=True)
            chosen[name].append((architecture, options))
    return chosen
