"""The digest of a configuration: what of its settings decides the numbers of a run.

A setting that is new does not change the digests of configurations that leave it at the value at which a run is what it was before
there was the setting. tests/engine/test_digest.py asks of every setting whether it is in the digest as it should be.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
from collections.abc import Mapping
from typing import Any

from raydfl.core.options import plain
from raydfl.core.settings import FIRST_VIEW
from raydfl.data import DataSettings, View
from raydfl.data.features import NEUTRAL

_FIRST_OF_DATA = ("name", "features", "segment", "split", "partition", "corrupt", "unreadable", "cache")
"""Keys of ``data`` in the first version. All others came later, and are neutral at their defaults."""

_CAME_LATER: Mapping[tuple[str, ...], Any] = {
    **{
        ("data", key): value
        for key, value in DataSettings.model_construct(name="").model_dump(mode="json").items()
        if key not in _FIRST_OF_DATA
    },
    ("attack",): None,
    ("objective", "average"): "probabilities",
    ("objective", "top_k"): None,
    ("objective",): {"name": "classify"},
    ("data", "sites"): [],
    **{("data", "features", name): value for name, value in NEUTRAL.items()},
    ("data", "split", "client_test"): None,
    ("data", "split", "server_validation"): None,
    ("data", "split", "as_published"): None,
    ("data", "partition", "variance"): 0.0,
    ("data", "partition", "file"): None,
    ("train", "clients"): None,
    ("train", "precision"): "float32",
    ("train", "deadline"): None,
    ("train", "phases"): {},
    ("train", "optimiser", "keep"): False,
}
"""Settings that earlier versions did not have, with the value at which a run is what it was without them. The digest leaves that
out, and so stays what it was."""


_OPTION_CAME_LATER: Mapping[tuple[str, str], Any] = {
    ("spoken_words", "label"): "word",
    ("compact", "spread"): 0.0,
    ("compact", "score"): "centre",
    ("compact", "quantile"): 0.95,
    ("reconstruct", "quantile"): 0.95,
}
"""The same for options of data sets and objectives: by name of either, and option."""


def deciding(groups: Mapping[str, Any], data: DataSettings) -> dict[str, Any]:
    """Return what of a configuration's groups decides numbers.

    Args:
        groups: as plain values, with all options of what they name.
        data: the group ``data``.
    """
    found = {**groups, "data": _with_all_options(data, groups["data"])}
    if not data.parts:
        found["data"] = _with_options(data, found["data"])
    _forget_neutral(found)
    _note_statistics(data, found["data"])
    if data.parts:
        # Only what each comes to: it does not matter what stands in data for all of them.
        common = {} if data.heads == "part" else {"heads": data.heads}
        found["data"] = {"parts": [(name, _described(part)) for name, part in data.each.items()], **common}
    found["data"].pop("cache", None)  # where features lie; what they are decides the numbers
    return found


def hashed(groups: Mapping[str, Any], files: Mapping[str, tuple[str, str]]) -> str:
    """Return the digest of plain values.

    Args:
        files: that options name, by place: path, which is taken out, and digest of the content, which is put in its place.
    """
    text = json.dumps(groups, sort_keys=True, default=str)
    for path, content in files.values():
        text = text.replace(json.dumps(path), json.dumps(content))  # wherever the file lies
    # A job's copy of one's own file lies elsewhere each time.
    text = re.sub(r'"[^"]*/([^"/]+\.py:\w+)"', r'"\1"', text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_neutral(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a data set or an objective but those that came later and are neutral."""
    return {key: value for key, value in options.items() if _OPTION_CAME_LATER.get((name, key), ...) != value}


def _described(data: DataSettings) -> dict[str, Any]:
    """Return what of a part's settings decides the numbers."""
    values = _with_all_options(data, data.model_dump(mode="json"))
    found = _with_options(data, values)
    _forget_neutral({"data": found}, "data")
    _note_statistics(data, found)
    found.pop("cache")
    return found


def _with_all_options(data: DataSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of ``data`` with all the transforms' options, those that were not given too, and the pools in their order."""
    views = data.all_views
    found = {**values, "transforms": _transforms(views[FIRST_VIEW])}
    found["views"] = {name: {**own, "transforms": _transforms(views[name])} for name, own in values["views"].items()}
    if data.pools:
        found["pools"] = [*values["pools"].items()]  # the first is what is trained on by default
    return found


def _transforms(view: View) -> list[dict[str, Any]]:
    if not view.transforms:
        return []
    return [
        {"name": given["name"], **plain(transform)}
        for given, transform in zip(view.transforms, view.pipeline.all, strict=True)
    ]


def _with_options(data: DataSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of ``data`` with all options of the data set, at each site if there are any, not only the given ones."""
    if data.sites:
        # In the order given, in which clients are numbered; a site's folder, like the cache, is only where things lie.
        return {**values, "sites": [(name, _of_site(data, name)) for name in data.sites]}
    found = {key: values[key] for key in values if key in DataSettings.model_fields} | {"sites": []}
    return found | _options(data) | data.uris


def _of_site(data: DataSettings, name: str) -> dict[str, Any]:
    own = data.at(name)
    changed = {
        name: getattr(own, name) for name in ("partition", "tables") if getattr(own, name) != getattr(data, name)
    }
    return {**_options(own), **{name: group.model_dump(mode="json") for name, group in changed.items()}}


def _options(data: DataSettings) -> dict[str, Any]:
    """Return the data set's options, those that were not given too."""
    return without_neutral(data.name, plain(data.source.open()))


def _forget_neutral(values: dict[str, Any], *of: str) -> None:
    """Take out the settings that earlier versions did not have, where they are as it was without them.

    Args:
        values: groups of settings.
        of: only of this group.
    """
    for (*groups, key), neutral in _CAME_LATER.items():
        if of and groups[:1] != [*of]:
            continue
        group = functools.reduce(operator.getitem, groups, values)
        if key in group and group[key] == neutral:
            del group[key]
    _forget_later_options(values["data"])
    _forget_others(values["data"]["split"])


def _forget_later_options(data: dict[str, Any]) -> None:
    """Take neutral options out of the pools' partitions that earlier versions did not have."""
    pools = data.get("pools", {})
    for pool in (data.get("unlabelled"), *dict(pools).values()):
        if pool and pool["partition"]:
            if not pool["partition"]["variance"]:
                del pool["partition"]["variance"]
            if pool["partition"]["file"] is None:
                del pool["partition"]["file"]


def _forget_others(split: dict[str, Any]) -> None:
    """Take it out of what is held out where it is null."""
    for held_out in split.values():
        if isinstance(held_out, dict) and held_out.get("others", ...) is None:
            del held_out["others"]


def _note_statistics(data: DataSettings, values: dict[str, Any]) -> None:
    if data.features.normalise == "group":
        values["features"]["statistics"] = "training clips"  # earlier versions took those of held-out clips too
