"""Shards of the server's held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

_SHARD = 512
"""Approximate number of examples in an evaluation order of the server."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of examples of the server's data, evaluated in a single task."""

    split: str
    """``test``, ``triggered`` or ``server_validation``."""
    start: int
    """Index of the first example in the split at the place."""
    stop: int
    """Index after the last example."""
    place: str
    """Site of the examples. Empty: local data."""


def cut_shards(splits: Mapping[str, np.ndarray]) -> list[Shard]:
    """Cut splits into shards of about 512 examples. All segments of a clip stay in the same shard.

    Args:
        splits: by split, the clip of each example, int64 [examples].
    """
    return [
        Shard(split, start, stop, "") for split, clips in splits.items() for start, stop in shard_ranges(clips, _SHARD)
    ]


def join_shards(shards: Iterable[Shard]) -> list[Shard]:
    """Join the shards of each split and place, for metrics that need all examples at once."""
    joined: dict[tuple[str, str], Shard] = {}
    for shard in shards:
        first = joined.setdefault((shard.split, shard.place), shard)
        joined[shard.split, shard.place] = replace(first, stop=shard.stop)
    return [*joined.values()]


def shard_ranges(clips: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Cut examples into ranges (start, stop) of at least ``size`` examples, between clips.

    Args:
        clips: int64 [examples], the clip of each example.
        size: minimal number of examples. The last range may be smaller.
    """
    clip_starts = np.flatnonzero(np.r_[True, clips[1:] != clips[:-1]]) if len(clips) else np.zeros(0, np.int64)
    ranges, start = [], 0
    while start < len(clips):
        later = clip_starts[clip_starts >= start + size]
        stop = int(later[0]) if len(later) else len(clips)
        ranges.append((start, stop))
        start = stop
    return ranges
