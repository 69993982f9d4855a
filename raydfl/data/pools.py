"""Pools: named sets of training clips, each dealt to the clients by itself.

Without pools a client has its training clips and nothing else. With them, the first pool is what a method trains on unless it
makes a plan of its own (:class:`raydfl.training.plan.Plan`); a method for it draws from all by name. Two settings make pools:

- ``data.unlabelled`` hides the labels of most clips: pools ``labelled`` and ``unlabelled``. Clips without a label in the manifest
  are in the second, too.
- ``data.pools`` chooses clips by the values of a column: ``{normal: {column: condition, values: [normal]}, ...}``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from raydfl.core.errors import DataError, nearest
from raydfl.core.seeds import generator
from raydfl.core.settings import Settings
from raydfl.data.partition import Partition, PartitionSettings, natural_order, partition_clips

TRAIN, LABELLED, UNLABELLED = "train", "labelled", "unlabelled"

NO_LABEL = -100
"""The label of an example without one: PyTorch's ``cross_entropy`` leaves it out."""

HIDDEN_LABEL = "hidden_label"
"""The column with the true label of an example whose label is hidden (else -1): to measure with, never to learn from."""


class UnlabelledSettings(Settings):
    """Hidden labels: pools ``labelled`` and ``unlabelled``."""

    keep: Annotated[
        float | None,
        Field(
            gt=0, le=1, description="Share of each label's training clips that keep their label, rounded down. 0 to 1."
        ),
    ] = None
    keep_clips: Annotated[
        int | None, Field(ge=1, description="Training clips of each label that keep it, in place of keep.")
    ] = None
    use: Annotated[
        float, Field(ge=0, le=1, description="Share of the other clips that are used, without their labels. 0 to 1.")
    ] = 1.0
    partition: Annotated[
        PartitionSettings | None,
        Field(description="How clips without labels are dealt to clients. null: by data.partition, like the others."),
    ] = None

    @model_validator(mode="after")
    def _one_way(self) -> UnlabelledSettings:
        if self.keep is not None and self.keep_clips is not None:
            raise ValueError("give either keep (a share) or keep_clips (a number for each label)")
        return self


class PoolSettings(Settings):
    """Training clips with certain values in a column."""

    column: Annotated[str, Field(description="A column of the manifest: label, condition, domain ...")]
    values: Annotated[
        tuple[str | int | float, ...],
        Field(min_length=1, description="Clips with one of these values are in the pool."),
    ]
    partition: Annotated[
        PartitionSettings | None, Field(description="How the pool is dealt to clients. null: by data.partition.")
    ] = None


def choose_pools(
    manifest: pa.Table,
    rows: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    pools: Mapping[str, PoolSettings],
    unlabelled: UnlabelledSettings | None,
    seed: int,
) -> dict[str, np.ndarray]:
    """Return which training clips are in which pool: int64 rows, ascending, by the pool's name.

    Args:
        manifest: with the columns that the settings name.
        rows: int64: the training clips.
        labels: int64 [all rows of the manifest]: class indices, :data:`NO_LABEL` for none.
        classes: names of the classes.
        pools: ``data.pools``.
        unlabelled: ``data.unlabelled``.
        seed: the run's.

    Raises:
        DataError: a column or value that is not there, a pool without clips, a clip in two pools, a label of which no clip
            keeps it, or clips without a label where nothing says what to do with them.
    """
    if unlabelled is not None:
        return _hidden(rows, labels, classes, unlabelled, seed)
    without = np.flatnonzero(labels == NO_LABEL)
    if len(without):
        raise DataError(
            f"{len(without)} of {len(labels)} clips have no label, the first {manifest.column('clip')[int(without[0])]}; label "
            f"them, leave them out of the manifest, or train on them as they are with data.unlabelled='{{}}'"
        )
    found: dict[str, np.ndarray] = {}
    for name, settings in pools.items():
        chosen = rows[_with_values(manifest, rows, name, settings)]
        for other, taken in found.items():
            both = np.intersect1d(chosen, taken)
            if len(both):
                clip = manifest.column("clip")[int(both[0])]
                raise DataError(
                    f"data.pools: {len(both)} clips are both in {other!r} and in {name!r}, the first {clip}"
                )
        found[name] = chosen
    return found or {TRAIN: rows}


def _with_values(manifest: pa.Table, rows: np.ndarray, name: str, settings: PoolSettings) -> np.ndarray:
    """Return which rows are in a pool: bool [rows]."""
    if settings.column not in manifest.column_names:
        hint = nearest(settings.column, manifest.column_names)
        raise DataError(f"data.pools.{name}: the recordings have no column {settings.column!r}; {hint}")
    texts = np.array([str(value) for value in manifest.column(settings.column).take(pa.array(rows)).to_pylist()])
    there = sorted(set(texts.tolist()))
    for value in settings.values:
        if str(value) not in there:
            raise DataError(
                f"data.pools.{name}: no training clip has {str(value)!r} in column {settings.column!r}; "
                f"{nearest(str(value), there)}"
            )
    return np.isin(texts, [str(value) for value in settings.values])


def _hidden(
    rows: np.ndarray, labels: np.ndarray, classes: Sequence[str], settings: UnlabelledSettings, seed: int
) -> dict[str, np.ndarray]:
    rng = generator(seed, 0, "", "unlabelled")
    own = labels[rows]
    kept = np.zeros(len(rows), bool)
    for number, name in enumerate(classes):
        members = np.flatnonzero(own == number)
        count = len(members)
        if settings.keep is not None:
            count = int(settings.keep * count + 1e-9)
        elif settings.keep_clips is not None:
            count = min(settings.keep_clips, count)
        if len(members) and not count:
            raise DataError(
                f"data.unlabelled: keep {settings.keep} of {len(members)} training clips of label {name!r} is none; keep at least "
                f"{1 / len(members):.2g}, or keep_clips=1 of each label"
            )
        kept[rng.permutation(members)[:count]] = True
    if not kept.any():
        raise DataError("data.unlabelled: no training clip has a label, so nothing says what the classes are")
    others = rng.permutation(rows[~kept])
    used = np.sort(others[: int(settings.use * len(others) + 1e-9)])
    if settings.use and not len(used) and settings.keep != 1:  # a share of 1 was asked for
        raise DataError(
            f"data.unlabelled: the pool unlabelled is empty at every client: {len(others)} of {len(rows)} training clips are "
            f"without a label, and data.unlabelled.use={settings.use:g} of them is none; hide labels with keep or keep_clips"
        )
    return {LABELLED: rows[kept], UNLABELLED: used}


def deal_pools(
    manifest: pa.Table,
    pools: Mapping[str, np.ndarray],
    labels: np.ndarray,
    partition: PartitionSettings,
    own: Mapping[str, PartitionSettings | None],
    seed: int,
) -> tuple[Partition, np.ndarray]:
    """Deal each pool to the clients by itself.

    Args:
        manifest: of all clips.
        pools: rows by pool, as :func:`choose_pools` returns them.
        labels: int64 [all rows of the manifest].
        partition: ``data.partition``.
        own: partitions that pools have for themselves.
        seed: the run's.

    Returns:
        The partition of all pools' clips, and int64 [its rows]: the number of each one's pool. Within a client its pools
        follow one another.

    Raises:
        DataError: a partition that the clips do not allow, or clients with fewer clips in all than ``partition.minimum``.
    """
    parts = []
    for number, (name, rows) in enumerate(pools.items()):
        settings = (own.get(name) or partition).model_copy(update={"minimum": 0})
        if len(rows):
            parts.append((number, partition_clips(manifest, rows, labels, settings, seed, "" if number == 0 else name)))
    ids, places = _joined([part.ids for _, part in parts])
    groups, group_places = _joined([part.groups for _, part in parts])
    group_of = np.full(len(ids), -1, np.int32)
    owner, pool, row = [], [], []
    for (number, part), place, group_place in zip(parts, places, group_places, strict=True):
        owner.append(np.repeat(place, np.diff(part.offsets)))
        pool.append(np.full(len(part.rows), number))
        row.append(part.rows)
        grouped = part.group_of >= 0
        group_of[place[grouped]] = group_place[part.group_of[grouped]]
    owners, numbers, everything = np.concatenate(owner), np.concatenate(pool), np.concatenate(row)
    counts = np.bincount(owners, minlength=len(ids))
    if counts.min() < partition.minimum:
        least = int(counts.argmin())
        raise DataError(
            f"data.partition: client {ids[least]!r} gets {counts[least]} training clips in all pools together, fewer than "
            f"data.partition.minimum {partition.minimum}; take fewer clients or a smaller minimum"
        )
    order = np.lexsort((everything, numbers, owners))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Partition(ids, everything[order], offsets, groups, group_of), numbers[order]


def _joined(names: Sequence[Sequence[str]]) -> tuple[list[str], list[np.ndarray]]:
    """Return all the names that some sequences have, in natural order, and of each sequence their positions there: int64."""
    everything = natural_order(list(dict.fromkeys(itertools.chain(*names))))  # mostly in order already
    place = {name: number for number, name in enumerate(everything)}
    return everything, [np.array([place[name] for name in each], np.int64) for each in names]
