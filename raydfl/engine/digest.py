"""Digest of a configuration: a hash of the settings that affect the results of a run.

A new setting has a neutral value, which keeps the results of earlier versions. The digest omits neutral values, so that existing
digests stay valid. tests/engine/test_digest.py checks every setting.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from raydfl.core.options import plain
from raydfl.core.settings import FIRST_VIEW
from raydfl.data import DataSettings, View
from raydfl.data.features import NEUTRAL
from raydfl.engine.privacy_settings import PrivacySettings

_FIRST_OF_DATA = ("name", "features", "segment", "split", "partition", "corrupt", "unreadable", "cache")
"""Keys of ``data`` in the first version. The defaults of all later keys are neutral."""

_CAME_LATER: Mapping[tuple[str, ...], Any] = {
    **{
        ("data", key): value
        for key, value in DataSettings.model_construct(name="").model_dump(mode="json").items()
        if key not in _FIRST_OF_DATA
    },
    ("attack",): None,
    ("privacy",): PrivacySettings().model_dump(mode="json"),
    ("privacy", "as_if"): None,
    ("objective", "average"): "probabilities",
    ("objective", "top_k"): None,
    ("objective",): {"name": "classify"},
    ("data", "sites"): [],
    ("data", "corrupt", "canaries"): None,
    **{("data", "features", name): value for name, value in NEUTRAL.items()},
    ("data", "split", "client_test"): None,
    ("data", "split", "server_validation"): None,
    ("data", "split", "as_published"): None,
    ("data", "partition", "variance"): 0.0,
    ("data", "partition", "file"): None,
    ("train", "block"): "auto",
    ("train", "class_weights"): "none",
    ("train", "clients"): None,
    ("train", "fleet", "hours"): None,
    ("train", "fleet"): None,
    ("train", "precision"): "float32",
    ("train", "deadline"): None,
    ("train", "phases"): {},
    ("train", "optimiser", "keep"): False,
    ("train", "optimiser", "private"): None,
}
"""Settings of later versions, with their neutral values. The digest omits neutral values."""


_OPTION_CAME_LATER: Mapping[tuple[str, str], Any] = {
    ("spoken_words", "label"): "word",
    ("machines", "level"): "machine",
    ("folder", "owner_folders"): False,
    ("fedapta", "ratio_of"): "prunable",
    **dict.fromkeys([(name, "share_of") for name in ("feddrop", "fedrolex", "heterofl")], "channels"),
    **dict.fromkeys([(name, "heads") for name in ("multifl", "modality_mirror")], "alone"),
    ("unifl", "cohort"): "each",
    ("compact", "spread"): 0.0,
    ("compact", "score"): "centre",
    ("compact", "quantile"): 0.95,
    ("reconstruct", "quantile"): 0.95,
}
"""Options of later versions with their neutral values, by name of the data set, objective or method, and option."""


def select_decisive(groups: Mapping[str, Any], data: DataSettings) -> dict[str, Any]:
    """Return the settings of a configuration that affect results.

    Args:
        groups: Settings groups as plain values, with all options of their classes.
        data: The group ``data``.
    """
    decisive = {**groups, "data": _add_transform_options(data, groups["data"])}
    if not data.parts:
        decisive["data"] = _add_dataset_options(data, decisive["data"])
    _drop_neutral(decisive)
    _mark_statistics(data, decisive["data"])
    if data.parts:
        # Hash the resolved settings of each part: it does not matter whether a setting comes from data or from the part.
        common = {} if data.heads == "part" else {"heads": data.heads}
        decisive["data"] = {"parts": [(name, _describe_part(part)) for name, part in data.each.items()], **common}
    decisive["data"].pop("cache", None)  # the folder of the feature cache does not affect results
    return decisive


def hash_values(groups: Mapping[str, Any], files: Mapping[str, tuple[str, str]]) -> str:
    """Hash plain values.

    Args:
        groups: Settings groups as plain values.
        files: Files in the options, by setting: path and digest of the content. The digest replaces the path.

    Returns:
        16 hexadecimal digits.
    """
    text = json.dumps(groups, sort_keys=True, default=str)
    for path, content in files.values():
        text = text.replace(json.dumps(path), json.dumps(content))  # the path of a file does not affect results
    # Each job copies the user's own file to another folder.
    text = re.sub(r'"[^"]*/([^"/]+\.py:\w+)"', r'"\1"', text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def drop_neutral(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Remove neutral options of later versions from the options of a data set, an objective or a method."""
    return {key: value for key, value in options.items() if _OPTION_CAME_LATER.get((name, key), ...) != value}


def _describe_part(data: DataSettings) -> dict[str, Any]:
    """Return the settings of a part that affect results."""
    values = _add_transform_options(data, data.model_dump(mode="json"))
    decisive = _add_dataset_options(data, values)
    _drop_neutral({"data": decisive}, "data")
    _mark_statistics(data, decisive)
    decisive.pop("cache")
    return decisive


def _add_transform_options(data: DataSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of the transforms' options, and the order of the pools, to values of ``data``."""
    views = data.all_views
    extended = {**values, "transforms": _list_transforms(views[FIRST_VIEW])}
    extended["views"] = {
        name: {**view, "transforms": _list_transforms(views[name])} for name, view in values["views"].items()
    }
    if data.pools:
        extended["pools"] = [*values["pools"].items()]  # order matters: methods train on the first pool by default
    return extended


def _list_transforms(view: View) -> list[dict[str, Any]]:
    if not view.transforms:
        return []
    return [
        {"name": setting["name"], **plain(transform)}
        for setting, transform in zip(view.transforms, view.pipeline.all, strict=True)
    ]


def _add_dataset_options(data: DataSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of the data set's options, at each site, to values of ``data``."""
    if data.sites:
        # The order of sites determines the numbers of clients. A site's folder does not affect results.
        return {**values, "sites": [(name, _describe_site(data, name)) for name in data.sites]}
    settings = {key: values[key] for key in values if key in DataSettings.model_fields} | {"sites": []}
    return settings | _list_options(data) | data.uris


def _describe_site(data: DataSettings, name: str) -> dict[str, Any]:
    own = data.select_site(name)
    changed = {
        name: getattr(own, name) for name in ("partition", "tables") if getattr(own, name) != getattr(data, name)
    }
    return {**_list_options(own), **{name: group.model_dump(mode="json") for name, group in changed.items()}}


def _list_options(data: DataSettings) -> dict[str, Any]:
    """Return the data set's options, including defaults."""
    return drop_neutral(data.name, plain(data.source.open()))


def _drop_neutral(values: dict[str, Any], only: str = "") -> None:
    """Remove settings of later versions with neutral values.

    Args:
        values: Settings groups, modified in place.
        only: Restrict the removal to this group. Empty: all groups.
    """
    for (*groups, key), neutral in _CAME_LATER.items():
        if only and groups[:1] != [only]:
            continue
        group = functools.reduce(lambda inner, name: inner.get(name) or {}, groups, values)
        if key in group and group[key] == neutral:
            del group[key]
    _drop_neutral_of_pools(values["data"])
    _drop_null_others(values["data"]["split"])
    clients = values.get("train", {}).get("clients")
    for key, neutral in {"draw": "fixed", "rest": 1}.items():
        if clients is not None and clients.get(key) == neutral:
            del clients[key]


def _drop_neutral_of_pools(data: dict[str, Any]) -> None:
    """Remove neutral options of later versions from the pools' partitions."""
    pools = data.get("pools", {})
    for pool in (data.get("unlabelled"), *dict(pools).values()):
        if pool and pool["partition"]:
            if not pool["partition"]["variance"]:
                del pool["partition"]["variance"]
            if pool["partition"]["file"] is None:
                del pool["partition"]["file"]


def _drop_null_others(split: dict[str, Any]) -> None:
    """Remove ``others: null`` from the held-out sets."""
    for held_out in split.values():
        if isinstance(held_out, dict) and held_out.get("others", ...) is None:
            del held_out["others"]


def _mark_statistics(data: DataSettings, values: dict[str, Any]) -> None:
    if data.features.normalise == "group":
        values["features"]["statistics"] = "training clips"  # earlier versions included held-out clips
