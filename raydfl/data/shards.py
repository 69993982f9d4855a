"""Sites and shards: where the server's data lie, at sites or wherever the run is, and in which parts they are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_SHARD = 512
"""Test examples in one order of the server's evaluation."""


@dataclass(frozen=True, slots=True)
class Site:
    """Clients that follow one another in the population and whose data lie at one place, where alone they are worked on."""

    name: str
    """Empty: wherever the run is."""
    first: int
    """Index of its first client."""
    stop: int
    """Index behind its last client."""
    shards: Mapping[str, Sequence[tuple[int, int]]]
    """For each of the splits test, triggered and server_validation, the parts (first example, the one behind the last) in which it
    is measured."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the server's data that is measured by itself."""

    split: str
    start: int
    """Index of its first example among those of the split at the site."""
    stop: int
    """Index behind its last example."""
    site: str
    """Name of the site where it lies."""


def only_site(clients: int, splits: Mapping[str, np.ndarray]) -> Site:
    """Return the site of all clients, wherever the run is.

    Args:
        clients: how many there are.
        splits: int64 [examples] each: the clip of every example that the server has, by split.
    """
    return Site("", 0, clients, {split: shards(clips, _SHARD) for split, clips in splits.items()})


def shards(clips: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Return ranges of about ``size`` examples that never part the segments of one clip."""
    starts = np.flatnonzero(np.r_[True, clips[1:] != clips[:-1]]) if len(clips) else np.zeros(0, np.int64)
    parts, begin = [], 0
    while begin < len(clips):
        later = starts[starts >= begin + size]
        end = int(later[0]) if len(later) else len(clips)
        parts.append((begin, end))
        begin = end
    return parts


def shards_at(sites: Sequence[Site]) -> list[Shard]:
    """Return the parts in which the server's data are measured, one site after another."""
    return [
        Shard(split, start, stop, site.name)
        for site in sites
        for split, parts in site.shards.items()
        for start, stop in parts
    ]
