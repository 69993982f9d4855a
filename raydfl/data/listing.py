"""Changes to a data set's list of clips before it is divided: labels left out, clips dealt out, columns as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.data.partition import natural_order


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


def column_codes(manifest: pa.Table, name: str) -> tuple[np.ndarray, list[str]]:
    """Return a column as numbers, int32 [clips], and the values that they stand for, in natural order.

    Raises:
        DataError: there is no such column, or a clip has no value in it.
    """
    if name not in manifest.column_names:
        raise DataError(f"data.columns: the recordings have no column {name!r}; {nearest(name, manifest.column_names)}")
    column = manifest.column(name)
    if column.null_count:
        clip = manifest.column("clip")[pc.index(pc.is_null(column), True).as_py()]
        raise DataError(
            f"data.columns: {column.null_count} of {len(column)} clips have no value in column {name!r}, the first {clip}; give "
            f"them one, or leave the column out"
        )
    texts = [str(value) for value in column.to_pylist()]
    values = natural_order(list(set(texts)))
    code = {value: number for number, value in enumerate(values)}
    return np.array([code[text] for text in texts], np.int32), values
