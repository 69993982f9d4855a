"""Settings given one by one, as ``train.rounds=50`` or by path, laid over a configuration's values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from raydfl.core.errors import ConfigError
from raydfl.core.yaml import parse_yaml, to_yaml


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``values`` with each ``a.b.c=value`` set; values are read as YAML.

    Raises:
        ConfigError: an override without ``=``, or one that goes through a value that is not a group.
    """
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {override!r} is not of the form key=value (for instance train.rounds=50)")
        _set(result, path, parse_yaml(text, f"override {override!r}"), text)
    return result


def apply_values(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Lay settings by their path, such as ``train.rounds``, over ``values`` as :func:`apply_overrides` does with their text.

    Raises:
        ConfigError: a path goes through a value that is not a group.
    """
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    for path, value in settings.items():
        _set(result, path, _plain(value), None)
    return result


def _plain(value: Any) -> Any:
    """Return a copy with lists in place of tuples."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _set(values: dict[str, Any], path: str, value: Any, text: str | None) -> None:
    """Set what ``path`` names; ``text`` is the value as the user wrote it, for messages (``None``: as YAML)."""
    group = values
    keys = path.split(".")
    if "" in keys:
        override = f"{path}={to_yaml(value) if text is None else text}"
        raise ConfigError(f"override {override!r}: a name is missing in {path!r}, which must be like train.rounds")
    for depth, key in enumerate(keys[:-1]):
        place = ".".join(keys[: depth + 1])
        if isinstance(group.get(key), str) and (place in _NAMED or keys[0] == "models"):
            group[key] = {"name": group[key]}
        inner = group.setdefault(key, {})
        if inner is None:
            inner = group[key] = {}
        if not isinstance(inner, dict):
            override = f"{path}={to_yaml(value) if text is None else text}"
            raise ConfigError(f"override {override!r}: {place} is {inner!r}, not a group of settings")
        group = inner
    group[keys[-1]] = value


_NAMED = ("method", "method.rule", "objective", "data", "attack")
"""Groups that may be given by their name alone."""
