"""Leave out: clips with some labels leave the list, and clips without a group get one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.data.steps.listing import natural_order


def leave_out_labels(manifest: pa.Table, left_out: Sequence[str], complete: bool) -> pa.Table:
    """Return the list without the clips of some labels.

    Args:
        left_out: the labels.
        complete: whether these are all clips of the federation, so that each label must be among theirs.

    Raises:
        DataError: there is no such label, or none is left.
    """
    labels = manifest.column("label").unique().drop_null().to_pylist()
    kept = kept_labels(labels, left_out if complete else set(left_out) & set(labels))
    return manifest.filter(pc.is_in(manifest.column("label"), pa.array([*kept, None])))


def kept_labels(labels: Sequence[str], left_out: Iterable[str]) -> list[str]:
    """Return ``labels`` without those of ``left_out``.

    Raises:
        DataError: a label to be left out is not there, or none is left.
    """
    for label in left_out:
        if label not in labels:
            raise DataError(f"data.leave_out: no clip has the label {label!r}; {nearest(label, labels)}")
    kept = [label for label in labels if label not in left_out]
    if not kept:
        raise DataError("data.leave_out names every label of the data; nothing is left to learn")
    return kept


def deal_ungrouped(manifest: pa.Table, seed: int) -> pa.Table:
    """Give a group to the clips that have none: dealt out evenly, in random order.

    Clips of the official split go to groups that have clips in the same part of it, so that nobody is in two parts.

    Args:
        seed: the run's.

    Raises:
        DataError: no clip has a group.
    """
    groups = np.array(manifest.column("group").to_pylist(), dtype=object)
    split = np.array(manifest.column("split").to_pylist(), dtype=object)
    nobodys = np.array([group is None for group in groups], bool)
    if nobodys.all():
        raise DataError("data.ungrouped=deal: no clip has a group that the others could go to; set data.ungrouped=keep")
    rng = generator(seed, 0, "", "ungrouped")
    for part in sorted(set(split[nobodys]), key=str):
        clips = rng.permutation(np.flatnonzero(nobodys & (split == part)))
        takers = groups[~nobodys & (split == part)]
        names = rng.permutation(natural_order(list(set(takers if len(takers) else groups[~nobodys]))))
        groups[clips] = names[np.arange(len(clips)) % len(names)]
    place = manifest.column_names.index("group")
    return manifest.set_column(place, "group", pa.array(groups.tolist(), pa.string()))
