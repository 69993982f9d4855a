"""Paths in a configuration, made absolute before it is checked, so that a run can be resumed from any folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydfl.attacks import Attack
from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.nested import get_path
from raydfl.core.options import path_options
from raydfl.core.remote import check_path, is_uri
from raydfl.data import find_dataset, find_transform
from raydfl.data.features import kind_of
from raydfl.methods import Method
from raydfl.models import INIT_FROM, model_paths
from raydfl.objectives import Objective
from raydfl.rules import Rule

_CLASSES: Sequence[tuple[str, str, type[Any]]] = (
    ("method", "raydfl.methods", Method),
    ("method.rule", "raydfl.rules", Rule),
    ("objective", "raydfl.objectives", Objective),
    ("attack", "raydfl.attacks", Attack),
)
"""Groups that name a class: their places, the packages of the built-in classes, and the base classes."""


def absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as plain data with its paths made absolute; what is not as it should be is left as it is.

    Raises:
        ConfigError: a path that cannot be one, or a class that is named and cannot be found.
    """
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    run = result.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("dir", "runs")
        _resolve(run, ["dir"])
    for group in ("method", "models", "objective", "data", "attack"):
        if group in result:
            result[group] = _references_resolved(result[group])
    for place, package, base in _CLASSES:
        group = get_path(result, place)
        if isinstance(group, dict) and isinstance(group.get("name"), str):
            _resolve(group, path_options(registry.find(package, group["name"], base, place.rpartition(".")[2])))
    if isinstance(result.get("models"), dict):
        _resolve_models(result["models"])
    data = result.get("data")
    if isinstance(data, dict):
        _resolve_data(data, "data")
        parts = data.get("parts")
        for part_name, part in parts.items() if isinstance(parts, dict) else ():
            if isinstance(part, dict):
                _resolve_data(part, f"data.parts.{part_name}", data.get("name"))
    return result


def _resolve_data(data: dict[str, Any], where: str, name: Any = None) -> None:
    """Make the paths of a group of data settings absolute.

    Args:
        data: the group, which is changed.
        where: its place in the configuration.
        name: the data set of a group that names none.
    """
    name = data.get("name", name)
    _resolve(data, ["cache", *(path_options(find_dataset(name)) if isinstance(name, str) and name else ())])
    transforms = data.get("transforms")
    for transform in transforms if isinstance(transforms, list) else ():
        if isinstance(transform, dict) and isinstance(transform.get("name"), str):
            _resolve(transform, path_options(find_transform(transform["name"])))
    for group, keys in (("partition", ["file"]), ("tables", ["clips", "clients"])):
        if isinstance(data.get(group), dict):
            _resolve(data[group], keys)
    if isinstance(data.get("features"), dict):
        _resolve(data["features"], path_options(kind_of(data["features"], f"{where}.features")))
    views = data.get("views")
    for view in views.values() if isinstance(views, dict) else ():
        features = view.get("features") if isinstance(view, dict) else None
        if isinstance(features, dict) and features.get("kind") == "pretrained":
            _resolve(features, ["folder"])


def _resolve_models(models: Mapping[str, Any]) -> None:
    for name, value in models.items():
        choices = value["choices"] if isinstance(value, dict) and isinstance(value.get("choices"), dict) else value
        several = [*choices.values()] if choices is not value else value if isinstance(value, list) else [value]
        for choice in (each for each in several if isinstance(each, dict)):
            if isinstance(choice.get("name"), str):
                _resolve(choice, model_paths(choice["name"], f"models.{name}"))
            if isinstance(choice.get(INIT_FROM), str):
                choice[INIT_FROM] = {"file": choice[INIT_FROM]}
            if isinstance(choice.get(INIT_FROM), dict):
                _resolve(choice[INIT_FROM], ["file"])


def _resolve(group: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if isinstance(group.get(key), str):
            group[key] = _resolved(group[key])


def _resolved(text: str) -> str:
    check_path(text)
    try:
        return text if is_uri(text) else str(Path(os.path.expandvars(text)).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, ~NAME of nobody, a null character
        raise ConfigError(f"the path {text!r} cannot be found: {error}") from error


def _references_resolved(value: Any) -> Any:
    """``value`` with every ``my_file.py:Class`` in it made absolute."""
    if isinstance(value, dict):
        return {key: _references_resolved(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_references_resolved(inner) for inner in value]
    if isinstance(value, str) and re.fullmatch(r".+\.py:\w+", value):
        place, _, name = value.rpartition(":")
        return f"{_resolved(place)}:{name}"
    return value
