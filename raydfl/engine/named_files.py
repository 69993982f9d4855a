"""The files and folders that a configuration names, by what they hold."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydfl.core.errors import ConfigError
from raydfl.core.files import content_digest
from raydfl.core.options import path_options
from raydfl.core.pretrained import encoder_digest
from raydfl.core.remote import is_uri
from raydfl.data import DataSettings, place_of
from raydfl.data.features import AnyFeatures, PretrainedFeatures
from raydfl.engine.assembly import Parts
from raydfl.models import INIT_FROM, Pretrained, find_architecture, model_paths


def named_files(parts: Parts, data: DataSettings) -> dict[str, tuple[str, str]]:
    """Return the files that options name, and folders of encoders: by the option's place, path and digest of the content.

    Options of method, rule, objective, models and attack. What data and features name is not among them, but for the folder
    of an encoder: the population and the features that come of it are kept with the run.
    """
    method, rule, attack = parts.method, parts.rule, parts.attack
    named = {f"method.{key}": getattr(method, key) for key in path_options(type(method))}
    objective = method.objective
    named |= {f"objective.{key}": getattr(objective, key) for key in path_options(type(objective))}
    if attack is not None:
        named |= {f"attack.{key}": getattr(attack, key) for key in path_options(type(attack))}
    if isinstance(method.rule, dict):
        named |= {f"method.rule.{key}": getattr(rule, key) for key in path_options(type(rule))}
    encoders: dict[str, Path] = {}
    for name, choices in parts.models.items():
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
    found = {
        place: (str(path), content_digest(Path(path)))
        for place, path in named.items()
        if isinstance(path, str | Path) and not is_uri(path) and Path(path).is_file()
    }
    folders = {place: folder for place, folder in encoders.items() if folder.is_dir()}
    return found | {place: (str(folder), encoder_digest(folder)) for place, folder in folders.items()}


def check_same_files(at_start: Mapping[str, tuple[str, str]], here: Mapping[str, tuple[str, str]]) -> None:
    """Refuse files and folders whose content is not what it was where the run was started.

    Args:
        at_start: what :func:`named_files` returned there.
        here: what it returns in this process, which may be on another node.

    Raises:
        ConfigError: naming the first.
    """
    for place, (path, content) in at_start.items():
        if here.get(place, (path, ""))[1] != content:
            what = "holds something else than" if place in here else "is not there as"
            raise ConfigError(
                f"{place}: {path} on {platform.node()} {what} where the run was started; put the same content under that "
                f"path on every node"
            )


def check_encoder(architecture: str, options: Mapping[str, Any], features: AnyFeatures, where: str, place: str) -> None:
    """Refuse a pretrained encoder and features that are not of one folder, or do not meet after the same layer.

    Args:
        architecture: the name of the network.
        options: its options.
        features: the features that it reads.
        where: the place of the network in the configuration.
        place: that of the features.
    """
    if not issubclass(find_architecture(architecture, where)[0], Pretrained) or not options.get("folder"):
        return
    folder, after = Path(options["folder"]), options.get("after")
    group = f"{{kind: pretrained, folder: {folder}, after: {'null' if after is None else after}}}"
    if not isinstance(features, PretrainedFeatures):
        raise ConfigError(
            f"{where}: {architecture} reads what the encoder's own front end makes, and the features are of the kind "
            f"{features.kind}; set {place}='{group}'"
        )
    if features.folder != folder:
        raise ConfigError(
            f"{where}.folder is {folder}, and the features come from that in {features.folder}; give one folder"
        )
    if features.after != after:
        raise ConfigError(
            f"{where}.after is {after}, and the features are those after {features.after} (null: the front end's); set both to one "
            f"number of layers"
        )
