"""Leave out: remove clips of unwanted labels from the list, replace labels, and assign groups to clips without a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.data.steps.listing import natural_order


def leave_out_labels(manifest: pa.Table, excluded: Sequence[str], complete: bool) -> pa.Table:
    """Remove the clips of the excluded labels from a list.

    Args:
        excluded: the labels, ``data.leave_out``.
        complete: whether the list has all clips of the federation, so that it must contain every excluded label.

    Raises:
        DataError: no clip has an excluded label, or all labels are excluded.
    """
    labels = manifest.column("label").unique().drop_null().to_pylist()
    remaining = exclude_labels(labels, excluded if complete else set(excluded) & set(labels))
    return manifest.filter(pc.is_in(manifest.column("label"), pa.array([*remaining, None])))


def exclude_labels(labels: Sequence[str], excluded: Iterable[str]) -> list[str]:
    """Return ``labels`` without the labels in ``excluded``.

    Raises:
        DataError: an excluded label is not in ``labels``, or no label remains.
    """
    for label in excluded:
        if label not in labels:
            raise DataError(f"data.leave_out: no clip has the label {label!r}. {nearest(label, labels)}")
    remaining = [label for label in labels if label not in excluded]
    if not remaining:
        raise DataError("data.leave_out names every label of the data. Keep at least one to learn")
    return remaining


def replace_labels(manifest: pa.Table, column: str) -> pa.Table:
    """Replace the labels of a list by the values of a column (``data.label_from``). A clip without a value becomes unlabelled.

    Raises:
        DataError: the list lacks the column, or the column has no value.
    """
    if column not in manifest.column_names:
        raise DataError(
            f"data.label_from: the recordings have no column {column!r}. {nearest(column, manifest.column_names)}"
        )
    labels = manifest.column(column).cast(pa.string())
    if labels.null_count == len(labels):
        raise DataError(f"data.label_from: no clip has a value in column {column!r}. Fill it, or choose another column")
    return manifest.set_column(manifest.column_names.index("label"), "label", labels)


def deal_ungrouped(manifest: pa.Table, seed: int) -> pa.Table:
    """Deal the clips without a group evenly to the groups, in random order.

    A clip goes to a group with clips in the same official split, so that dealing puts no group into a second split.

    Args:
        seed: the run's.

    Raises:
        DataError: no clip has a group.
    """
    groups = np.array(manifest.column("group").to_pylist(), dtype=object)
    splits = np.array(manifest.column("split").to_pylist(), dtype=object)
    ungrouped = np.array([group is None for group in groups], bool)
    if ungrouped.all():
        raise DataError("data.ungrouped=deal: no clip has a group. Set data.ungrouped=keep, or fill the column group")
    rng = generator(seed, 0, "", "ungrouped")
    for split in sorted(set(splits[ungrouped]), key=str):
        clips = rng.permutation(np.flatnonzero(ungrouped & (splits == split)))
        takers = groups[~ungrouped & (splits == split)]
        names = rng.permutation(natural_order(list(set(takers if len(takers) else groups[~ungrouped]))))
        groups[clips] = names[np.arange(len(clips)) % len(names)]
    index = manifest.column_names.index("group")
    return manifest.set_column(index, "group", pa.array(groups.tolist(), pa.string()))
