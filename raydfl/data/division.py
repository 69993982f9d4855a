"""Division: which clips a data set has, and which client or server has which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydfl.core.errors import DataError
from raydfl.core.progress import Progress
from raydfl.core.seeds import generator
from raydfl.data.listing import deal_ungrouped, kept_labels
from raydfl.data.partition import Partition, natural_order, partition_clips
from raydfl.data.pools import NO_LABEL, TRAIN, UNLABELLED, choose_pools, deal_pools
from raydfl.data.remote import fetch_recordings
from raydfl.data.settings import DataSettings
from raydfl.data.split import Split, hold_out, split_clips


@dataclass(frozen=True)
class Division:
    """Who has which clips. Clips are numbered as in the manifest."""

    labels: np.ndarray
    """int64 [clips of the manifest]."""
    split: Split
    partition: Partition
    held_out: np.ndarray
    """bool, one for each of the partition's rows: the client's own validation."""
    pool: np.ndarray
    """int64, one for each of the partition's rows: number of its pool."""
    pools: tuple[str, ...]
    """Names of the pools."""


def list_clips(
    data: DataSettings, seed: int, progress: Progress | None = None, complete: bool = True
) -> tuple[pa.Table, list[str]]:
    """List the configured data set: its manifest and the names of its classes; no clip is opened.

    What is behind a URI is copied first.

    Args:
        seed: the run's: it decides to whom ``data.ungrouped: deal`` deals.
        complete: whether these are all clips of the federation, so that a label to be left out must be among theirs.

    Raises:
        ConfigError: options that the data set does not take.
        DataError: recordings that are not there, or a list that cannot be used.
    """
    for uri in data.uris.values():
        fetch_recordings(uri, data.cache, progress)
    manifest = data.source.open().manifest()
    labels = natural_order(manifest.column("label").unique().drop_null().to_pylist())
    if not labels:
        raise DataError("no clip has a label, so nothing says what the classes are")
    if data.leave_out:
        labels = kept_labels(labels, data.leave_out if complete else set(data.leave_out) & set(labels))
        manifest = manifest.filter(pc.is_in(manifest.column("label"), pa.array([*labels, None])))
    if data.ungrouped == "deal" and manifest.column("group").null_count:
        manifest = deal_ungrouped(manifest, seed)
    return manifest, labels


def divide(
    manifest: pa.Table,
    classes: Sequence[str],
    data: DataSettings,
    seed: int,
    complete: bool = True,
    usable: np.ndarray | None = None,
) -> Division:
    """Divide the clips among the clients.

    Args:
        complete: whether these are all clips of the federation, so that a class without clips is a mistake.
        usable: the clips that can be read, rows of the manifest (int64, ascending); ``None``: all.

    Raises:
        DataError: a split or partition that the recordings do not allow.
    """
    usable = np.arange(manifest.num_rows) if usable is None else usable
    position: dict[str | None, int] = {None: NO_LABEL} | {name: number for number, name in enumerate(classes)}
    labels = np.array([position[label] for label in manifest.column("label").to_pylist()], np.int64)
    table = manifest if len(usable) == manifest.num_rows else manifest.take(pa.array(usable))
    split = split_clips(table, data.split, seed)
    own = labels[usable]
    pools = choose_pools(table, split.train, own, classes, data.pools, data.unlabelled, seed)
    if [*pools] == [TRAIN]:
        partition = partition_clips(table, split.train, own, data.partition, seed)
        pool = np.zeros(len(partition.rows), np.int64)
    else:
        parts = {name: settings.partition for name, settings in data.pools.items()}
        if data.unlabelled is not None:
            parts[UNLABELLED] = data.unlabelled.partition
        partition, pool = deal_pools(table, pools, own, data.partition, parts, seed)
    known = [
        rows[own[rows] != NO_LABEL] for rows in (split.validation, split.test)
    ]  # nothing can be measured on the others
    split = Split(usable[split.train], usable[known[0]], usable[known[1]])
    partition = Partition(
        partition.ids, usable[partition.rows], partition.offsets, partition.groups, partition.group_of
    )
    if complete:
        _check_classes(classes, labels, usable, split, partition)
    held_out = np.zeros(len(partition.rows), bool)
    if data.split.validation:
        for client_id, start, stop in zip(partition.ids, partition.offsets, partition.offsets[1:], strict=False):
            rng = generator(seed, 0, client_id, "local validation")
            first = int(np.count_nonzero(pool[start:stop] == 0))  # a client's first pool comes first
            held_out[start : start + first] = hold_out(first, data.split.validation, rng)
    return Division(labels, split, partition, held_out, pool, tuple(pools))


def _check_classes(
    classes: Sequence[str], labels: np.ndarray, usable: np.ndarray, split: Split, partition: Partition
) -> None:
    """Refuses a class that no client could learn."""

    def count(rows: np.ndarray) -> np.ndarray:
        return np.bincount(labels[rows][labels[rows] >= 0], minlength=len(classes))

    for number in np.flatnonzero(count(partition.rows) == 0):
        raise DataError(
            f"no client has a clip of label {classes[int(number)]!r}: of its {np.sum(labels == number)} clips "
            f"{count(usable)[number]} can be read, {count(split.test)[number]} are in the test set and "
            f"{count(split.validation)[number]} in the server's validation set; choose data.split or data.partition "
            "differently, or leave the label out of the data"
        )
