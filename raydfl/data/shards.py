"""Shards of the server's held-out data, and the places where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_SHARD = 512
"""Test examples in one order of the server's evaluation."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Examples of a split of the server's data that are measured together."""

    split: str
    """``test``, ``triggered`` or ``server_validation``."""
    start: int
    """Index of its first example among those of the split at the place."""
    stop: int
    """Index behind its last example."""
    place: str
    """The site of the examples; empty: wherever the run is."""


def cut_shards(splits: Mapping[str, np.ndarray]) -> list[Shard]:
    """Cut splits into shards of about 512 examples, without parting the segments of a clip.

    Args:
        splits: int64 [examples]: the clip of each example, by split.
    """
    return [
        Shard(split, start, stop, "") for split, clips in splits.items() for start, stop in shard_ranges(clips, _SHARD)
    ]


def shard_ranges(clips: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Return ranges of about ``size`` examples that do not part the segments of a clip (int64 [examples])."""
    starts = np.flatnonzero(np.r_[True, clips[1:] != clips[:-1]]) if len(clips) else np.zeros(0, np.int64)
    ranges, begin = [], 0
    while begin < len(clips):
        later = starts[starts >= begin + size]
        end = int(later[0]) if len(later) else len(clips)
        ranges.append((begin, end))
        begin = end
    return ranges
