"""Overrides of single settings, such as ``train.rounds=50``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from raydfl.core.errors import ConfigError
from raydfl.core.yaml import parse_yaml, to_yaml


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of ``values`` with each override ``a.b.c=value`` applied. The value is parsed as YAML.

    Raises:
        ConfigError: An override has no ``=``, or its path leads through a value that is not a group.
    """
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {override!r} is not of the form key=value, such as train.rounds=50")
        _set(result, path, parse_yaml(text, f"override {override!r}"), text)
    return result


def apply_values(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``values`` with settings applied by their path, such as ``train.rounds``.

    Raises:
        ConfigError: A path leads through a value that is not a group.
    """
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    for path, value in settings.items():
        _set(result, path, _replace_tuples(value), None)
    return result


def _replace_tuples(value: Any) -> Any:
    """Return a copy with lists in place of tuples, as YAML would give."""
    if isinstance(value, Mapping):
        return {key: _replace_tuples(item) for key, item in value.items()}
    return [_replace_tuples(item) for item in value] if isinstance(value, (list, tuple)) else value


def _set(values: dict[str, Any], path: str, value: Any, text: str | None) -> None:
    """Set the value at a path in place. Messages quote ``text``, the user's spelling of the value (``None``: YAML)."""
    group = values
    keys = path.split(".")
    if "" in keys:
        override = f"{path}={to_yaml(value) if text is None else text}"
        raise ConfigError(f"override {override!r}: a name is missing in {path!r}. Write a path such as train.rounds")
    for depth, key in enumerate(keys[:-1]):
        place = ".".join(keys[: depth + 1])
        if isinstance(group.get(key), str) and (place in _NAMED or keys[0] == "models"):
            group[key] = {"name": group[key]}
        inner = group.setdefault(key, {})
        if inner is None:
            inner = group[key] = {}
        if not isinstance(inner, dict):
            override = f"{path}={to_yaml(value) if text is None else text}"
            raise ConfigError(
                f"override {override!r}: {place} is {inner!r}, not a group of settings. Set {place} itself"
            )
        group = inner
    group[keys[-1]] = value


_NAMED = ("method", "method.rule", "objective", "data", "attack")
"""Groups with a short form: their name instead of ``{name: ...}``."""
