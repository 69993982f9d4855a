"""Files and folders in a configuration: absolute paths and content digests."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydfl.attacks import Attack
from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.files import content_digest
from raydfl.core.nested import get_path
from raydfl.core.options import path_options
from raydfl.core.pretrained import encoder_digest
from raydfl.core.remote import check_path, is_uri
from raydfl.data import DataSettings, find_dataset, find_transform, place_of
from raydfl.data.features import AnyFeatures, PretrainedFeatures, kind_of
from raydfl.engine.assembly import Components
from raydfl.methods import Method
from raydfl.models import INIT_FROM, Pretrained, find_architecture, model_paths
from raydfl.objectives import Objective
from raydfl.rules import Rule

_CLASSES: Sequence[tuple[str, str, type[Any]]] = (
    ("method", "raydfl.methods", Method),
    ("method.rule", "raydfl.rules", Rule),
    ("objective", "raydfl.objectives", Objective),
    ("attack", "raydfl.attacks", Attack),
)
"""Groups with the name of a class: place, package of the built-in classes, and base class."""


def resolve_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration's plain data with absolute paths. Invalid groups remain unchanged.

    Raises:
        ConfigError: A path is invalid, or a named class does not exist.
    """
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    run = result.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("dir", "runs")
        _resolve(run, ["dir"])
    for group in ("method", "models", "objective", "data", "attack"):
        if group in result:
            result[group] = _resolve_references(result[group])
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
    """Make the paths of a group of data settings absolute, in place.

    Args:
        data: The group.
        where: Place of the group in the configuration.
        name: Default name of the data set.
    """
    name = data.get("name", name)
    _resolve(data, ["cache", "trials", *(path_options(find_dataset(name)) if isinstance(name, str) and name else ())])
    transforms = data.get("transforms")
    for transform in transforms if isinstance(transforms, list) else ():
        if isinstance(transform, dict) and isinstance(transform.get("name"), str):
            _resolve(transform, path_options(find_transform(transform["name"])))
    for group, keys in (("partition", ["file"]), ("tables", ["clips", "clients"]), ("events", ["file"])):
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
        items = [*choices.values()] if choices is not value else value if isinstance(value, list) else [value]
        for choice in (item for item in items if isinstance(item, dict)):
            if isinstance(choice.get("name"), str):
                _resolve(choice, model_paths(choice["name"], f"models.{name}"))
            if isinstance(choice.get(INIT_FROM), str):
                choice[INIT_FROM] = {"file": choice[INIT_FROM]}
            if isinstance(choice.get(INIT_FROM), dict):
                _resolve(choice[INIT_FROM], ["file"])


def _resolve(group: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if isinstance(group.get(key), str):
            group[key] = _resolve_path(group[key])


def _resolve_path(text: str) -> str:
    check_path(text)
    try:
        return text if is_uri(text) else str(Path(os.path.expandvars(text)).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an unknown user in ~NAME, a null character
        raise ConfigError(f"the path {text!r} cannot be found: {error}") from error


def _resolve_references(value: Any) -> Any:
    """Return a copy with an absolute path in every ``my_file.py:Class``."""
    if isinstance(value, dict):
        return {key: _resolve_references(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve_references(inner) for inner in value]
    if isinstance(value, str) and re.fullmatch(r".+\.py:\w+", value):
        place, _, name = value.rpartition(":")
        return f"{_resolve_path(place)}:{name}"
    return value


def hash_named_files(components: Components, data: DataSettings) -> dict[str, tuple[str, str]]:
    """Return path and content digest of the files and encoder folders of options, by the option's place.

    Includes options of method, rule, objective, models and attack. Excludes files of data and features, except encoder folders,
    because the run keeps its own population and features.
    """
    method = components.method
    objects: dict[str, object] = {"method": method, "objective": method.objective, "attack": components.attack}
    if isinstance(method.rule, dict):
        objects["method.rule"] = components.rule
    named = {
        f"{place}.{key}": getattr(built, key)
        for place, built in objects.items()
        if built is not None
        for key in path_options(type(built))
    }
    encoders: dict[str, Path] = {}
    for name, choices in components.models.items():
        for number, (architecture, options) in enumerate(choices):
            place = f"models.{name}" if len(choices) == 1 else f"models.{name}.{number}"
            for key in model_paths(architecture, place):
                named[f"{place}.{key}"] = options.get(key)
            named[f"{place}.{INIT_FROM}.file"] = options.get(INIT_FROM, {}).get("file")
            if issubclass(find_architecture(architecture, place)[0], Pretrained) and options.get("folder"):
                encoders[f"{place}.folder"] = Path(options["folder"])
    for part, settings in data.each.items():
        place = place_of(part)
        for view in settings.all_views.values():
            if isinstance(view.features, PretrainedFeatures):
                encoders[f"{place}{view.where.removeprefix('data')}.features.folder"] = view.features.folder
    files = {
        place: (str(path), content_digest(Path(path)))
        for place, path in named.items()
        if isinstance(path, str | Path) and not is_uri(path) and Path(path).is_file()
    }
    folders = {place: folder for place, folder in encoders.items() if folder.is_dir()}
    return files | {place: (str(folder), encoder_digest(folder)) for place, folder in folders.items()}


def check_same_files(at_start: Mapping[str, tuple[str, str]], here: Mapping[str, tuple[str, str]]) -> None:
    """Reject files and folders whose content differs from the starting machine's.

    Args:
        at_start: Result of :func:`hash_named_files` on the starting machine.
        here: Result of :func:`hash_named_files` in this process.

    Raises:
        ConfigError: A file or folder is missing or differs. The message names the first one.
    """
    for place, (path, content) in at_start.items():
        if here.get(place, (path, ""))[1] != content:
            problem = "differs from the starting machine's" if place in here else "is missing"
            raise ConfigError(
                f"{place}: {path} on {platform.node()} {problem}. Provide the same content under this path on every node"
            )


def check_encoder(architecture: str, options: Mapping[str, Any], features: AnyFeatures, where: str, place: str) -> None:
    """Reject a pretrained encoder whose features come from another folder or another layer.

    Args:
        architecture: Name of the network.
        options: Options of the network.
        features: Input features of the network.
        where: Place of the network in the configuration.
        place: Place of the features in the configuration.

    Raises:
        ConfigError: The features are of another kind, folder or layer.
    """
    if not issubclass(find_architecture(architecture, where)[0], Pretrained) or not options.get("folder"):
        return
    folder, after = Path(options["folder"]), options.get("after")
    group = f"{{kind: pretrained, folder: {folder}, after: {'null' if after is None else after}}}"
    if not isinstance(features, PretrainedFeatures):
        raise ConfigError(
            f"{where}: {architecture} reads the output of the encoder's own front end, but the features are of the kind "
            f"{features.kind}. Set {place}='{group}'"
        )
    if features.folder != folder:
        raise ConfigError(
            f"{where}.folder is {folder}, but the features are computed from {features.folder}. Set both to the same folder"
        )
    if features.after != after:
        raise ConfigError(
            f"{where}.after is {after}, but the features are computed after layer {features.after} (null: after the front end). "
            f"Set both to the same number of layers"
        )
