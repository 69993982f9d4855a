"""Assembling: what a configuration describes, built once in each process that needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raydfl.attacks import Attack
from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.methods import Method
from raydfl.models import find_architecture
from raydfl.rules import Rule

T = TypeVar("T")
ModelChoice = str | dict[str, Any] | list[str | dict[str, Any]]
"""How a configuration says which architecture a model has: a name, a name with options, or several that clients draw from."""


@dataclass(frozen=True)
class Parts:
    """What a configuration describes, built. Holds classes of users' files: it never travels between processes."""

    method: Method
    rule: Rule
    """With which the method aggregates."""
    attack: Attack | None
    """``None``: every client is honest."""
    models: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]]
    """For every model of the method, in its order: the architectures that clients draw from, with their options."""


def assemble(
    method: Mapping[str, Any], models: Mapping[str, ModelChoice], attack: Mapping[str, Any] | None = None
) -> Parts:
    """Build what the groups of a configuration describe; every class that they name is loaded.

    Raises:
        ConfigError: an unknown name, an option that is unknown, of the wrong type or out of range, or a user's file that cannot be
            loaded in this process.
    """
    built = _build("raydfl.methods", Method, method, "method")
    attackers = None if attack is None else _build("raydfl.attacks", Attack, attack, "attack")
    return Parts(built, built.built_rule, attackers, _models(type(built).models, models))


def _build(package: str, base: type[T], setting: Mapping[str, Any], what: str) -> T:
    options = dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{what}: a name is missing; known: {', '.join(registry.names(package))}")
    return registry.build(registry.find(package, name, base, what), options, what)


def split_view(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the view that a model reads, empty for the first, and the options of its architecture."""
    own = dict(options)
    return own.pop("view", ""), own


def _models(
    declared: Mapping[str, str], configured: Mapping[str, ModelChoice]
) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """The architectures of each declared model; of one that is not configured, the method's own."""
    chosen: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, default in declared.items():
        where = f"models.{name}"
        value = configured.get(name, default)
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ConfigError(f"{where}: the list of architectures is empty")
        chosen[name] = []
        for item in items:
            options = {"name": item} if isinstance(item, str) else dict(item)
            architecture = options.pop("name", None)
            if not isinstance(architecture, str):
                raise ConfigError(f"{where}: an architecture's name is missing in {item!r}")
            find_architecture(architecture, where)
            chosen[name].append((architecture, options))
    return chosen
