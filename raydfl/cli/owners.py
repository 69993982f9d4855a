"""Owners of clips for a proposal: a column, a level of folders, or a deal of the clips without an owner."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from raydfl.core.options import options_of
from raydfl.data import DataSettings, find_dataset

NORMAL, ANOMALOUS = re.compile("normal", re.IGNORECASE), re.compile("abnormal|anomal", re.IGNORECASE)
"""Prefixes of the names of normal and anomalous conditions."""
LEAST_GROUPS = 3
"""Smallest number of groups for holding out whole groups."""
_WORDS = "speaker|spk|talker|singer|actor|subject|participant|patient|person|user|client|owner|device"
_COLUMN = re.compile(rf"(?:{_WORDS})(?:_?id|_?name)?", re.IGNORECASE)
"""Names of columns with the owners of clips."""
_ID = re.compile(rf"(?:(?:{_WORDS}|machine|id|[a-z])[ _-]?\d+|\d\d+)", re.IGNORECASE)
"""Names of folders of owners, such as ``speaker_1``, ``s01`` and ``017``."""
_INNER = "^(?P<group>[^/]+)/"
"""Value of ``data.group_pattern`` for owners in folders inside the classes."""
_PREFIX = "^(?P<group>[^/_-]+)[_-][^/]*$"
"""Value of ``data.group_pattern`` for owners at the beginning of the files' names."""
_DENSE = 0.5
"""Smallest fraction of existing folders among all pairs of an owner and a class."""
_NAMED = 3


def propose_owners(data: DataSettings, manifest: pa.Table) -> tuple[dict[str, Any], str]:
    """Propose the column or the level of folders with the owners of clips, with the reason, if no clip has a group.

    Args:
        data: the data settings.
        manifest: the list of clips.
    """
    options = [option.name for option in options_of(find_dataset(data.name))]
    if manifest.column("group").null_count < manifest.num_rows:
        return {}, ""
    if "owner_folders" in options:
        return _propose_level(manifest)
    for column in manifest.column_names if "group_column" in options else ():
        owners = len(manifest.column(column).drop_null().unique()) if _COLUMN.fullmatch(column) else 0
        if 1 < owners < manifest.num_rows:
            return {"data.group_column": column}, (
                f"column {column} has {owners:,} owners of clips, which become the groups (data.group_column)"
            )
    return {}, ""


def propose_ungrouped(data: DataSettings, manifest: pa.Table) -> tuple[dict[str, Any], str]:
    """Propose a treatment of clips without a group, with the reason."""
    group = manifest.column("group")
    known = len(group.drop_null().unique())
    if not group.null_count or known < LEAST_GROUPS or group.null_count > manifest.num_rows / 2:
        return {}, ""
    labels = manifest.filter(group.is_null()).column("label").unique().to_pylist()
    return {"data.ungrouped": "deal"}, (
        f"{group.null_count:,} clips ({', '.join(map(str, labels[:5]))}) have no group; the {known:,} groups get them"
    )


def _propose_level(manifest: pa.Table) -> tuple[dict[str, Any], str]:
    """Propose the level of folders with the owners, if two levels of folders contain every pair of names."""
    depth = 0 if manifest.column("split").null_count else 1
    paths = [clip.split("/")[depth:] for clip in manifest.column("clip").to_pylist()]
    if min(map(len, paths)) < 3:
        return _propose_prefix(paths) if max(map(len, paths)) == 2 else ({}, "")
    pairs = {(first, second) for first, second, *_ in paths}
    levels = [sorted({pair[level] for pair in pairs}) for level in (0, 1)]
    first, second = levels
    if min(len(first), len(second)) < 2 or len(pairs) < _DENSE * len(first) * len(second):
        return {}, ""
    outer: tuple[dict[str, Any], str] = (
        {"data.owner_folders": True},
        f"the folders {_list_names(first)} are owners, with folders of classes inside",
    )
    inner: tuple[dict[str, Any], str] = (
        {"data.group_pattern": _INNER},
        f"the folders inside the classes ({_list_names(second)}) are owners",
    )
    if any(_are_conditions(names) for names in levels):
        return outer if _are_conditions(second) else inner
    named = [all(_ID.fullmatch(name) for name in names) for names in levels]
    if named[0] != named[1]:
        return outer if named[0] else inner
    if len(first) > len(second):
        return outer[
            0
        ], f"{outer[1]}. If {_list_names(second)} are the owners, set data.group_pattern='{_INNER}' instead"
    return inner[0], f"{inner[1]}. If {_list_names(first)} are the owners, set data.owner_folders=true instead"


def _propose_prefix(paths: list[list[str]]) -> tuple[dict[str, Any], str]:
    """Propose the first word of the files' names, if its values are in most classes, with two files on average.

    Names such as ``s01`` and ``017`` are owners. Otherwise only the reason names the setting.
    """
    found = [re.match(_PREFIX, file) for _, file in paths]
    pairs = {(label, match["group"]) for (label, _), match in zip(paths, found, strict=True) if match is not None}
    labels, words = ({pair[place] for pair in pairs} for place in (0, 1))
    dense = len(pairs) >= _DENSE * len(labels) * len(words)
    if None in found or len(labels) < 2 or len(words) < LEAST_GROUPS or 2 * len(pairs) > len(paths) or not dense:
        return {}, ""
    names = _list_names(sorted(words))
    if all(_ID.fullmatch(word) for word in words):
        return {"data.group_pattern": _PREFIX}, (
            f"the first words of the file names ({names}) are owners. If they are not, remove data.group_pattern"
        )
    return {}, f"if the first words of the file names ({names}) are owners, set data.group_pattern='{_PREFIX}'"


def _are_conditions(names: list[str]) -> bool:
    return all(NORMAL.match(name) or ANOMALOUS.match(name) for name in names)


def _list_names(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")
